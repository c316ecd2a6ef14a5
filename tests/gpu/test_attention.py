"""Attention over sequences on a device: torch's Flash attention, whose ends are data, against attention of each."""

from itertools import pairwise

import pytest
import torch

from patchedserve.serving.core.attention import attend, attend_sequences

HEADS, LONGEST = 3, 400
FIRST, SECOND = ([256, 0, 100, 44], [300, 77, 0, 23]), ([10, 380, 1, 9], [10, 5, 385, 0])
"""Numbers of queries and of keys of each sequence, in batches of equal sums."""


def _ends(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


def _expected(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, num_queries: list[int], num_keys: list[int]
) -> torch.Tensor:
    parts = []
    spans = (pairwise(_ends(counts).tolist()) for counts in (num_queries, num_keys))
    for (start, end), (first, last) in zip(*spans, strict=True):
        queries, keys, values = (each.float()[None] for each in (query[start:end], key[first:last], value[first:last]))
        parts.append(attend(queries, keys, values)[0] if last > first else torch.zeros_like(queries[0]))
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [40, 64, 80, 160])
def test_sequences_attend_apart_also_in_replays(width: int, dtype: torch.dtype, cuda: str) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 400, HEADS, width, generator=generator).to(cuda, dtype)
    ends = _ends(FIRST[0]).to(cuda), _ends(FIRST[1]).to(cuda)
    attend_sequences(query, key, value, ends, (LONGEST, LONGEST))
    torch.cuda.synchronize()
    run = torch.cuda.CUDAGraph()
    with torch.cuda.graph(run):
        found = attend_sequences(query, key, value, ends, (LONGEST, LONGEST))
    for counts in (FIRST, SECOND):
        for buffer, each in zip(ends, counts, strict=True):
            buffer.copy_(_ends(each))
        run.replay()
        torch.testing.assert_close(found.float(), _expected(query, key, value, *counts), rtol=0.02, atol=0.02)
