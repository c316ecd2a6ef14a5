"""Runs one function on every rank of a virtual group."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from patchedserve.serving.parallel.context import CallText, Pass, StripContext, Team
from patchedserve.serving.parallel.group import VirtualEnd, VirtualGroup
from patchedserve.serving.parallel.options import NormOptions
from patchedserve.serving.parallel.strips import Strips

Found = TypeVar("Found")


def on_ranks(size: int, run: Callable[[VirtualEnd], Found], timeout_s: float = 60) -> list[Found]:
    """Return the function's result on each rank. Raises the error of the first rank that failed."""
    group = VirtualGroup(size)

    def held(rank: int) -> Found:
        with torch.inference_mode(), group.end(rank) as end:
            try:
                return run(end)
            except BaseException as error:
                group.abort(error)
                raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(held, rank) for rank in range(size)]
        return [future.result(timeout_s) for future in futures]


Leaf = Callable[[Tensor], Tensor]


def on_strips(
    whole: Tensor, strips: Strips, make: Callable[[StripContext], Leaf], *, halo: int = 0, **norms: Any
) -> Tensor:
    """Cut an image [rows, channels, height, width] into strips, run leaf modules on them, and join their results."""
    return in_calls([whole], strips, make, [()], halo=halo, **norms)[0]


def in_calls(
    images: Sequence[Tensor],
    strips: Strips,
    make: Callable[[StripContext], Leaf],
    displaced: Sequence[Sequence[int]],
    *,
    halo: int = 0,
    **norms: Any,
) -> list[Tensor]:
    """Do the same for one image after another; `displaced` contains the rows that use data of the previous call."""
    rows = tuple((row, 0) for row in range(len(images[0])))

    def run(end: VirtualEnd) -> list[Tensor]:
        context, found = StripContext(), []
        leaf = make(context)
        start, stop = strips.starts[end.rank : end.rank + 2]
        for number, whole in enumerate(images):
            flags = [row in displaced[number] for row in range(len(rows))]
            is_last = number + 1 == len(images)
            team = Team(end, tuple(range(strips.count)))
            last = (is_last,) * len(rows)
            context.begin(Pass(team, strips, rows, tuple(flags), last, norms=NormOptions(**norms)))
            own = whole[:, :, max(start - halo, 0) : stop + halo]
            context.begin_pass(own, CallText())
            found.append(leaf(own))
        return found

    by_rank = on_ranks(strips.count, run)
    return [torch.cat([found[number] for found in by_rank], 2) for number in range(len(images))]


def relative(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference over the largest magnitude."""
    assert found.shape == wanted.shape
    found, wanted = found.detach(), wanted.detach()
    return float((found - wanted).abs().max() / wanted.abs().max())
