"""Speed-ups of several GPUs that draw one image: published, modelled or measured. This module imports no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...data.errors import UsageError
from ...data.models.published import published_config
from ...data.records import read_json
from ...data.resolution import parse
from ...serving.parallel.cost import Cost
from ...serving.parallel.latency_model import Link
from ...serving.simulator.distrifusion import ALONE, PUBLISHED, Points, Speedups
from ..steps.model_config import TEXT_LENGTH
from .accounting import latencies, printed_by_place
from .plan import AccountingPlan
from .ways import WAYS

_MAX_RANKS = 8


def read_speedups(source: str) -> Speedups:
    """Return the speed-ups that a user names: `published`, `model`, or comma-separated `psctl bench parallel` results.

    Raises:
        UsageError: a file is missing, or is not a result of `psctl bench parallel`.
    """
    if source == "published":
        return PUBLISHED
    return modelled() if source == "model" else measured([Path(part.strip()) for part in source.split(",")])


def modelled() -> Speedups:
    """Return the latency model's speed-ups of SDXL on up to 8 GPUs, at the sizes with latencies in DistriFusion."""
    printed = printed_by_place()
    sizes = [parse(size) for size in sorted({size for quantity, size, _ in printed if quantity == "latency_nocomm_s"})]
    cost = Cost.of(published_config("sdxl"))
    plan = AccountingPlan(cost, TEXT_LENGTH["UNet2DConditionModel"], sizes, range(2, _MAX_RANKS + 1), Link(), True)
    points: dict[int, Points] = {1: ALONE}
    for num_ranks in plan.num_ranks:
        found = [
            (size.pixels, value)
            for size in sizes
            for quantity, count, value, _ in latencies(plan, size, printed)
            if (quantity, count) == ("speedup_displaced_x", num_ranks)
        ]
        points[num_ranks] = tuple(sorted(found))
    return Speedups(points, "the latency model")


def measured(files: Sequence[Path]) -> Speedups:
    """Return the speed-ups of the fastest measured way at each size, `naive` excepted.

    Raises:
        UsageError: a file is missing, or is not a result of `psctl bench parallel` on real ranks.
    """
    points: dict[int, Points] = {1: ALONE}
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
    """Return the number of pixels and the largest speed-up of a row."""
    speedups = [float(side["speedup"]) for name, side in row["sides"].items() if name in WAYS and name != "naive"]
    return parse(row["resolution"]).pixels, max(speedups)
