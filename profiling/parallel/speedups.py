"""How many times as fast several GPUs draw one image: as published, modelled, or measured. No torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...data.errors import UsageError
from ...data.models.published import published_config
from ...data.records import read_json
from ...data.resolution import RESOLUTION_MULTIPLE, parse
from ...data.tables.published import printed_figures
from ...serving.parallel.cost import Call, Cost, Share
from ...serving.parallel.latency_model import Link, ParallelLatency
from ...serving.parallel.strips import Strips
from ...serving.simulator.distrifusion import PUBLISHED, Points, Speedups

_NUM_STEPS, _TEXT_LENGTH, _ELEMENT_BYTES = 50, 77, 2
_MOST_RANKS = 8
_WAYS = ("cfg", "sync", "displaced")


def read_speedups(source: str) -> Speedups:
    """What a user names: `published`, `model`, or results of `psctl bench parallel` with commas between.

    Raises:
        UsageError: a file is missing, or is no such result.
    """
    if source == "published":
        return PUBLISHED
    return modelled() if source == "model" else measured([Path(part.strip()) for part in source.split(",")])


def modelled(link: Link | None = None) -> Speedups:
    """SDXL on up to 8 GPUs by the latency model, at the sizes of which DistriFusion prints what it is fitted to."""
    cost = Cost.of(published_config("sdxl"))
    alone: dict[str, dict[int, float]] = {}
    for figure in printed_figures("distrifusion"):
        if figure.quantity == "latency_nocomm_s":
            alone.setdefault(figure.resolution, {})[figure.num_ranks] = figure.value / _NUM_STEPS
    points: dict[int, Points] = {1: ((1024 * 1024, 1.0),)}
    for num_ranks in range(2, _MOST_RANKS + 1):
        found = []
        for name, times in alone.items():
            size = parse(name)
            latency = ParallelLatency.fit(times, link)
            call = Call(size.height // RESOLUTION_MULTIPLE, size.width // RESOLUTION_MULTIPLE, _TEXT_LENGTH)
            strips = Strips.of(call.height, cost.levels.unit, (1.0,) * num_ranks)
            most = max(
                cost.received(call, Share(strips, place), "all").num_bytes(_ELEMENT_BYTES) for place in range(num_ranks)
            )
            displaced_s = latency.step_s("displaced", num_ranks, most)
            found.append((size.pixels, latency.step_s("nocomm", 1, 0) / displaced_s))
        points[num_ranks] = tuple(sorted(found))
    return Speedups(points, "the latency model")


def measured(files: Sequence[Path]) -> Speedups:
    """Of the fastest way of each size that was measured.

    Raises:
        UsageError: a file is missing, or is no result of `psctl bench parallel`.
    """
    points: dict[int, Points] = {1: ((1024 * 1024, 1.0),)}
    for file in files:
        content = read_json(file, "the result of psctl bench parallel")
        try:
            if content["kind"] != "bench-parallel" or content["parallel"].startswith("virtual:"):
                raise UsageError(f"{file}: is not what psctl bench parallel has measured on real ranks")
            points[int(content["parallel"])] = tuple(sorted(map(_point, content["rows"])))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UsageError(f"{file}: is not a result of psctl bench parallel: {error}") from error
    return Speedups(points, ", ".join(file.name for file in files))


def _point(row: dict[str, Any]) -> tuple[int, float]:
    """Pixels and the largest speed-up of a row."""
    speedups = [float(side["speedup"]) for name, side in row["sides"].items() if name in _WAYS]
    return parse(row["resolution"]).pixels, max(speedups)
