"""Breaks the real patch engine on purpose, for the tests that show that the gates of CI would catch it.

The switch is this module: each fault replaces functions of `serving.patched` while a `with` block lasts. The engine
itself has no hook for it, so it costs nothing, and no command can reach it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import pytest
import torch

from patchedserve.serving.layout import packing
from patchedserve.serving.patched import leaves
from patchedserve.serving.samplers.batched import SamplerBatch

Fault = Literal["group norm per patch", "zeroed halos", "shuffled neighbours", "wrong timestep"]
FAULTS: tuple[Fault, ...] = get_args(Fault)


class Acted:
    """How often a fault has changed something: one that never did would prove nothing."""

    def __init__(self) -> None:
        self.times = 0


@contextmanager
def broken_engine(fault: Fault) -> Iterator[Acted]:
    """Let the patch engine work wrongly inside the block; models may be loaded before it or in it.

    All but the wrong timestep need `order="patch"` and `strategy="stitch"`: only there do patches have norms, halos
    and neighbours of their own.
    """
    acted = Acted()
    # Packings of other blocks hold neighbours that are right, or wrong.
    packing._pack_rows.cache_clear()
    try:
        with pytest.MonkeyPatch.context() as patch:
            _SWITCHES[fault](patch, acted)
            yield acted
    finally:
        packing._pack_rows.cache_clear()


def _group_norm_per_patch(patch: pytest.MonkeyPatch, acted: Acted) -> None:
    """Mean and deviation of every patch by itself, as an engine would have them that takes patches for images."""
    stats, apply, stitch = leaves.group_norm_stats, leaves.group_norm_apply, leaves.group_norm_silu_stitch

    def each(x: torch.Tensor) -> torch.Tensor:
        return torch.arange(len(x), device=x.device)

    def wrong_stats(x: torch.Tensor, index: torch.Tensor, num_rows: int, *rest: Any, **options: Any) -> Any:
        acted.times += len(x) > num_rows
        return stats(x, each(x), len(x), *rest, **options)

    def wrong_apply(x: torch.Tensor, mean: Any, rstd: Any, weight: Any, bias: Any, index: Any, **options: Any) -> Any:
        return apply(x, mean, rstd, weight, bias, each(x), **options)

    def wrong_stitch(x: torch.Tensor, *known: Any, **options: Any) -> Any:
        mean, rstd, weight, bias, _, neighbours = known
        return stitch(x, mean, rstd, weight, bias, each(x), neighbours, **options)

    patch.setattr(leaves, "group_norm_stats", wrong_stats)
    patch.setattr(leaves, "group_norm_apply", wrong_apply)
    patch.setattr(leaves, "group_norm_silu_stitch", wrong_stitch)


def _zeroed_halos(patch: pytest.MonkeyPatch, acted: Acted) -> None:
    """Every convolution reads zeros beyond its patch, as at the edge of an image."""
    gather, stitch = leaves.halo_gather, leaves.group_norm_silu_stitch

    def alone(neighbours: torch.Tensor) -> torch.Tensor:
        acted.times += bool((neighbours >= 0).any())
        return torch.full_like(neighbours, -1)

    def wrong_gather(x: torch.Tensor, neighbours: torch.Tensor, **options: Any) -> torch.Tensor:
        return gather(x, alone(neighbours), **options)

    def wrong_stitch(x: torch.Tensor, *known: Any, **options: Any) -> torch.Tensor:
        mean, rstd, weight, bias, index, neighbours = known
        return stitch(x, mean, rstd, weight, bias, index, alone(neighbours), **options)

    patch.setattr(leaves, "halo_gather", wrong_gather)
    patch.setattr(leaves, "group_norm_silu_stitch", wrong_stitch)


def _shuffled_neighbours(patch: pytest.MonkeyPatch, acted: Acted) -> None:
    """The eight columns of the neighbour table in another order: what lies to the left is read above, and so on."""
    build = packing._patch_level

    def wrong(*known: Any) -> packing.Level:
        level = build(*known)
        assert level.neighbours is not None
        order = torch.randperm(8, generator=torch.Generator().manual_seed(0)).to(level.neighbours.device)
        shuffled = level.neighbours[:, order]
        acted.times += not torch.equal(shuffled, level.neighbours)
        level.neighbours = shuffled
        return level

    patch.setattr(packing, "_patch_level", wrong)


def _wrong_timestep(patch: pytest.MonkeyPatch, acted: Acted) -> None:
    """From its second step on a request's denoiser is told the timestep of the step before."""

    def wrong(batch: SamplerBatch) -> torch.Tensor:
        late = [int(state.steps_done > 0) for state in batch._states]
        acted.times += any(late)
        rows = batch._request_rows - torch.tensor(late, device=batch._request_rows.device)
        return batch._timesteps.index_select(0, rows)

    patch.setattr(SamplerBatch, "timesteps", wrong)


_SWITCHES: dict[Fault, Callable[[pytest.MonkeyPatch, Acted], None]] = {
    "group norm per patch": _group_norm_per_patch,
    "zeroed halos": _zeroed_halos,
    "shuffled neighbours": _shuffled_neighbours,
    "wrong timestep": _wrong_timestep,
}
