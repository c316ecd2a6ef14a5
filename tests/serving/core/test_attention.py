"""Attention over sequences of packed tokens, against attention of each sequence."""

import pytest
import torch

from patchedserve.serving.core.attention import attend, attend_sequences

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
