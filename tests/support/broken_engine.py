"""Injects faults into the real patch engine, for the tests that show that the gates of CI would catch them.

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


class FaultCounter:
    """Counts how often a fault has had an effect; without any, a test would prove nothing."""

    def __init__(self) -> None:
        self.times = 0


@contextmanager
def broken_engine(fault: Fault) -> Iterator[FaultCounter]:
    """Inject a fault into the patch engine inside the block; models may be loaded before it or in it.

    Faults of norms, halos and neighbours need `order="patch"` and `strategy="stitch"`: only then do patches have their
    own. Faults that mix up requests take the value of the next request in the batch, and need several requests, which
    must be at different steps or of different sizes to differ at all.
    """
    counter = FaultCounter()
    # Cached packings of other blocks contain right or wrong neighbours.
    packing._pack_rows.cache_clear()
    try:
        with pytest.MonkeyPatch.context() as patch:
            _SWITCHES[fault](patch, counter)
            yield counter
    finally:
        packing._pack_rows.cache_clear()


def _group_norm_per_patch(patch: pytest.MonkeyPatch, counter: FaultCounter) -> None:
    """Normalise every patch by its own mean and deviation, as an engine that takes patches for images would."""
    stats, apply, stitch = leaves.group_norm_stats, leaves.group_norm_apply, leaves.group_norm_silu_stitch

    def each(x: torch.Tensor) -> torch.Tensor:
        return torch.arange(len(x), device=x.device)

    def wrong_stats(x: torch.Tensor, index: torch.Tensor, num_rows: int, *rest: Any, **options: Any) -> Any:
        counter.times += len(x) > num_rows
        return stats(x, each(x), len(x), *rest, **options)

    def wrong_apply(x: torch.Tensor, mean: Any, rstd: Any, weight: Any, bias: Any, index: Any, **options: Any) -> Any:
        return apply(x, mean, rstd, weight, bias, each(x), **options)

    def wrong_stitch(x: torch.Tensor, *known: Any, **options: Any) -> Any:
        mean, rstd, weight, bias, _, neighbours = known
        return stitch(x, mean, rstd, weight, bias, each(x), neighbours, **options)

    patch.setattr(leaves, "group_norm_stats", wrong_stats)
    patch.setattr(leaves, "group_norm_apply", wrong_apply)
    patch.setattr(leaves, "group_norm_silu_stitch", wrong_stitch)


def _zeroed_halos(patch: pytest.MonkeyPatch, counter: FaultCounter) -> None:
    """Make every convolution read zeros beyond its patch, as at the edge of an image."""
    gather, stitch = leaves.halo_gather, leaves.group_norm_silu_stitch

    def alone(neighbours: torch.Tensor) -> torch.Tensor:
        counter.times += bool((neighbours >= 0).any())
        return torch.full_like(neighbours, -1)

    def wrong_gather(x: torch.Tensor, neighbours: torch.Tensor, **options: Any) -> torch.Tensor:
        return gather(x, alone(neighbours), **options)

    def wrong_stitch(x: torch.Tensor, *known: Any, **options: Any) -> torch.Tensor:
        mean, rstd, weight, bias, index, neighbours = known
        return stitch(x, mean, rstd, weight, bias, index, alone(neighbours), **options)

    patch.setattr(leaves, "halo_gather", wrong_gather)
    patch.setattr(leaves, "group_norm_silu_stitch", wrong_stitch)


def _wrong_neighbours(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[pytest.MonkeyPatch, FaultCounter], None]:
    """Return a fault that changes the neighbour table of every level."""

    def switch(patch: pytest.MonkeyPatch, counter: FaultCounter) -> None:
        build = packing._patch_level

        def wrong(*known: Any) -> packing.Level:
            level = build(*known)
            assert level.neighbours is not None
            changed = change(level.neighbours)
            counter.times += not torch.equal(changed, level.neighbours)
            level.neighbours = changed
            return level

        patch.setattr(packing, "_patch_level", wrong)

    return switch


def _shuffled(neighbours: torch.Tensor) -> torch.Tensor:
    """Reorder the eight columns: the left neighbour is read as the upper one, and so on."""
    return neighbours[:, torch.randperm(8, generator=torch.Generator().manual_seed(0)).to(neighbours.device)]


def _without_east(neighbours: torch.Tensor) -> torch.Tensor:
    """Remove the right neighbour of every patch, as at the right edge of an image; the other seven are correct."""
    found = neighbours.clone()
    found[:, 4] = -1
    return found


def _statistics_of_another(patch: pytest.MonkeyPatch, counter: FaultCounter) -> None:
    """Normalise each image by the mean and deviation of the next request's image."""
    stats = leaves.group_norm_stats

    def wrong(*known: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        mean, rstd = stats(*known, **options)
        counter.times += len(mean) > 2
        # With guidance a request has two rows.
        return mean.roll(2, 0), rstd.roll(2, 0)

    patch.setattr(leaves, "group_norm_stats", wrong)


def _wrong_timestep(patch: pytest.MonkeyPatch, counter: FaultCounter) -> None:
    """Pass the denoiser the timestep of the previous step, from the second step of a request on."""

    def wrong(batch: SamplerBatch) -> torch.Tensor:
        late = [int(state.steps_done > 0) for state in batch._states]
        counter.times += any(late)
        rows = batch._request_rows - torch.tensor(late, device=batch._request_rows.device)
        return batch._timesteps.index_select(0, rows)

    patch.setattr(SamplerBatch, "timesteps", wrong)


def _timestep_of_another(patch: pytest.MonkeyPatch, counter: FaultCounter) -> None:
    """Pass the denoiser the timestep of the next request."""
    right = SamplerBatch.timesteps

    def wrong(batch: SamplerBatch) -> torch.Tensor:
        found = right(batch)
        counter.times += not torch.equal(found, found.roll(1))
        return found.roll(1)

    patch.setattr(SamplerBatch, "timesteps", wrong)


def _sigma_of_another(patch: pytest.MonkeyPatch, counter: FaultCounter) -> None:
    """Make the sampler take the next request's step, from that request's noise level to its next."""
    right = SamplerBatch._current

    def wrong(batch: SamplerBatch) -> Any:
        rows = batch._request_rows
        request = (batch._patch_rows[:, None] == rows).int().argmax(1)
        patch_rows, batch._patch_rows = batch._patch_rows, rows.roll(1)[request]
        steps_done = [state.steps_done for state in batch._states]
        counter.times += len(set(steps_done)) > 1
        try:
            return right(batch)
        finally:
            batch._patch_rows = patch_rows

    patch.setattr(SamplerBatch, "_current", wrong)


def _condition_of_another(key: str) -> Callable[[pytest.MonkeyPatch, FaultCounter], None]:
    """Return a fault that replaces this condition of each request in the batch by that of the next request."""

    def switch(patch: pytest.MonkeyPatch, counter: FaultCounter) -> None:
        build = PackedBatch.__init__

        def wrong(batch: PackedBatch, stepper: Any, active: Any, **options: Any) -> None:
            own = [prepared.conditioning for prepared in active]
            for prepared, mine, other in zip(active, own, [*own[1:], own[0]], strict=True):
                counter.times += not torch.equal(mine[key], other[key])
                prepared.conditioning = mine | {key: other[key]}
            try:
                build(batch, stepper, active, **options)
            finally:
                for prepared, mine in zip(active, own, strict=True):
                    prepared.conditioning = mine

        patch.setattr(PackedBatch, "__init__", wrong)

    return switch


_SWITCHES: dict[Fault, Callable[[pytest.MonkeyPatch, FaultCounter], None]] = {
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
