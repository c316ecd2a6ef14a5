"""Figures of a sweep over systems and request rates (PatchedServe figure 11), from the records of its runs. No torch.

Runs of one system and rate with different seeds are pooled: attainment is the share of all their requests that were in
time. `held` computes its interval.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

import numpy as np

from ...data.statistics import Estimate
from ...serving.core.step_row import StepRow
from .held import RATIO_TARGET, TARGETS, SustainedRates, best_sustained, share_interval

BASELINES = ("diffusers", "diffusers-fcfs", "bucketed")
"""Systems the best of which the others are compared with."""
_EXTRAS = {
    "batch_size_mean": ("batch_size_mean",),
    "step_latency_mean": ("step_latency_mean",),
    "scheduling_mean": ("scheduling_mean",),
    "saved_computation": ("cache", "saved_computation"),
    "predictor_scale": ("predictor_drift", "scale"),
}
"""Figures that engines report, if they have them, as means over the seeds."""

NEAR_SATURATION = 0.9
"""Share of a system's capacity above which small errors of step times become large errors of latencies."""

EngineKind = Literal["real", "simulator"]


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """Data of one run of a sweep for the figures; a few bytes a request, because a sweep has hundreds of runs.

    Attributes:
        engine, system, request_rate, seed: engine and system that served the run, and its place in the sweep.
        num_met: number of requests within the SLO.
        statuses, reasons: number of requests by status, and of discarded ones by reason.
        latencies_s: (n,) float64, latencies of the completed requests.
        duration_s: seconds until the last request ended.
        figures: further figures of the engine, as JSON.
        met_by_resolution: number of requests in time, and of all requests, by resolution.
    """

    engine: EngineKind
    system: str
    request_rate: float
    seed: int
    num_met: int
    statuses: Mapping[str, int]
    reasons: Mapping[str | None, int]
    latencies_s: np.ndarray
    duration_s: float
    figures: Mapping[str, Any] = field(default_factory=dict)
    met_by_resolution: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        return sum(self.statuses.values())

    @property
    def attainment(self) -> float:
        """Share of the requests in time."""
        return self.num_met / self.num_requests


def point_figures(runs: Sequence[FinishedRun]) -> dict[str, Any]:
    """Return the figures of the runs of one system at one rate, pooled over seeds. All requests must have an SLO.

    `scheduling_share_by_seed` is the share of the policy's decision in the time of a step and that decision.
    """
    num_met, num_requests = sum(run.num_met for run in runs), sum(run.num_requests for run in runs)
    latencies = np.concatenate([run.latencies_s for run in runs])
    interval = share_interval([run.num_met for run in runs], [run.num_requests for run in runs])
    p50, p95 = np.percentile(latencies, [50, 95]).tolist() if len(latencies) else (None, None)
    statuses, reasons = Counter[str](), Counter[str | None]()
    met_of, requests_of = Counter[str](), Counter[str]()
    for run in runs:
        for size, (met, count) in run.met_by_resolution.items():
            met_of[size] += met
            requests_of[size] += count
        statuses.update(run.statuses)
        reasons.update(run.reasons)
    return {
        "engine": runs[0].engine,
        "policy": runs[0].system,
        "request_rate": runs[0].request_rate,
        "num_runs": len(runs),
        "num_requests": num_requests,
        "num_met": num_met,
        "slo_attainment_rate": num_met / num_requests,
        "slo_attainment_by_resolution": {size: met_of[size] / count for size, count in requests_of.items()},
        "slo_attainment_worst": min((met_of[size] / count for size, count in requests_of.items()), default=None),
        "interval_low": interval.low,
        "interval_high": interval.high,
        "interval_over": interval.over,
        "attainment_by_seed": {str(run.seed): run.attainment for run in runs},
        "scheduling_share_by_seed": {
            str(run.seed): run.figures["scheduling_mean"] / (run.figures["scheduling_mean"] + step_s)
            for run in runs
            if (step_s := run.figures.get("step_latency_mean")) and run.figures.get("scheduling_mean") is not None
        },
        "goodput_qps": num_met / sum(run.duration_s for run in runs),
        "latency_mean": float(latencies.mean()) if len(latencies) else None,
        "latency_p50": p50,
        "latency_p95": p95,
        **{f"{name}_requests": statuses[name] for name in ("completed", "discarded", "failed")},
        "discarded_by_reason": dict(reasons.most_common()),
        **{name: _mean_of(runs, path) for name, path in _EXTRAS.items()},
    }


def _mean_of(runs: Sequence[FinishedRun], path: Sequence[str]) -> float | None:
    """Return the mean of a figure over the runs that have it; None if none has."""
    values: list[float] = []
    for run in runs:
        value: Any = run.figures
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            values.append(value)
    return fmean(values) if values else None


def steps_by_batch(steps: Iterable[StepRow]) -> dict[str, list[float]]:
    """Return the number of steps and their total seconds, by batch size, as JSON."""
    found: dict[str, list[float]] = {}
    for row in steps:
        known = found.setdefault(str(row.active), [0, 0.0])
        known[0] += 1
        known[1] += row.duration_s
    return found


def sweep_figures(runs: Sequence[FinishedRun]) -> dict[str, Any]:
    """Return all figures of the runs of one engine: systems in order of first occurrence, rates ascending.

    Returns:
        `points`: `point_figures` of every system and rate. `policies`: for each system its mean attainment over its
        rates, the rates up to which it holds `TARGETS`, and `ratio_at_95` to the best of `BASELINES` (None without
        one). The keys say `policy` for a system, because they predate the distinction.
    """
    points: list[dict[str, Any]] = []
    systems: list[dict[str, Any]] = []
    held_at: dict[str, SustainedRates] = {}
    for name in dict.fromkeys(run.system for run in runs):
        mine = [run for run in runs if run.system == name]
        rates = sorted({run.request_rate for run in mine})
        own = [point_figures([run for run in mine if run.request_rate == rate]) for rate in rates]
        points += own
        shares = {point["request_rate"]: point["slo_attainment_rate"] for point in own}
        by_seed: dict[int, dict[float, float]] = {}
        for run in mine:
            by_seed.setdefault(run.seed, {})[run.request_rate] = run.attainment
        held = {target: SustainedRates.of(shares, by_seed, target) for target in TARGETS}
        held_at[name] = held[RATIO_TARGET]
        systems.append(
            {
                "policy": name,
                "mean_attainment": fmean(shares.values()),
                "num_rates": len(shares),
                "held_rates": {f"{target:.2f}": each.to_json() for target, each in held.items()},
            }
        )
    baselines = [name for name in held_at if name in BASELINES]
    best = best_sustained(held_at[name].pooled for name in baselines) if baselines else None
    base = next((held_at[name] for name in baselines if held_at[name].pooled == best), None)
    for system in systems:
        system["ratio_at_95"] = None if base is None else held_at[system["policy"]].ratio_to(base)
    return {"points": points, "policies": systems, "baselines": baselines}


def agreement(runs: Sequence[FinishedRun]) -> dict[str, Any]:
    """Compare the simulator with the engine: points of both at the same system and rate, over the same seeds.

    Returns:
        `rows`: attainment and mean latency of both; the difference of attainments in percentage points; the difference
        of mean latencies (of completed requests) as a share of the engine's; the same difference for steps of equally
        large batches, which is smaller near saturation, where slightly slower steps mean a longer queue; and `load`,
        the rate as a share of the system's capacity in the simulator. Then the largest and the mean absolute
        differences over all rows, and the largest differences of mean latencies below `NEAR_SATURATION` and from there
        on.
    """
    real, simulated = (
        {(run.system, run.request_rate, run.seed): run for run in runs if run.engine == kind}
        for kind in ("real", "simulator")
    )
    names = list(dict.fromkeys(run.system for run in runs))
    rows = []
    for name, rate in sorted({key[:2] for key in real}, key=lambda key: (names.index(key[0]), key[1])):
        keys = [key for key in real if key[:2] == (name, rate) and key in simulated]
        if not keys:
            continue
        ours, theirs = (point_figures([each[key] for key in keys]) for each in (real, simulated))
        latencies = ours["latency_mean"], theirs["latency_mean"]
        capacity = _mean_of([simulated[key] for key in keys], ["capacity_qps"])
        rows.append(
            {
                "policy": name,
                "request_rate": rate,
                "load": rate / capacity if capacity else None,
                "num_requests": ours["num_requests"],
                "real_attainment": ours["slo_attainment_rate"],
                "simulated_attainment": theirs["slo_attainment_rate"],
                "attainment_difference_points": 100 * (theirs["slo_attainment_rate"] - ours["slo_attainment_rate"]),
                "real_latency_mean": latencies[0],
                "simulated_latency_mean": latencies[1],
                # If these differ as much as latencies do, the machine has drifted since its calibration.
                "real_step_latency_mean": ours["step_latency_mean"],
                "simulated_step_latency_mean": theirs["step_latency_mean"],
                "latency_difference": None if None in latencies else latencies[1] / latencies[0] - 1,
                "step_difference": _step_difference(*([each[key] for key in keys] for each in (real, simulated))),
            }
        )
    found: dict[str, Any] = {"rows": rows}
    for name in ("attainment_difference_points", "latency_difference", "step_difference"):
        sizes = [abs(row[name]) for row in rows if row[name] is not None]
        found |= {f"max_{name}": max(sizes, default=None), f"mean_{name}": fmean(sizes) if sizes else None}
    for name, is_near in (("below", False), ("near", True)):
        mine = [row for row in rows if row["load"] is not None and (row["load"] >= NEAR_SATURATION) == is_near]
        sizes = [abs(row["latency_difference"]) for row in mine if row["latency_difference"] is not None]
        found[f"max_latency_difference_{name}_saturation"] = max(sizes, default=None)
    return found


def _step_difference(real: Sequence[FinishedRun], simulated: Sequence[FinishedRun]) -> float | None:
    """Return how much longer steps are in the simulator, as a share, over the batch sizes that both have, weighted by
    the engine's number of steps; None if there are none.
    """
    known = []
    for runs in (real, simulated):
        totals: dict[str, list[float]] = {}
        for run in runs:
            for size, (num, time_s) in run.figures.get("steps_by_batch", {}).items():
                before = totals.setdefault(size, [0, 0.0])
                totals[size] = [before[0] + num, before[1] + time_s]
        known.append(totals)
    both = [(*known[0][size], *known[1][size]) for size in known[0] if size in known[1]]
    measured_s = sum(time_s for _, time_s, _, _ in both)
    return sum(num * other_s / others for num, _, others, other_s in both) / measured_s - 1 if both else None


def estimates(engines: Mapping[str, Mapping[str, Any]], agreed: Mapping[str, Any] | None) -> dict[str, Estimate]:
    """Return the figures that gates read: `patchedserve@2.slo_attainment` and the like at every rate, and
    `mean_attainment`, `rate_at_95` and `ratio_at_95` of every system. Names of engines after the first begin with the
    engine's name.

    Intervals are those over seeds. The intervals of one or two seeds treat requests as independent and are too narrow
    to judge by, so they are omitted here.
    """
    found: dict[str, Estimate] = {}
    for number, (engine, figures) in enumerate(engines.items()):
        prefix = f"{engine}." if number else ""
        for point in figures["points"]:
            name, share = f"{prefix}{point['policy']}@{point['request_rate']:g}.", point["slo_attainment_rate"]
            n, goodput = point["num_requests"], point["goodput_qps"]
            ends = (point["interval_low"], point["interval_high"]) if point["interval_over"] == "seeds" else None
            found[f"{name}slo_attainment"] = Estimate(share, *(ends or (None, None)), n)
            scale = goodput / share if ends and share else None
            low, high = (None, None) if ends is None or scale is None else (ends[0] * scale, ends[1] * scale)
            found[f"{name}goodput"] = Estimate(goodput, low, high, n)
            for key in ("latency_mean", "latency_p50", "latency_p95"):
                if point[key] is not None:
                    found[name + key] = Estimate(point[key], n=n)
        for system in figures["policies"]:
            name, ratios = f"{prefix}{system['policy']}.", system["ratio_at_95"]
            found[f"{name}mean_attainment"] = Estimate(system["mean_attainment"])
            for target, held in system["held_rates"].items():
                n = len(held["by_seed"]) or None
                found[f"{name}rate_at_{100 * float(target):.0f}"] = Estimate(held["rate"], held["low"], held["high"], n)
            if ratios is not None and ratios["value"] is not None:
                n = len(system["held_rates"][f"{RATIO_TARGET:.2f}"]["by_seed"]) or None
                found[f"{name}ratio_at_95"] = Estimate(ratios["value"], ratios["low"], ratios["high"], n)
    for name, value in (agreed or {}).items():
        if isinstance(value, float):
            found[f"agreement.{name}"] = Estimate(value)
    return found
