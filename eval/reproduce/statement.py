"""Statements of a paper about an exhibit, beside our measurements, with a verdict. This module imports no torch."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, get_args

from ...data.statistics import Estimate
from ...profiling.report.table import Table
from ...profiling.report.words import DASH

Unit = Literal["x", "points", "share", "score"]
_FORMATS: Mapping[str, tuple[str, str]] = {
    "x": ("{:.2f}", "x"),
    "points": ("{:+.1f}", " points"),
    "share": ("{:.1%}", ""),
    "score": ("{:+.2f}", ""),
}
"""Format of a number, and the suffix of one that stands alone."""
Verdict = Literal["agrees", "same way only", "differs", "cannot be told"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
FACTOR = 2.0
"""An effect that is less than half of the paper's, or more than twice as large, is of another size."""
RULE = (
    "An effect is the distance from the number that goes neither way. A statement agrees where the whole 95 % "
    "interval of ours goes the paper's way and, where the paper prints a size, is within a factor of "
    f"{FACTOR:g} of the paper's effect (of ratios, of its logarithm). Same way only: the interval goes the paper's "
    "way, but is not within that factor. Differs: the whole interval goes the other way. Cannot be told: the interval "
    "goes both ways, or there is none."
)


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement of a paper about an exhibit, beside our measurement.

    Attributes:
        text: what is compared.
        ours: our measurement with its 95 % interval; None if it is unknown.
        paper: the number that the paper prints, or its smallest and largest; empty if it states only a direction. A
            number equal to `neutral` is a bound, not a size.
        unit: `x` for ratios, `points` for differences of shares, `share`, or `score` for a metric.
        neutral: the value without an effect.
        is_more: whether the paper states that the value is above `neutral`, instead of below.
    """

    text: str
    ours: Estimate | None
    paper: tuple[float, ...] = ()
    unit: Unit = "x"
    neutral: float = 1.0
    is_more: bool = True

    @property
    def verdict(self) -> Verdict:
        """Verdict by `RULE` on the paper's statement. An interval that ends at `neutral` contains it."""
        interval = None if self.ours is None else self.ours.interval
        if interval is None or interval[0] <= self.neutral <= interval[1]:
            return "cannot be told"
        if (interval[0] > self.neutral) != self.is_more:
            return "differs"
        sizes = list(map(self._effect, self.paper))
        if not sizes or not min(sizes):
            return "agrees"
        small, large = sorted(map(self._effect, interval))
        is_alike = min(sizes) / FACTOR <= small and large <= FACTOR * max(sizes)
        return "agrees" if is_alike else "same way only"

    def _effect(self, value: float) -> float:
        """Return the distance of a value from `neutral`; 1.5 times and two thirds are equally far from 1."""
        return abs(math.log(value / self.neutral) if self.unit == "x" else value - self.neutral)

    @property
    def paper_text(self) -> str:
        """The paper's value, formatted for display."""
        return " to ".join(map(self._shown, self.paper)) or ("more" if self.is_more else "less")

    @property
    def ours_text(self) -> str:
        """The measured value, formatted for display."""
        return DASH if self.ours is None else self._shown(self.ours.value)

    @property
    def interval_text(self) -> str:
        """The interval of the measured value, formatted for display without its unit."""
        interval = None if self.ours is None else self.ours.interval
        return DASH if interval is None else " to ".join(map(_FORMATS[self.unit][0].format, interval))

    def _shown(self, value: float) -> str:
        form, unit = _FORMATS[self.unit]
        return form.format(value) + unit

    def to_json(self) -> dict[str, Any]:
        """Return the statement as JSON, with the verdict and both values formatted for display."""
        shown = {"paper_text": self.paper_text, "ours_text": self.ours_text, "interval_text": self.interval_text}
        return {**asdict(self), "verdict": self.verdict, **shown}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Read a statement of a result file. In version 1, `ours` is a number without an interval."""
        fields = {name: content[name] for name in ("text", "unit", "neutral", "is_more")}
        ours = None if content["ours"] is None else Estimate.from_json(content["ours"])
        return cls(ours=ours, paper=tuple(content["paper"]), **fields)


def statements_of(result: Mapping[str, Any]) -> list[Statement]:
    """Return the statements of an exhibit's result. Raises UsageError: a number in them is damaged."""
    return [Statement.from_json(each) for each in result["statements"]]


def statements_table(result: Mapping[str, Any]) -> Table:
    """Return a table of the paper's statements beside our measurements. Raises as `statements_of`."""
    rows = [
        (each.text, each.paper_text, each.ours_text, each.interval_text, each.verdict) for each in statements_of(result)
    ]
    name = result["exhibit"].replace("-", " ").capitalize()
    columns = ("what the paper says of it", "paper", "here", "95 % interval", "verdict")
    return Table(f"{name}: {result['title']}", columns, rows)


def count_verdicts(results: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, dict[Verdict, int]]:
    """Return the number of statements with each verdict, by model and for `all`.

    Raises as `statements_of`.

    Args:
        results: pairs of a model and the result of an exhibit.
    """
    counts: dict[str, Counter[Verdict]] = {}
    for model, result in results:
        counts.setdefault(model, Counter()).update(each.verdict for each in statements_of(result))
    counts["all"] = sum(counts.values(), Counter[Verdict]())
    return {model: {verdict: own[verdict] for verdict in VERDICTS} for model, own in counts.items()}


def verdicts_table(counts: Mapping[str, Mapping[Verdict, int]]) -> Table:
    """Return the table of `count_verdicts`, with the rule below."""
    rows = [(model, *(str(own[verdict]) for verdict in VERDICTS)) for model, own in counts.items()]
    return Table("Statements of the paper by verdict", ("model", *VERDICTS), rows, note=RULE)
