"""Up to which request rate a policy holds an SLO attainment, and how many times that of another. No torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from .seeds import positive_interval

TARGETS = (0.99, 0.95, 0.90)
"""SLO attainments that the paper looks at, section 8.1."""
RATIO_TARGET = 0.95

Where = Literal["between", "below", "beyond"]
Shares = Mapping[float, float]
"""SLO attainment at every measured rate."""


@dataclass(frozen=True, slots=True)
class HeldRate:
    """Up to which request rate a policy holds an attainment.

    Attributes:
        where: `between`: interpolated between two measured rates; `below`: not even at the lowest; `beyond`: still at
            the highest.
        rate: the rate; the lowest measured one where it is below, the highest where it is beyond.
    """

    where: Where
    rate: float


def held_rate(attainments: Mapping[float, float], target: float) -> HeldRate:
    """Up to which rate an attainment is held, given that at each measured rate.

    Looking from the lowest rate up, it ends where the attainment first falls below the target, at the point where a
    straight line between the two measured rates meets it. What a higher rate reaches by chance does not count.

    Raises:
        ValueError: nothing was measured.
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
    value = held.rate / base.rate
    kinds = {
        ("between", "between"): "exact",
        ("beyond", "between"): "least",
        ("between", "below"): "least",
        ("beyond", "below"): "least",
        ("below", "between"): "most",
        ("between", "beyond"): "most",
        ("below", "beyond"): "most",
    }
    kind = kinds.get((held.where, base.where), "unknown")
    return {"value": None if kind == "unknown" else value, "kind": kind}


def best_held(held: Iterable[HeldRate]) -> HeldRate:
    """The highest of them: one beyond the sweep, else the highest between, else below."""
    order = {"below": 0, "between": 1, "beyond": 2}
    return max(held, key=lambda each: (order[each.where], each.rate))


@dataclass(frozen=True, slots=True)
class HeldRates:
    """The rate that a policy holds an attainment up to.

    Attributes:
        pooled: by the attainments of all seeds together.
        by_seed: by those of every seed that has a run at every rate.
    """

    pooled: HeldRate
    by_seed: Mapping[int, HeldRate]

    def to_json(self) -> dict[str, Any]:
        """The rate, those of the seeds, and its 95 % interval over them; null with fewer than three seeds.

        It is null as well where the rate of a seed is only known to be higher or lower than those that were measured.
        """
        rates = [held.rate for held in self.by_seed.values() if held.where == "between"]
        is_known = self.pooled.where == "between" and len(rates) == len(self.by_seed)
        low, high = (positive_interval(self.pooled.rate, rates) if is_known else None) or (None, None)
        seeds = {str(seed): {"where": held.where, "rate": held.rate} for seed, held in self.by_seed.items()}
        return {"where": self.pooled.where, "rate": self.pooled.rate, "low": low, "high": high, "by_seed": seeds}


def held_rates(shares: Shares, by_seed: Mapping[int, Shares], target: float) -> HeldRates:
    """Up to which rate a policy holds an attainment, over all seeds and in each that was run at every rate."""
    whole = {seed: own for seed, own in by_seed.items() if set(own) == set(shares)}
    return HeldRates(held_rate(shares, target), {seed: held_rate(own, target) for seed, own in whole.items()})


def ratio_over_seeds(held: HeldRates, base: HeldRates) -> dict[str, Any]:
    """`ratio` of the pooled rates with its 95 % interval over the seeds that both have.

    The traces of a seed are the same for both, so what is hard about them cancels. The interval is null with fewer than
    three seeds, or where the ratio or that of a seed is a bound or unknown.
    """
    found = ratio(held.pooled, base.pooled)
    seeds = [ratio(own, base.by_seed[seed]) for seed, own in held.by_seed.items() if seed in base.by_seed]
    is_known = all(each["kind"] == "exact" for each in (found, *seeds))
    interval = positive_interval(found["value"], [each["value"] for each in seeds]) if is_known else None
    low, high = interval or (None, None)
    return found | {"low": low, "high": high}
