"""The tables of a sweep in words, for the terminal and for the report alike. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .slo_figures import RATIO_TARGET, TARGETS

DASH = "-"
INTERVAL_NOTE = (
    "Intervals are Wilson's 95 % over the requests of all seeds, which queue behind each other: another run may lie "
    "further off."
)
HELD_NOTE = (
    "A rate is held up to where the attainment first falls below the target, on a straight line between two measured "
    "rates; below or beyond: not even at the lowest rate of the sweep, or still at its highest."
)


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table of words; the first `num_words` columns are names, the others numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_words: int = 1
    note: str = ""


def tables_of(result: Mapping[str, Any]) -> list[TextTable]:
    """All tables of a sweep's result."""
    found = []
    for engine, figures in result["engines"].items():
        where = f" ({engine})" if len(result["engines"]) > 1 else ""
        found += [_held(figures, where), _points(figures, where)]
    if result["agreement"] is not None:
        found.append(_agreement(result["agreement"]))
    return found


def _held(figures: Mapping[str, Any], where: str) -> TextTable:
    baselines = " and ".join(figures["baselines"]) if len(figures["baselines"]) < 3 else "fcfs, static and bucketed"
    against = f"at {RATIO_TARGET:.0%}, against best of {baselines}" if figures["baselines"] else "ratio"
    rows = []
    for policy in figures["policies"]:
        held = [_rate(policy["held_rates"][f"{target:.2f}"]) for target in TARGETS]
        rows.append((policy["policy"], f"{policy['mean_attainment']:.1%}", *held, _ratio(policy["ratio_at_95"])))
    columns = ("policy", "mean attainment", *(f"holds {target:.0%} up to" for target in TARGETS), against)
    return TextTable(f"Highest request rate{where}", columns, tuple(rows), note=HELD_NOTE)


def _points(figures: Mapping[str, Any], where: str) -> TextTable:
    rows = []
    for point in figures["points"]:
        seeds = [share for share in point["attainment_by_seed"].values() if share is not None]
        reasons = "; ".join(f"{count} {reason}" for reason, count in point["discarded_by_reason"].items())
        failed = f"{point['failed_requests']} failed" if point["failed_requests"] else ""
        rows.append(
            (
                point["policy"],
                f"{point['request_rate']:g}/s",
                f"{point['slo_attainment_rate']:.1%}",
                f"{point['interval_low']:.1%} to {point['interval_high']:.1%}",
                f"{min(seeds):.0%} to {max(seeds):.0%}" if len(seeds) > 1 else DASH,
                str(point["num_requests"]),
                f"{point['goodput_qps']:.3g}/s",
                seconds(point["latency_p50"]),
                seconds(point["latency_p95"]),
                "; ".join(filter(None, [reasons, failed])) or DASH,
            )
        )
    columns = (
        "policy",
        "rate",
        "SLO attainment",
        "95 % interval",
        "seeds",
        "requests",
        "goodput",
        "p50",
        "p95",
        "lost",
    )
    return TextTable(f"Every rate{where}", columns, tuple(rows), note=INTERVAL_NOTE)


def _agreement(found: Mapping[str, Any]) -> TextTable:
    rows = []
    for row in found["rows"]:
        share = row["latency_difference"]
        rows.append(
            (
                row["policy"],
                f"{row['request_rate']:g}/s",
                f"{row['real_attainment']:.1%}",
                f"{row['simulated_attainment']:.1%}",
                f"{row['attainment_difference_points']:+.1f}",
                seconds(row["real_latency_mean"]),
                seconds(row["simulated_latency_mean"]),
                DASH if share is None else f"{share:+.1%}",
            )
        )
    columns = ("policy", "rate", "attainment", "simulated", "points", "mean latency", "simulated", "difference")
    note = ""
    if found["rows"] and found["max_latency_difference"] is not None:
        note = (
            f"Attainment within {found['max_attainment_difference_points']:.1f} points "
            f"(mean {found['mean_attainment_difference_points']:.1f}), mean latency within "
            f"{found['max_latency_difference']:.1%} (mean {found['mean_latency_difference']:.1%})."
        )
    return TextTable("Simulator against engine", columns, tuple(rows), note=note)


def _rate(held: Mapping[str, Any]) -> str:
    rate = f"{held['rate']:.3g}/s"
    return {"between": rate, "below": f"below {rate}", "beyond": f"beyond {rate}"}[held["where"]]


def _ratio(found: Mapping[str, Any] | None) -> str:
    if found is None or found["value"] is None:
        return DASH
    return {"exact": "", "least": "at least ", "most": "at most "}[found["kind"]] + f"{found['value']:.2f}x"


def seconds(value: float | None) -> str:
    """A time in words."""
    if value is None:
        return DASH
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s"
