"""Attention over sequences of packed tokens, and norms and rotation in one kernel, against torch and diffusers."""

from unittest import mock

import pytest
import torch
from diffusers.models.normalization import RMSNorm
from torch import nn

from patchedserve.serving.core import attention
from patchedserve.serving.core.attention import attend, attend_sequences, normed

HEADS, WIDTH = 2, 16


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scale", [None, 0.5])
def test_each_sequence_attends_to_its_own_keys(scale: float | None) -> None:
    num_queries, num_keys = [3, 5, 0, 4], [7, 2, 0, 0]
    query = _random(sum(num_queries), HEADS, WIDTH)
    key, value = (_random(sum(num_keys) + 3, HEADS, WIDTH, seed=seed) for seed in (1, 2))  # three are of no sequence
    ends = [torch.tensor([0, *counts]).cumsum(0).int() for counts in (num_queries, num_keys)]
    found = attend_sequences(query, key, value, (ends[0], ends[1]), (5, 7), scale)
    parts = []
    for queries, keys, count in zip(
        query.split(num_queries),
        zip(*(each[:9].split(num_keys) for each in (key, value)), strict=True),
        num_keys,
        strict=True,
    ):
        own = [each[None] for each in (queries, *keys)]
        parts.append(attend(*own, scale)[0] if count else torch.zeros_like(queries))  # type: ignore[arg-type]
    torch.testing.assert_close(found, torch.cat(parts))


@pytest.mark.parametrize("norms", [RMSNorm, nn.RMSNorm, None])
@pytest.mark.parametrize("has_rotary", [True, False])
def test_fused_norms_and_rotation_equal_the_modules(norms: type[RMSNorm | nn.RMSNorm] | None, has_rotary: bool) -> None:
    qkv, angles = _random(6, 3, HEADS, WIDTH), _random(6, WIDTH, seed=1)
    own: list[nn.Module | None] = [None, None]
    if norms is not None:
        own = [norms(WIDTH, 1e-6), norms(WIDTH, 1e-6)]
        for norm in own:
            norm.weight = nn.Parameter(1 + _random(WIDTH, seed=2), requires_grad=False)  # type: ignore[union-attr]
    rotary = (angles.cos(), angles.sin()) if has_rotary else None
    expected = normed(qkv, own[0], own[1], rotary, kernels="torch")
    with mock.patch.object(attention, "use_triton", return_value=True):
        given = qkv.clone()
        found = normed(given, own[0], own[1], rotary)
    assert found is given
    torch.testing.assert_close(found, expected)


def test_norms_that_the_kernel_does_not_compute_run_as_they_are() -> None:
    qkv = _random(6, 3, HEADS, WIDTH)
    with_bias, narrow = RMSNorm(WIDTH, 1e-6, bias=True), RMSNorm(WIDTH, 1e-6).double()
    assert with_bias.bias is not None
    with_bias.bias.data.fill_(1.0)
    for query, key in ((with_bias, with_bias), (None, RMSNorm(WIDTH, 1e-6)), (nn.LayerNorm(WIDTH),) * 2, (narrow,) * 2):
        expected = normed(qkv, query, key, kernels="torch")
        with mock.patch.object(attention, "use_triton", return_value=True):
            torch.testing.assert_close(normed(qkv, query, key), expected)
