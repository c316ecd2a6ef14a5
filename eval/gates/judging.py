"""Quality gates: bounds on figures, judged by intervals.

A gate fails only if the whole 95 % interval is beyond its bound, passes if the whole interval is within, and otherwise
reports "not enough evidence". Bounds are absolute, or relative to a stored baseline, whose own interval counts as well.

Exactness is a promise for every image, and a mean hides one wrong image among many. A gate may therefore use a
statistic of the values of single images: the worst of the drawn images is known exactly, whatever others would give.
Such a gate passes or fails, unless there are fewer images than it requires.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...data.errors import UsageError
from ...data.figures import write_figures
from ...data.files import write_json
from ...data.statistics import Estimate
from .results import BASELINE_KIND, ResultFile, Statistic, read_results

Verdict = Literal["fail", "not enough evidence", "pass", "updated"]
_ORDER: tuple[Verdict, ...] = ("fail", "not enough evidence", "pass", "updated")
"""Verdicts from the worst to the best."""

ABSOLUTE = ("max", "min")
RELATIVE = ("max_ratio", "min_ratio", "max_increase", "max_decrease")
_UPPER = ("max", "max_ratio", "max_increase")


@dataclass(frozen=True, slots=True)
class Gate:
    """One metric with its bounds.

    Attributes:
        metric: name of the figure; `clip` also stands for `clip[JUDGE]` if there is only one judge.
        bounds: bound by kind, one or more of `ABSOLUTE` and `RELATIVE`.
        name: name of the gate in reports.
        file: result file with the figure; None for any that has it.
        repeats: whether several files are repeated runs of one configuration, whose spread gives the interval.
        min_samples: with fewer images, requests or runs there is not enough evidence, whatever the interval.
        statistic: the mean, which is the figure itself, or a statistic of the values of single images.
    """

    metric: str
    bounds: Mapping[str, float]
    name: str
    file: Path | None = None
    repeats: bool = False
    min_samples: int = 0
    statistic: Statistic = "mean"


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """Verdict on a gate.

    Attributes:
        name, metric: name and metric of the gate; the metric with its full name and statistic, such as `psnr.min`.
        verdict: pass, fail, not enough evidence; or updated, if the bound is relative to a baseline just written.
        value, low, high, n, source: the figure, and its files.
        bounds: bounds in the metric's own units, such as "<= 30.5 (baseline 29, max_ratio 1.05)".
        reason: reason for the verdict in one sentence.
    """

    name: str
    metric: str
    verdict: Verdict
    value: float
    low: float | None
    high: float | None
    n: int | None
    source: str
    bounds: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class _NamedFigure:
    """A figure with its full name and its files."""

    name: str
    figure: Estimate
    source: str


_Files = Mapping[Path, Sequence[ResultFile]]


def judge(
    gates: Sequence[Gate], results: Sequence[Path], baseline: Path | None, *, is_new_baseline: bool = False
) -> list[GateVerdict]:
    """Judge every gate.

    Args:
        gates: gates to judge.
        results: result files or folders of runs.
        baseline: the stored baseline, needed for relative bounds only.
        is_new_baseline: whether the baseline was just made from these results; relative bounds are then not judged.

    Raises:
        UsageError: a file is missing or malformed, a metric is in no file or in several, or a baseline lacks it.
    """
    files = _read_all(gates, results)
    stored: dict[str, Estimate] = {}
    if not is_new_baseline and any(kind in RELATIVE for gate in gates for kind in gate.bounds):
        if baseline is None:
            raise UsageError(f"gates have relative bounds ({', '.join(RELATIVE)}), but no baseline is named")
        stored = _figures_in(read_results(baseline))
    verdicts = []
    for gate in gates:
        found = _find(gate, files, results)
        judged: list[tuple[Verdict, str, str]] = []
        for kind, bound in gate.bounds.items():
            if kind in ABSOLUTE:
                shown = f"{'<=' if kind in _UPPER else '>='} {bound:g}"
                judged.append((*_verdict(gate, found.figure, kind, shown, Estimate.exact(bound)), shown))
            elif is_new_baseline:
                judged.append(("updated", "the baseline was written from this very figure", f"{kind} {bound:g}"))
            elif found.name in stored:
                shown, limit = _limit(gate, kind, bound, stored[found.name])
                judged.append((*_verdict(gate, found.figure, kind, shown, limit), shown))
            else:
                there = ", ".join(sorted(stored)) or "-"
                raise UsageError(f"gate {gate.name!r}: baseline {baseline} has no {found.name!r}; there: {there}")
        verdict, reason, _ = min(judged, key=lambda each: _ORDER.index(each[0]))
        verdicts.append(
            GateVerdict(
                gate.name,
                found.name,
                verdict,
                **found.figure.to_json(),
                source=found.source,
                bounds=tuple(shown for *_, shown in judged),
                reason=reason,
            )
        )
    return verdicts


def _read_all(gates: Sequence[Gate], results: Sequence[Path]) -> _Files:
    return {path: read_results(path) for path in dict.fromkeys((*results, *(g.file for g in gates if g.file)))}


def _figures_in(files: Sequence[ResultFile]) -> dict[str, Estimate]:
    return {name: figure for each in files for name, figure in each.figures.items()}


def _find(gate: Gate, files: _Files, results: Sequence[Path]) -> _NamedFigure:
    searched = [gate.file] if gate.file is not None else list(dict.fromkeys(results))
    found: list[_NamedFigure] = []
    for path in searched:
        # If several files in a run's folder have the figure, the last one counts.
        mine = [(each, figure) for each in files[path] if (figure := each.find(gate.metric, gate.statistic))]
        found += [_NamedFigure(*figure, str(each.file)) for each, figure in mine[-1:]]
    if not found:
        read = [each for path in searched for each in files[path]]
        there = {name for each in read for name in (each.figures if gate.statistic == "mean" else each.per_image)}
        what = "no metric" if gate.statistic == "mean" else f"for {gate.statistic}, no values of single images of"
        where = ", ".join(map(str, searched)) or "no result file"
        names = ", ".join(sorted(there)) or "-"
        raise UsageError(f"gate {gate.name!r}: {what} {gate.metric!r} in {where}; there: {names}")
    sources = [each.source for each in found]
    if gate.repeats:
        return _NamedFigure(found[0].name, Estimate.of_mean([each.figure.value for each in found]), ", ".join(sources))
    if len(found) > 1:
        raise UsageError(
            f"gate {gate.name!r}: metric {gate.metric!r} is in {' and in '.join(sources)}; "
            "name one with file, or say repeats = true if they are runs of one configuration"
        )
    return found[0]


def _limit(gate: Gate, kind: str, bound: float, base: Estimate) -> tuple[str, Estimate]:
    """Return a bound relative to a baseline as text, and in the metric's own units with the baseline's uncertainty."""
    if kind.endswith("_ratio") and base.value <= 0:
        raise UsageError(f"gate {gate.name!r}: {kind} needs a positive baseline, but it is {base.value:g}")
    factor, shift = (bound, 0.0) if kind.endswith("_ratio") else (1.0, bound if kind == "max_increase" else -bound)
    low, high = (None, None) if base.interval is None else (factor * end + shift for end in base.interval)
    limit = Estimate(factor * base.value + shift, low, high)
    sign = "<=" if kind in _UPPER else ">="
    return f"{sign} {limit.value:.6g} (baseline {base.value:.6g}, {kind} {bound:g})", limit


def _verdict(gate: Gate, figure: Estimate, kind: str, shown: str, limit: Estimate) -> tuple[Verdict, str]:
    """Return the verdict on one bound, and its reason.

    It is based on the interval of figure - limit, two independent estimates, computed from their intervals (Zou and
    Donner, "Construction of confidence limits about effect measures", 2008), so that noise of the baseline counts as
    much as noise of the figure.
    """
    if gate.min_samples and (figure.n is None or figure.n < gate.min_samples):
        count = "an unknown number of" if figure.n is None else figure.n
        return "not enough evidence", f"{count} samples, but min_samples is {gate.min_samples}"
    if figure.interval is None or limit.interval is None:
        return "not enough evidence", "the sample is too small for an interval, or its file holds none"
    (low, high), (limit_low, limit_high) = figure.interval, limit.interval
    difference = figure.value - limit.value
    below = difference - math.hypot(figure.value - low, limit_high - limit.value)
    above = difference + math.hypot(high - figure.value, limit.value - limit_low)
    if kind not in _UPPER:
        # A lower bound is an upper one of the negative.
        below, above = -above, -below
    tolerance = 1e-12 * max(1.0, abs(figure.value))
    interval = ", and so is all of the interval" if not figure.is_exact else ""
    if below > tolerance:
        return "fail", f"{figure.value:.6g} is beyond {shown}{interval}"
    if above <= tolerance:
        return "pass", f"{figure.value:.6g} is within {shown}{interval}"
    return "not enough evidence", f"the interval of {figure.value:.6g} lies on both sides of {shown}"


def write_baseline(path: Path, gates: Sequence[Gate], results: Sequence[Path]) -> list[str]:
    """Store the figures of all gates as the new baseline; other metrics of an existing baseline stay.

    A metric that gates take from several files has no single figure. It is omitted if their bounds are absolute.

    Returns the names that were stored.

    Raises:
        UsageError: as `judge`, or such a metric has bounds relative to the baseline; the baseline is then unchanged.
        OSError: the file cannot be written.
    """
    files = _read_all(gates, results)
    figures = _figures_in(read_results(path)) if path.exists() else {}
    by_name: dict[str, list[tuple[Gate, _NamedFigure]]] = {}
    for gate in gates:
        found = _find(gate, files, results)
        by_name.setdefault(found.name, []).append((gate, found))
    new: dict[str, Estimate] = {}
    for name, mine in by_name.items():
        if len({found.source for _, found in mine}) == 1:
            new[name] = mine[0][1].figure
        elif relative := [gate.name for gate, _ in mine if set(gate.bounds) & set(RELATIVE)]:
            raise UsageError(
                f"gate {relative[0]!r}: {name} is taken from several files by these gates, but a baseline holds one "
                "figure of it; give each file a gate file and a baseline of its own"
            )
    stored = dict(sorted({**figures, **new}.items()))
    write_json(path, write_figures({"kind": BASELINE_KIND, "version": 1}, stored, "metrics"))
    return sorted(new)
