"""kernels/qk_norm_rotary.py compared with both RMSNorms and diffusers' rotary embedding, by itself and in `normed`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.normalization import RMSNorm
from torch import nn

from patchedserve.kernels.qk_norm_rotary import QkNorms, Rotary, qk_norm_rotary
from patchedserve.serving.core.attention import normed

from .batches import DTYPES
from .conftest import RunTriton
from .counted import loaded_bytes

EPS = 1e-6
HEADS = 3
Kind = type[RMSNorm | nn.RMSNorm] | None
in_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="bytes are counted in triton's interpreter")


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _norms_of(kind: Kind, width: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return modules that normalise queries and keys; None for none."""
    if kind is None:
        return None, None
    found = kind(width, EPS), kind(width, EPS)
    for seed, norm in enumerate(found, 1):
        norm.weight = nn.Parameter((1 + _random(width, seed=seed) / 4).to(dtype), requires_grad=False)
    return found


def _given(num_tokens: int, width: int, dtype: torch.dtype, kind: Kind) -> tuple[torch.Tensor, QkNorms | None, Rotary]:
    """Return random qkv, norms and angles. The angles of the two elements of a pair differ, as they may."""
    angles = 6 * _random(num_tokens, width, seed=3)
    query, key = _norms_of(kind, width, dtype)
    norms = None if kind is None else QkNorms(query.weight, key.weight, EPS, rounds_twice=kind is RMSNorm)
    return _random(num_tokens, 3, HEADS, width).to(dtype), norms, (angles.cos(), angles.sin())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "width", "kind", "has_rotary"),
    [
        (5, 64, RMSNorm, True),
        (40, 128, nn.RMSNorm, True),
        (3, 24, RMSNorm, True),
        (7, 64, nn.RMSNorm, False),
        (7, 64, RMSNorm, False),
        (7, 32, None, True),
    ],
)
def test_equals_the_modules(
    num_tokens: int, width: int, kind: Kind, has_rotary: bool, dtype: torch.dtype, run_triton: RunTriton
) -> None:
    qkv, norms, angles = _given(num_tokens, width, dtype, kind)
    rotary = angles if has_rotary else None
    expected = normed(qkv, *_norms_of(kind, width, dtype), rotary, kernels="torch")
    # Sums of squares are added in another order, which may change the last bit.
    eps = torch.finfo(dtype).eps
    for found in (
        run_triton(qk_norm_rotary, qkv.clone(), norms, rotary),
        qk_norm_rotary(qkv.clone(), norms, rotary),
        run_triton(normed, qkv.clone(), *_norms_of(kind, width, dtype), rotary),
    ):
        torch.testing.assert_close(found, expected, rtol=2 * eps, atol=4 * eps)
        assert torch.equal(found[:, 2], qkv[:, 2]), "values have changed"


def test_works_in_place_on_part_of_a_wider_projection() -> None:
    qkv, norms, rotary = _given(5, 16, torch.float32, RMSNorm)
    packed = torch.zeros(5, 3 * HEADS * 16 + 8)
    packed[:, : 3 * HEADS * 16] = qkv.flatten(1)
    own = packed[:, : 3 * HEADS * 16].view(5, 3, HEADS, 16)
    assert qk_norm_rotary(own, norms, rotary) is own
    torch.testing.assert_close(own, normed(qkv, *_norms_of(RMSNorm, 16, torch.float32), rotary, kernels="torch"))
    assert not packed[:, 3 * HEADS * 16 :].any()


def test_rows_that_are_parts_of_a_stream_are_normalised(run_triton: RunTriton) -> None:
    """The memory of the image tokens of several rows has the text of the next row between them."""
    stream, norms = _random(2, 7, 3, HEADS, 16), _norms_of(RMSNorm, 16, torch.float32)
    text, image = stream.split([3, 4], 1)
    for part in (text, image):
        torch.testing.assert_close(run_triton(normed, part, *norms), normed(part, *norms, kernels="torch"))


@in_interpreter
def test_queries_and_keys_are_read_once(run_triton: RunTriton) -> None:
    qkv, norms, rotary = _given(40, 64, torch.float16, RMSNorm)
    num_programs = 2 * HEADS * 2  # blocks of 32 tokens, each with its weights
    for dispatched in ((qk_norm_rotary, qkv, norms), (normed, qkv, *_norms_of(RMSNorm, 64, torch.float16))):
        loads = run_triton(loaded_bytes, *dispatched, rotary)
        assert loads["fp16"] == qkv[:, :2].numel() * 2 + num_programs * 64 * 2


@in_interpreter
def test_norms_that_the_kernel_does_not_compute_run_as_they_are(run_triton: RunTriton) -> None:
    qkv, own = _random(6, 3, HEADS, 16), RMSNorm(16, EPS)
    with_bias, other = RMSNorm(16, EPS, bias=True), RMSNorm(16, 0.1)
    assert with_bias.bias is not None
    with_bias.bias.data.fill_(1.0)
    mean = nn.LayerNorm(16)
    for query, key in ((with_bias, with_bias), (None, own), (own, other), (own, nn.RMSNorm(16, EPS)), (mean, mean)):
        expected = normed(qkv, query, key, kernels="torch")
        torch.testing.assert_close(run_triton(normed, qkv, query, key), expected)
        assert run_triton(loaded_bytes, normed, qkv, query, key) == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda qkv, norms, rotary: (qkv[:, :2], norms, rotary), "qkv has shape"),
        (lambda qkv, norms, rotary: (qkv.transpose(0, 2), norms, rotary), "qkv has shape"),
        (lambda qkv, norms, rotary: (qkv.double(), norms, rotary), "x is torch.float64"),
        (lambda qkv, norms, rotary: (qkv, norms._replace(query=norms.query.half()), rotary), "a weight is"),
        (lambda qkv, norms, rotary: (qkv, norms, (rotary[0][:2], rotary[1])), "rotary is"),
    ],
)
def test_invalid_arguments_are_refused(change: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        qk_norm_rotary(*change(*_given(5, 16, torch.float32, RMSNorm)))
