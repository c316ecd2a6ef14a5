"""Intervals of a sweep's figures, and the request rate up to which a system holds an SLO attainment. No torch.

Requests of one run queue behind each other and are late together, so that they carry less evidence than independent
ones. Runs with different seeds are independent. From three seeds on, intervals are therefore Student's over the seeds.
With one or two there is only Wilson's interval over the requests, which is too narrow and labelled as such.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Self

from ...data.statistics import Estimate, student_interval, wilson_interval

MIN_SEEDS = 3
TARGETS = (0.99, 0.95, 0.90)
"""SLO attainments of the paper, section 8.1."""
RATIO_TARGET = 0.95

Shares = Mapping[float, float]
"""SLO attainment at every measured rate."""


class ShareInterval(NamedTuple):
    """95 % interval of a share over `seeds`, or over `requests` as if they were independent."""

    low: float
    high: float
    over: Literal["seeds", "requests"]


def share_interval(met: Sequence[int], num: Sequence[int]) -> ShareInterval:
    """Return the 95 % interval of sum(met) / sum(num).

    Over seeds it is Student's interval of the linearised ratio of two sums (Cochran, Sampling Techniques, 1977, section
    6.3); for runs of equal length this is the interval of the mean of their shares. It is never narrower than Wilson's
    over the requests, which are at best independent (if all seeds agree, as at 100 %, Student's would be a point), and
    stays within 0 and 1.

    Args:
        met: number of requests in time, by seed.
        num: number of all requests, by seed.

    Raises:
        ValueError: there are no requests.
    """
    total = sum(num)
    low, high = wilson_interval(sum(met), total)
    if len(met) < MIN_SEEDS:
        return ShareInterval(low, high, "requests")
    share, mean_num = sum(met) / total, total / len(num)
    interval = student_interval([share + (own - share * count) / mean_num for own, count in zip(met, num, strict=True)])
    assert interval is not None
    return ShareInterval(max(0.0, min(low, interval[0])), min(1.0, max(high, interval[1])), "seeds")


def _positive_interval(value: float, by_seed: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """Return the 95 % interval of a rate or ratio over seeds: Student's of the logarithms, so that it stays above 0.

    The pooled figure is not the mean of the figures by seed; the interval is widened to contain it. There is no
    interval with fewer than `MIN_SEEDS`.
    """
    interval = Estimate.of_ratios(by_seed).interval if len(by_seed) >= MIN_SEEDS else None
    return (None, None) if interval is None else (min(value, interval[0]), max(value, interval[1]))


@dataclass(frozen=True, slots=True)
class SustainedRate:
    """Request rate up to which a system holds an attainment.

    Attributes:
        where: `between` if interpolated between two measured rates; `below` if not even the lowest holds it; `beyond`
            if the highest still does.
        rate: the rate; for `below` the lowest measured rate, and for `beyond` the highest.
    """

    where: Literal["between", "below", "beyond"]
    rate: float


def sustained_rate(attainments: Shares, target: float) -> SustainedRate:
    """Return the rate up to which a target attainment is held, given the attainment at each measured rate.

    From the lowest rate up, it is the point where the attainment first falls below the target, on a straight line
    between the two measured rates. A higher rate that reaches the target by chance does not count. Raises ValueError if
    no rate was measured.
    """
    points = sorted(attainments.items())
    if not points:
        raise ValueError("no rate was measured")
    if points[0][1] < target:
        return SustainedRate("below", points[0][0])
    for (low, above), (high, under) in pairwise(points):
        if under < target:
            return SustainedRate("between", low + (high - low) * (above - target) / (above - under))
    return SustainedRate("beyond", points[-1][0])


def ratio(held: SustainedRate, base: SustainedRate) -> dict[str, Any]:
    """Return the ratio of two held rates as `value`, and its `kind`: `exact`, at `least`, at `most` or `unknown`.

    A rate that is only a bound makes the ratio a bound; two bounds of the same kind leave it `unknown`.
    """
    kind = "unknown"
    if held.where == base.where == "between":
        kind = "exact"
    elif held.where != "below" and base.where != "beyond":
        kind = "least"
    elif held.where != "beyond" and base.where != "below":
        kind = "most"
    return {"value": None if kind == "unknown" else held.rate / base.rate, "kind": kind}


def best_sustained(held: Iterable[SustainedRate]) -> SustainedRate:
    """Return the highest held rate: one beyond the sweep, else the highest between, else one below."""
    order = {"below": 0, "between": 1, "beyond": 2}
    return max(held, key=lambda each: (order[each.where], each.rate))


@dataclass(frozen=True, slots=True)
class SustainedRates:
    """Rate up to which a system holds an attainment.

    Attributes:
        pooled: rate from the pooled attainments of all seeds.
        by_seed: rate of every seed that has a run at every rate.
    """

    pooled: SustainedRate
    by_seed: Mapping[int, SustainedRate]

    @classmethod
    def of(cls, shares: Shares, by_seed: Mapping[int, Shares], target: float) -> Self:
        """Return the rates for the pooled attainments, and for those of each seed."""
        whole = {seed: own for seed, own in by_seed.items() if set(own) == set(shares)}
        return cls(sustained_rate(shares, target), {seed: sustained_rate(own, target) for seed, own in whole.items()})

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return the rates that `to_json` serialized."""
        seeds = {int(seed): SustainedRate(**held) for seed, held in content["by_seed"].items()}
        return cls(SustainedRate(content["where"], content["rate"]), seeds)

    def to_json(self) -> dict[str, Any]:
        """Return the rate, those of the seeds, and its 95 % interval over them, as JSON.

        The interval is null with fewer than three seeds, or if a rate is `below` or `beyond` the measured ones.
        """
        is_known = {"between"} == {held.where for held in (self.pooled, *self.by_seed.values())}
        rates = [held.rate for held in self.by_seed.values()] if is_known else []
        low, high = _positive_interval(self.pooled.rate, rates)
        seeds = {str(seed): {"where": held.where, "rate": held.rate} for seed, held in self.by_seed.items()}
        return {"where": self.pooled.where, "rate": self.pooled.rate, "low": low, "high": high, "by_seed": seeds}

    def ratio_to(self, base: Self) -> dict[str, Any]:
        """Return the `ratio` of the pooled rates with its 95 % interval over the seeds that both have.

        Both serve the same trace of a seed, so that its difficulty cancels. The interval is null with fewer than three
        seeds, or if the ratio or that of a seed is a bound or unknown.
        """
        found = ratio(self.pooled, base.pooled)
        seeds = [ratio(own, base.by_seed[seed]) for seed, own in self.by_seed.items() if seed in base.by_seed]
        is_known = all(each["kind"] == "exact" for each in (found, *seeds))
        low, high = _positive_interval(found["value"], [each["value"] for each in seeds] if is_known else [])
        return found | {"low": low, "high": high}
