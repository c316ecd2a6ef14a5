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
from patchedserve.serving.patched.stepper import PackedBatch
from patchedserve.serving.samplers.batched import SamplerBatch

Fault = Literal[
    "group norm per patch",
    "zeroed halos",
    "shuffled neighbours",
    "wrong timestep",
    "size of another request",
    "text of another request",
    "pooled text of another request",
    "timestep of another request",
    "sigma of another request",
    "halo of one edge zeroed",
    "statistics of another image",
]
FAULTS: tuple[Fault, ...] = get_args(Fault)


class Acted:
    """How often a fault has changed something: one that never did would prove nothing."""

    def __init__(self) -> None:
        self.times = 0


@contextmanager
def broken_engine(fault: Fault) -> Iterator[Acted]:
    """Let the patch engine work wrongly inside the block; models may be loaded before it or in it.

    Those of norms, halos and neighbours need `order="patch"` and `strategy="stitch"`: only there do patches have their
    own. Those of another request take it from the next one in the batch, and need several requests, which must be at
    different steps or of different sizes to differ at all.
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


def _wrong_neighbours(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[pytest.MonkeyPatch, Acted], None]:
    """The neighbour table of every level, changed."""

    def switch(patch: pytest.MonkeyPatch, acted: Acted) -> None:
        build = packing._patch_level

        def wrong(*known: Any) -> packing.Level:
            level = build(*known)
            assert level.neighbours is not None
            changed = change(level.neighbours)
            acted.times += not torch.equal(changed, level.neighbours)
            level.neighbours = changed
            return level

        patch.setattr(packing, "_patch_level", wrong)

    return switch


def _shuffled(neighbours: torch.Tensor) -> torch.Tensor:
    """The eight columns in another order: what lies to the left is read above, and so on."""
    return neighbours[:, torch.randperm(8, generator=torch.Generator().manual_seed(0)).to(neighbours.device)]


def _without_east(neighbours: torch.Tensor) -> torch.Tensor:
    """Nothing lies to the right of a patch, as at the right edge of an image; the other seven are right."""
    found = neighbours.clone()
    found[:, 4] = -1
    return found


def _statistics_of_another(patch: pytest.MonkeyPatch, acted: Acted) -> None:
    """Each image is normalised by the mean and deviation of the next request's."""
    stats = leaves.group_norm_stats

    def wrong(*known: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        mean, rstd = stats(*known, **options)
        acted.times += len(mean) > 2
        # With guidance a request has two rows.
        return mean.roll(2, 0), rstd.roll(2, 0)

    patch.setattr(leaves, "group_norm_stats", wrong)


def _wrong_timestep(patch: pytest.MonkeyPatch, acted: Acted) -> None:
    """From its second step on a request's denoiser is told the timestep of the step before."""

    def wrong(batch: SamplerBatch) -> torch.Tensor:
        late = [int(state.steps_done > 0) for state in batch._states]
        acted.times += any(late)
        rows = batch._request_rows - torch.tensor(late, device=batch._request_rows.device)
        return batch._timesteps.index_select(0, rows)

    patch.setattr(SamplerBatch, "timesteps", wrong)


def _timestep_of_another(patch: pytest.MonkeyPatch, acted: Acted) -> None:
    """The denoiser is told where the next request stands."""
    right = SamplerBatch.timesteps

    def wrong(batch: SamplerBatch) -> torch.Tensor:
        found = right(batch)
        acted.times += not torch.equal(found, found.roll(1))
        return found.roll(1)

    patch.setattr(SamplerBatch, "timesteps", wrong)


def _sigma_of_another(patch: pytest.MonkeyPatch, acted: Acted) -> None:
    """The sampler takes the step of the next request: from its noise level to its next."""
    right = SamplerBatch._current

    def wrong(batch: SamplerBatch) -> Any:
        rows = batch._request_rows
        request = (batch._patch_rows[:, None] == rows).int().argmax(1)
        patch_rows, batch._patch_rows = batch._patch_rows, rows.roll(1)[request]
        steps_done = [state.steps_done for state in batch._states]
        acted.times += len(set(steps_done)) > 1
        try:
            return right(batch)
        finally:
            batch._patch_rows = patch_rows

    patch.setattr(SamplerBatch, "_current", wrong)


def _condition_of_another(key: str) -> Callable[[pytest.MonkeyPatch, Acted], None]:
    """What is put into the batch as this condition of a request is that of the next."""

    def switch(patch: pytest.MonkeyPatch, acted: Acted) -> None:
        build = PackedBatch.__init__

        def wrong(batch: PackedBatch, stepper: Any, active: Any, **options: Any) -> None:
            own = [prepared.conditioning for prepared in active]
            for prepared, mine, other in zip(active, own, [*own[1:], own[0]], strict=True):
                acted.times += not torch.equal(mine[key], other[key])
                prepared.conditioning = mine | {key: other[key]}
            try:
                build(batch, stepper, active, **options)
            finally:
                for prepared, mine in zip(active, own, strict=True):
                    prepared.conditioning = mine

        patch.setattr(PackedBatch, "__init__", wrong)

    return switch


_SWITCHES: dict[Fault, Callable[[pytest.MonkeyPatch, Acted], None]] = {
    "group norm per patch": _group_norm_per_patch,
    "zeroed halos": _zeroed_halos,
    "shuffled neighbours": _wrong_neighbours(_shuffled),
    "wrong timestep": _wrong_timestep,
    "size of another request": _condition_of_another("time_ids"),
    "text of another request": _condition_of_another("text"),
    "pooled text of another request": _condition_of_another("pooled"),
    "timestep of another request": _timestep_of_another,
    "sigma of another request": _sigma_of_another,
    "halo of one edge zeroed": _wrong_neighbours(_without_east),
    "statistics of another image": _statistics_of_another,
}
