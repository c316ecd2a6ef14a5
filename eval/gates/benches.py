"""Figures of benchmarks: the sweep of `bench slo`, and the rows of `bench steps` and `bench cache`.

They come with the interval that the file holds. What was measured and has none there is no evidence: a gate on it says
so, until several runs are given with `repeats = true`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...data.errors import UsageError
from .figures import Figure, is_number, plain_figures

_POINT_NAMES = ("latency_mean", "latency_p50", "latency_p95")


def is_sweep(content: Mapping[str, Any]) -> bool:
    """Whether it is the result of `psctl bench slo`."""
    return isinstance(content.get("engines"), Mapping) and "standalone_s" in content


def is_rows(content: Mapping[str, Any]) -> bool:
    """Whether it is the result of `psctl bench steps` or `psctl bench cache`."""
    rows = content.get("rows")
    return isinstance(rows, list) and all(isinstance(row, Mapping) and "label" in row for row in rows)


def sweep_figures(content: Mapping[str, Any], file: Path) -> Iterator[Figure]:
    """`slack@2.slo_attainment` and the like at every rate; `slack.rate_at_95`, `slack.ratio_at_95` of every policy.

    Intervals are those over seeds. With one or two seeds the file has intervals as if requests were independent; they
    are too narrow to judge by. Of several engines those after the first begin with their name: `simulator.slack@2...`.

    Raises:
        UsageError: the file is damaged.
    """
    try:
        for number, (engine, found) in enumerate(content["engines"].items()):
            prefix = f"{engine}." if number else ""
            for point in found["points"]:
                yield from _point(f"{prefix}{point['policy']}@{point['request_rate']:g}.", point, str(file))
            for policy in found["policies"]:
                yield from _policy(f"{prefix}{policy['policy']}.", policy, str(file))
        if isinstance(content.get("agreement"), Mapping):
            for figure in plain_figures(content["agreement"], file, "agreement."):
                yield replace(figure, low=None, high=None)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{file}: the result of bench slo is damaged ({error!r})") from error


def _point(prefix: str, point: Mapping[str, Any], source: str) -> Iterator[Figure]:
    share, count = point["slo_attainment_rate"], point["num_requests"]
    is_known = point.get("interval_over") == "seeds"
    low, high = (point["interval_low"], point["interval_high"]) if is_known else (None, None)
    yield Figure(f"{prefix}slo_attainment", share, low, high, count, source)
    goodput = point["goodput_qps"]
    scale = goodput / share if share else None
    ends = (None, None) if low is None or scale is None else (low * scale, high * scale)
    yield Figure(f"{prefix}goodput", goodput, *ends, count, source)
    for name in _POINT_NAMES:
        if point[name] is not None:
            yield Figure(prefix + name, point[name], None, None, count, source)


def _policy(prefix: str, policy: Mapping[str, Any], source: str) -> Iterator[Figure]:
    yield Figure(f"{prefix}mean_attainment", policy["mean_attainment"], None, None, None, source)
    for target, held in policy["held_rates"].items():
        name = f"{prefix}rate_at_{100 * float(target):.0f}"
        yield Figure(name, held["rate"], held.get("low"), held.get("high"), len(held.get("by_seed", ())), source)
    ratio = policy["ratio_at_95"]
    if ratio is not None and ratio["value"] is not None:
        count = len(policy["held_rates"]["0.95"].get("by_seed", ()))
        yield Figure(f"{prefix}ratio_at_95", ratio["value"], ratio.get("low"), ratio.get("high"), count, source)


def row_figures(content: Mapping[str, Any], file: Path) -> Iterator[Figure]:
    """`SML.ratio_same_resolution` of `bench steps`, `SML.interval 3.speedup` of `bench cache`; what stands above them.

    Raises:
        UsageError: the file is damaged.
    """
    for figure in plain_figures({name: content[name] for name in content if name != "rows"}, file):
        # Means and minima of the rows' ratios are measured; the rest are settings.
        yield replace(figure, low=None, high=None) if "ratio_" in figure.name else figure
    for row in content["rows"]:
        sides = row.get("sides")
        if sides is None:
            yield from _row(f"{row['label']}.", row, row.get("repeats"), file)
        elif isinstance(sides, Sequence) and all(isinstance(side, Mapping) and "label" in side for side in sides):
            for side in sides:
                yield from _row(f"{row['label']}.{side['label']}.", side, side.get("num_images"), file)
        else:
            raise UsageError(f"{file}: the sides of row {row['label']!r} must be mappings with a label")


def _row(prefix: str, row: Mapping[str, Any], count: Any, file: Path) -> Iterator[Figure]:
    intervals = row.get("intervals", {})
    if not isinstance(intervals, Mapping):
        raise UsageError(f"{file}: the intervals of {prefix[:-1]} must be a mapping")
    number = count if isinstance(count, int) else None
    for name, value in row.items():
        ends = intervals.get(name) or (None, None)
        if isinstance(value, Mapping) and is_number(value.get("mean")):
            value, ends = value["mean"], (value.get("low"), value.get("high"))
        if not is_number(value):
            continue
        if not _is_interval(ends):
            raise UsageError(f"{file}: {prefix}{name} must have two numbers or null as its interval")
        low, high = ends
        yield Figure(prefix + name, float(value), low, high, number, str(file))


def _is_interval(ends: Any) -> bool:
    return (
        isinstance(ends, Sequence)
        and len(ends) == 2
        and (all(map(is_number, ends)) or all(end is None for end in ends))
    )
