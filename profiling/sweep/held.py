"""How sure the figures of a sweep are, and up to which request rate a system holds an SLO attainment. No torch.

Requests of one run queue behind each other, so that they are late together: as evidence they count less than their
number. Runs with different seeds are independent. From three seeds on, intervals are therefore Student's over the
seeds; with one or two there is only Wilson's over the requests, which is too narrow and labelled as what it is.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Self

from ...data.statistics import Estimate, student_interval, wilson_interval

MIN_SEEDS = 3
TARGETS = (0.99, 0.95, 0.90)
"""SLO attainments that the paper looks at, section 8.1."""
RATIO_TARGET = 0.95

Shares = Mapping[float, float]
"""SLO attainment at every measured rate."""


class ShareInterval(NamedTuple):
    """95 % interval of a share, and over what: `seeds`, or `requests` as if they were independent."""

    low: float
    high: float
    over: Literal["seeds", "requests"]


def share_interval(met: Sequence[int], num: Sequence[int]) -> ShareInterval:
    """95 % interval of sum(met) / sum(num).

    Over seeds it is Student's of the ratio of two sums, linearised (Cochran, Sampling Techniques, 1977, section 6.3):
    for runs of equal length that of the mean of their shares. It is never narrower than Wilson's over the requests,
    which are at best independent (where all seeds agree, as at 100 %, Student's would be a point), and stays within 0
    and 1.

    Args:
        met: requests in time, by seed.
        num: all requests, by seed.

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
    """95 % interval of a rate or ratio over seeds: Student's of the logarithms, so that it stays above 0.

    The figure of all seeds together is not the mean of those of the seeds; the interval is widened to hold it. There is
    none with fewer than `MIN_SEEDS`.
    """
    interval = Estimate.of_ratios(by_seed).interval if len(by_seed) >= MIN_SEEDS else None
    return (None, None) if interval is None else (min(value, interval[0]), max(value, interval[1]))


@dataclass(frozen=True, slots=True)
class HeldRate:
    """Up to which request rate a system holds an attainment.

    Attributes:
        where: `between`: interpolated between two measured rates; `below`: not even at the lowest; `beyond`: still at
            the highest.
        rate: the rate; the lowest measured one where it is below, the highest where it is beyond.
    """

    where: Literal["between", "below", "beyond"]
    rate: float


def held_rate(attainments: Shares, target: float) -> HeldRate:
    """Up to which rate an attainment is held, given that at each measured rate. Raises ValueError: there is none.

    Looking from the lowest rate up, it ends where the attainment first falls below the target, at the point where a
    straight line between the two measured rates meets it. What a higher rate reaches by chance does not count.
    """
    points = sorted(attainments.items())
    if not points:
        raise ValueError("no rate was measured")
    if points[0][1] < target:
        return HeldRate("below", points[0][0])
    for (low, above), (high, under) in pairwise(points):
        if under < target:
            return HeldRate("between", low + (high - low) * (above - target) / (above - under))
    return HeldRate("beyond", points[-1][0])


def ratio(held: HeldRate, base: HeldRate) -> dict[str, Any]:
    """How many times as high a rate is held: `value`, and whether that is `exact`, at `least` or at `most`.

    A rate that is only known to be higher or lower makes it a bound; two of the same kind leave it `unknown`.
    """
    kind = "unknown"
    if held.where == base.where == "between":
        kind = "exact"
    elif held.where != "below" and base.where != "beyond":
        kind = "least"
    elif held.where != "beyond" and base.where != "below":
        kind = "most"
    return {"value": None if kind == "unknown" else held.rate / base.rate, "kind": kind}


def best_held(held: Iterable[HeldRate]) -> HeldRate:
    """The highest of them: one beyond the sweep, else the highest between, else below."""
    order = {"below": 0, "between": 1, "beyond": 2}
    return max(held, key=lambda each: (order[each.where], each.rate))


@dataclass(frozen=True, slots=True)
class HeldRates:
    """The rate that a system holds an attainment up to.

    Attributes:
        pooled: by the attainments of all seeds together.
        by_seed: by those of every seed that has a run at every rate.
    """

    pooled: HeldRate
    by_seed: Mapping[int, HeldRate]

    @classmethod
    def of(cls, shares: Shares, by_seed: Mapping[int, Shares], target: float) -> Self:
        """From the attainments of all seeds together, and of each."""
        whole = {seed: own for seed, own in by_seed.items() if set(own) == set(shares)}
        return cls(held_rate(shares, target), {seed: held_rate(own, target) for seed, own in whole.items()})

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """From what `to_json` gives."""
        seeds = {int(seed): HeldRate(**held) for seed, held in content["by_seed"].items()}
        return cls(HeldRate(content["where"], content["rate"]), seeds)

    def to_json(self) -> dict[str, Any]:
        """The rate, those of the seeds, and its 95 % interval over them: null with fewer than three seeds, or where a
        seed's rate is only known to be higher or lower than those that were measured.
        """
        is_known = {"between"} == {held.where for held in (self.pooled, *self.by_seed.values())}
        rates = [held.rate for held in self.by_seed.values()] if is_known else []
        low, high = _positive_interval(self.pooled.rate, rates)
        seeds = {str(seed): {"where": held.where, "rate": held.rate} for seed, held in self.by_seed.items()}
        return {"where": self.pooled.where, "rate": self.pooled.rate, "low": low, "high": high, "by_seed": seeds}

    def ratio_to(self, base: Self) -> dict[str, Any]:
        """`ratio` of the pooled rates with its 95 % interval over the seeds that both have.

        The traces of a seed are the same for both, so what is hard about them cancels. The interval is null with fewer
        than three seeds, or where the ratio or that of a seed is a bound or unknown.
        """
        found = ratio(self.pooled, base.pooled)
        seeds = [ratio(own, base.by_seed[seed]) for seed, own in self.by_seed.items() if seed in base.by_seed]
        is_known = all(each["kind"] == "exact" for each in (found, *seeds))
        low, high = _positive_interval(found["value"], [each["value"] for each in seeds] if is_known else [])
        return found | {"low": low, "high": high}
