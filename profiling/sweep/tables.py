"""The tables of a sweep in words, for the terminal and for the report alike. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .held import RATIO_TARGET, TARGETS

DASH = "-"
INTERVAL_NOTES = {
    "seeds": "Intervals over seeds are Student's 95 %, never narrower than Wilson's over their requests.",
    "requests": "Intervals over requests are Wilson's 95 %, as if requests were independent; they queue behind each "
    "other, so another run may lie further off. Three seeds give intervals over seeds.",
}
HELD_NOTE = (
    "A rate is held up to where the attainment first falls below the target, on a straight line between two measured "
    "rates; below or beyond: not even at the lowest rate of the sweep, or still at its highest. In brackets: 95 % over "
    "three seeds or more (Student's, of logarithms), where each of them fell below the target within the sweep."
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
    baselines = " and ".join(figures["baselines"])
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
                f"{point['num_runs']} seeds" if point["interval_over"] == "seeds" else "requests (Wilson)",
                f"{min(seeds):.0%} to {max(seeds):.0%}" if len(seeds) > 1 else DASH,
                str(point["num_requests"]),
                f"{point['goodput_qps']:.3g}/s",
                seconds(point["latency_p50"]),
                seconds(point["latency_p95"]),
                "; ".join(filter(None, [reasons, failed])) or DASH,
            )
        )
    kinds = {point["interval_over"] for point in figures["points"]}
    columns = (
        "policy",
        "rate",
        "SLO attainment",
        "95 % interval",
        "over",
        "seeds",
        "requests",
        "goodput",
        "p50",
        "p95",
        "lost",
    )
    note = " ".join(note for over, note in INTERVAL_NOTES.items() if over in kinds)
    return TextTable(f"Every rate{where}", columns, tuple(rows), note=note)


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
    if held["low"] is not None:
        rate += f" ({held['low']:.3g} to {held['high']:.3g})"
    return {"between": rate, "below": f"below {rate}", "beyond": f"beyond {rate}"}[held["where"]]


def _ratio(found: Mapping[str, Any] | None) -> str:
    if found is None or found["value"] is None:
        return DASH
    return {"exact": "", "least": "at least ", "most": "at most "}[found["kind"]] + _times(found)


def _times(found: Mapping[str, Any]) -> str:
    interval = "" if found["low"] is None else f" ({found['low']:.2f} to {found['high']:.2f})"
    return f"{found['value']:.2f}x{interval}"


def seconds(value: float | None) -> str:
    """A time in words."""
    if value is None:
        return DASH
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s"
