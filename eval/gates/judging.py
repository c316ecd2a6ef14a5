"""Quality gates: bounds on metrics, judged by intervals.

A gate fails only where the whole 95 % interval lies beyond its bound, passes where the whole interval lies within, and
says "not enough evidence" between. Bounds are absolute, or relative to a stored baseline, whose own interval counts
as well.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...data.errors import UsageError
from ...data.files import write_json
from .figures import Figure
from .metrics import BASELINE_KIND, load_figures, repeated

Verdict = Literal["pass", "fail", "not enough evidence", "updated"]

ABSOLUTE = ("max", "min")
RELATIVE = ("max_ratio", "min_ratio", "max_increase", "max_decrease")
_UPPER = ("max", "max_ratio", "max_increase")


@dataclass(frozen=True, slots=True)
class Gate:
    """One metric with its bounds.

    Attributes:
        metric: name of the figure; `clip` also stands for `clip[JUDGE]` if there is only one judge.
        bounds: bound by kind, one or more of `ABSOLUTE` and `RELATIVE`.
        name: what reports call it.
        file: the result file to take it from; None for any that has it.
        repeats: whether several files are repeated runs of one configuration, whose spread gives the interval.
        min_samples: with fewer images, requests or runs there is not enough evidence, whatever the interval.
    """

    metric: str
    bounds: Mapping[str, float]
    name: str
    file: Path | None = None
    repeats: bool = False
    min_samples: int = 0


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """What became of a gate.

    Attributes:
        name, metric: of the gate; the metric by its full name.
        verdict: pass, fail, not enough evidence; or updated, if the bound is relative to a baseline just written.
        value, low, high, n, source: the figure.
        bounds: the bounds in the metric's own units, such as "<= 30.5 (1.05 x baseline 29)".
        reason: why the verdict is what it is, one sentence.
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


def judge(
    gates: Sequence[Gate], results: Sequence[Path], baseline: Path | None, *, is_new_baseline: bool = False
) -> list[GateVerdict]:
    """Judge every gate.

    Args:
        gates: what to judge.
        results: result files or folders of runs.
        baseline: the stored baseline, needed for relative bounds only.
        is_new_baseline: whether the baseline was just made from these results; relative bounds are then not judged.

    Raises:
        UsageError: a file is missing or malformed, a metric is in no file or in several, or a baseline lacks it.
    """
    by_file = {path: load_figures(path) for path in dict.fromkeys((*results, *(g.file for g in gates if g.file)))}
    has_relative = any(kind in RELATIVE for gate in gates for kind in gate.bounds)
    if has_relative and baseline is None and not is_new_baseline:
        raise UsageError(f"gates have relative bounds ({', '.join(RELATIVE)}), but no baseline is named")
    stored = load_figures(baseline) if has_relative and baseline is not None and not is_new_baseline else {}
    return [_judge_one(gate, _find(gate, by_file, results), stored, baseline, is_new_baseline) for gate in gates]


def _find(gate: Gate, by_file: Mapping[Path, Mapping[str, Figure]], results: Sequence[Path]) -> Figure:
    searched = [gate.file] if gate.file is not None else list(dict.fromkeys(results))
    found = [figure for path in searched if (figure := _named(gate.metric, by_file[path])) is not None]
    if not found:
        there = sorted({name for path in searched for name in by_file[path]})
        files = ", ".join(str(path) for path in searched) or "no result file"
        raise UsageError(f"gate {gate.name!r}: no metric {gate.metric!r} in {files}; there: {', '.join(there) or '-'}")
    if gate.repeats:
        return repeated(found)
    if len(found) > 1:
        raise UsageError(
            f"gate {gate.name!r}: metric {gate.metric!r} is in {' and in '.join(each.source for each in found)}; "
            "name one with file, or say repeats = true if they are runs of one configuration"
        )
    return found[0]


def _named(metric: str, figures: Mapping[str, Figure]) -> Figure | None:
    """The figure of that name, or the only one that has it before its judge in brackets."""
    if metric in figures:
        return figures[metric]
    judged = [figure for name, figure in figures.items() if name.endswith("]") and name.partition("[")[0] == metric]
    return judged[0] if len(judged) == 1 else None


def _judge_one(
    gate: Gate, figure: Figure, stored: Mapping[str, Figure], baseline: Path | None, is_new_baseline: bool
) -> GateVerdict:
    verdicts: list[tuple[Verdict, str, str]] = []
    for kind, bound in gate.bounds.items():
        if kind in RELATIVE and is_new_baseline:
            verdicts.append(("updated", f"{kind} {bound:g}", "the baseline was written from this very figure"))
            continue
        if kind in ABSOLUTE:
            shown, low, high = _against(figure, kind, 0.0, bound, None)
        else:
            base = stored.get(figure.name)
            if base is None:
                there = ", ".join(sorted(stored)) or "-"
                raise UsageError(f"gate {gate.name!r}: baseline {baseline} has no {figure.name!r}; there: {there}")
            shown, low, high = _against(figure, kind, *_factor_and_shift(gate, kind, bound, base), base)
        verdicts.append(_verdict(gate, figure, kind, shown, low, high))
    order: tuple[Verdict, ...] = ("fail", "not enough evidence", "pass", "updated")
    worst = min(verdicts, key=lambda each: order.index(each[0]))
    return GateVerdict(
        gate.name,
        figure.name,
        worst[0],
        figure.value,
        figure.low,
        figure.high,
        figure.n,
        figure.source,
        tuple(shown for _, shown, _ in verdicts),
        worst[2],
    )


def _factor_and_shift(gate: Gate, kind: str, bound: float, base: Figure) -> tuple[float, float]:
    """A relative bound as factor * baseline + shift."""
    if kind.endswith("_ratio"):
        if base.value <= 0:
            raise UsageError(f"gate {gate.name!r}: {kind} needs a positive baseline, but it is {base.value:g}")
        return bound, 0.0
    return 1.0, bound if kind == "max_increase" else -bound


def _against(
    figure: Figure, kind: str, factor: float, shift: float, base: Figure | None
) -> tuple[str, float | None, float | None]:
    """How the bound reads, and the interval of figure - bound; None if one side's interval is unknown.

    For a relative bound the interval is that of a difference of two independent estimates, from the two intervals
    (Zou and Donner, "Construction of confidence limits about effect measures", 2008), so a noisy baseline is as
    unsure as a noisy figure.
    """
    sign = "<=" if kind in _UPPER else ">="
    limit = shift if base is None else factor * base.value + shift
    if base is None:
        shown = f"{sign} {limit:g}"
    else:
        shown = f"{sign} {limit:.6g} (baseline {base.value:.6g}, {kind} {factor if shift == 0 else abs(shift):g})"
    below, above = (0.0, 0.0)
    for low, high, value, weight, is_flipped in (
        (figure.low, figure.high, figure.value, 1.0, False),
        *(() if base is None else ((base.low, base.high, base.value, factor, True),)),
    ):
        if low is None or high is None:
            return shown, None, None
        down, up = (weight * (value - low)) ** 2, (weight * (high - value)) ** 2
        below, above = below + (up if is_flipped else down), above + (down if is_flipped else up)
    difference = figure.value - limit
    return shown, difference - math.sqrt(below), difference + math.sqrt(above)


def _verdict(
    gate: Gate, figure: Figure, kind: str, shown: str, low: float | None, high: float | None
) -> tuple[Verdict, str, str]:
    if gate.min_samples and (figure.n is None or figure.n < gate.min_samples):
        count = "an unknown number of" if figure.n is None else figure.n
        return "not enough evidence", shown, f"{count} samples, but min_samples is {gate.min_samples}"
    if low is None or high is None:
        return "not enough evidence", shown, "the sample is too small for an interval, or its file holds none"
    if kind not in _UPPER:
        # A lower bound is an upper one of the negative.
        low, high = -high, -low
    tolerance = 1e-12 * max(1.0, abs(figure.value))
    if low > tolerance:
        return "fail", shown, f"{figure.value:.6g} is beyond {shown}" + _interval_words(figure, "all of the interval")
    if high <= tolerance:
        return "pass", shown, f"{figure.value:.6g} is within {shown}" + _interval_words(figure, "all of the interval")
    return "not enough evidence", shown, f"the interval of {figure.value:.6g} lies on both sides of {shown}"


def _interval_words(figure: Figure, what: str) -> str:
    return ", a figure without an interval" if figure.is_exact and not figure.n else f", and so is {what}"


def write_baseline(path: Path, gates: Sequence[Gate], results: Sequence[Path]) -> list[str]:
    """Store the figures of all gates as the new baseline; other metrics of an existing baseline stay.

    A metric that gates take from several files has no single figure. It is left out where their bounds are absolute.

    Returns the names that were stored.

    Raises:
        UsageError: as `judge`, or bounds relative to the baseline are on such a metric; the baseline is then as it was.
        OSError: the file cannot be written.
    """
    by_file = {each: load_figures(each) for each in dict.fromkeys((*results, *(g.file for g in gates if g.file)))}
    figures = load_figures(path) if path.exists() else {}
    new: dict[str, Figure] = {}
    by_name: dict[str, list[tuple[Gate, Figure]]] = {}
    for gate in gates:
        figure = _find(gate, by_file, results)
        by_name.setdefault(figure.name, []).append((gate, figure))
    for name, found in by_name.items():
        if len({figure.source for _, figure in found}) == 1:
            new[name] = found[0][1]
        elif relative := [gate.name for gate, _ in found if set(gate.bounds) & set(RELATIVE)]:
            raise UsageError(
                f"gate {relative[0]!r}: {name} is taken from several files by these gates, but a baseline holds one "
                "figure of it; give each file a gate file and a baseline of its own"
            )
    metrics = {
        name: {"value": figure.value, "low": figure.low, "high": figure.high, "n": figure.n}
        for name, figure in sorted({**figures, **new}.items())
    }
    write_json(path, {"kind": BASELINE_KIND, "version": 1, "metrics": metrics})
    return sorted(new)
