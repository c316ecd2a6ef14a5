"""kernels/qk_norm_rotary.py compared with both RMSNorms and diffusers' rotary embedding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.normalization import RMSNorm

from patchedserve.kernels.qk_norm_rotary import qk_norm_rotary

from .batches import DTYPES
from .conftest import RunTriton
from .counted import loaded_bytes

EPS = 1e-6
HEADS = 3


def _given(
    num_tokens: int, width: int, dtype: torch.dtype, *, has_norm: bool = True, has_rotary: bool = True
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None, tuple[torch.Tensor, torch.Tensor] | None]:
    """Return random qkv, weights and angles. The angles of the two elements of a pair differ, as they may."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(num_tokens, 3, HEADS, width, generator=generator).to(dtype)
    query, key = 1 + torch.randn(2, width, generator=generator).to(dtype) / 4
    angles = 6 * torch.rand(num_tokens, width, generator=generator)
    return qkv, (query, key) if has_norm else None, (angles.cos(), angles.sin()) if has_rotary else None


def _expected(
    qkv: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor] | None,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    norms: type[RMSNorm | torch.nn.RMSNorm] = RMSNorm,
) -> torch.Tensor:
    parts = list(qkv.unbind(1))
    for place in range(2):
        if weights is not None:
            norm = norms(qkv.shape[3], EPS)
            norm.weight = torch.nn.Parameter(weights[place], requires_grad=False)
            parts[place] = norm(parts[place])
        if rotary is not None:
            parts[place] = apply_rotary_emb(parts[place][None], rotary, sequence_dim=1)[0]  # type: ignore[arg-type]
    return torch.stack(parts, 1)


@pytest.mark.parametrize("norms", [RMSNorm, torch.nn.RMSNorm])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "width", "has_norm", "has_rotary"),
    [(5, 64, True, True), (40, 128, True, True), (3, 24, True, True), (7, 64, True, False), (7, 32, False, True)],
)
def test_equals_the_modules(
    num_tokens: int,
    width: int,
    has_norm: bool,
    has_rotary: bool,
    dtype: torch.dtype,
    norms: type[RMSNorm | torch.nn.RMSNorm],
    run_triton: RunTriton,
) -> None:
    qkv, weights, rotary = _given(num_tokens, width, dtype, has_norm=has_norm, has_rotary=has_rotary)
    expected, twice = _expected(qkv, weights, rotary, norms), norms is RMSNorm
    # Sums of squares are added in another order, which may change the last bit.
    eps = torch.finfo(dtype).eps
    for found in (
        run_triton(qk_norm_rotary, qkv.clone(), weights, EPS, rotary, rounds_twice=twice),
        qk_norm_rotary(qkv.clone(), weights, EPS, rotary, rounds_twice=twice),
    ):
        torch.testing.assert_close(found, expected, rtol=2 * eps, atol=4 * eps)
        assert torch.equal(found[:, 2], qkv[:, 2]), "values have changed"


def test_works_in_place_on_part_of_a_wider_projection() -> None:
    qkv, weights, rotary = _given(5, 16, torch.float32)
    packed = torch.zeros(5, 3 * HEADS * 16 + 8)
    packed[:, : 3 * HEADS * 16] = qkv.flatten(1)
    own = packed[:, : 3 * HEADS * 16].view(5, 3, HEADS, 16)
    assert qk_norm_rotary(own, weights, EPS, rotary) is own
    torch.testing.assert_close(packed[:, : 3 * HEADS * 16].view_as(qkv), _expected(qkv, weights, rotary))
    assert not packed[:, 3 * HEADS * 16 :].any()


@pytest.mark.skipif(torch.cuda.is_available(), reason="bytes are counted in triton's interpreter")
def test_queries_and_keys_are_read_once(run_triton: RunTriton) -> None:
    qkv, weights, rotary = _given(40, 64, torch.float16)
    loads = run_triton(loaded_bytes, qk_norm_rotary, qkv, weights, EPS, rotary)
    num_programs = 2 * HEADS * 2  # blocks of 32 tokens, each with its weights
    assert loads["fp16"] == qkv[:, :2].numel() * 2 + num_programs * 64 * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda qkv, weights, rotary: (qkv[:, :2], weights, rotary), "qkv has shape"),
        (lambda qkv, weights, rotary: (qkv.transpose(0, 2), weights, rotary), "qkv has shape"),
        (lambda qkv, weights, rotary: (qkv.double(), weights, rotary), "x is torch.float64"),
        (lambda qkv, weights, rotary: (qkv, (weights[0].half(), weights[1]), rotary), "a weight is"),
        (lambda qkv, weights, rotary: (qkv, weights, (rotary[0][:2], rotary[1])), "rotary is"),
    ],
)
def test_invalid_arguments_are_refused(change: Callable[..., Any], message: str) -> None:
    qkv, weights, rotary = change(*_given(5, 16, torch.float32))
    with pytest.raises(ValueError, match=message):
        qk_norm_rotary(qkv, weights, EPS, rotary)
