"""Systems that serve a light and a heavy model, side by side on the virtual clock: quality over lateness.

All systems get the same requests, seeds and SLOs. Quality is the FID of the images that were served, pooled over seeds;
differences between systems have intervals over prompts, differences of lateness over seeds (DiffServe section 4).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch

from ...data.errors import UsageError
from ...data.run_facts import describe
from ...data.statistics import Estimate
from ...profiling.cascade.bank import Bank
from ...profiling.experiment.experiment import Outcome, write_page
from ...profiling.report.table import Table
from ...serving.cascade.legs import Side
from ...serving.cascade.systems import get_cascade_system
from ...serving.core.metrics import slo_attainment_rate
from ...serving.models.defaults import ModelDefaults
from ...serving.runs.cascade.deployment import CascadeDeployment, CascadeRun
from ...serving.runs.trace_requests import draw_requests
from ...serving.runs.trace_settings import TraceSettings
from ..measurer import StartPhase
from .plots import plot_over_lateness, plot_over_slo_scales, plot_side_by_side
from .quality import compare_served, quality_curve, served_quality

BASE = "diffserve"
"""System with which the others are compared."""
Quality = tuple[tuple[float, float], ...]
OURS: Mapping[str, Callable[[CascadeDeployment, Bank, Quality], CascadeDeployment]] = {
    f"{BASE} --objective quality": lambda deployment, bank, quality: replace(
        deployment, knobs=replace(deployment.knobs, quality=quality)
    ),
    f"{BASE} --on-late light": lambda deployment, bank, quality: replace(deployment, on_late="light"),
    f"{BASE} --replan-on-burst": lambda deployment, bank, quality: replace(deployment, replan_on_burst=True),
    f"{BASE} --skip-light": lambda deployment, bank, quality: replace(deployment, skip_light=True, reuse_light=False),
    f"{BASE} --reuse-light": lambda deployment, bank, quality: replace(deployment, reuse_light=True),
    f"{BASE} --threshold-per-resolution": lambda deployment, bank, quality: replace(
        deployment, sizes=[str(entry.resolution) for entry in bank.entries]
    ),
}
"""Our additions to DiffServe, each alone: the change of a deployment, given the bank and its FID by threshold."""


@dataclass(frozen=True, slots=True)
class CascadeBenchSettings:
    """Systems and settings to compare.

    Attributes:
        systems: names of systems, including those of `OURS`.
        slo_scales: SLOs as multiples of the heavy model's e(1).
        overprovisions: values of lambda, for systems that plan with it.
        seeds: seeds of traces and random choices.
        num_resamples: number of resamples for intervals of FID differences.

    Raises:
        UsageError: there is nothing to compare, or a system is unknown.
    """

    systems: tuple[str, ...]
    slo_scales: tuple[float, ...]
    overprovisions: tuple[float, ...] = (1.05,)
    seeds: tuple[int, ...] = (0,)
    num_resamples: int = 40

    def __post_init__(self) -> None:
        for name in ("systems", "slo_scales", "overprovisions", "seeds"):
            if not getattr(self, name):
                raise UsageError(f"there are no {name.replace('_', ' ')} to compare")
        for name in self.systems:
            if name not in OURS:
                get_cascade_system(name)
        if self.num_resamples < 2:
            raise UsageError(f"--num-resamples is {self.num_resamples}, but it must be at least 2")

    def points(self) -> list[tuple[str, float, float]]:
        """Return (system, SLO scale, lambda) of each point; lambda does not affect systems of one model."""
        return [
            (name, scale, each)
            for scale, each, name in product(self.slo_scales, self.overprovisions, self.systems)
            if each == self.overprovisions[0] or not name.startswith("clipper")
        ]


@dataclass(frozen=True, slots=True)
class _Point:
    """Runs of a point, and for all their requests the entry of the bank and the side whose image was served."""

    runs: list[CascadeRun]
    places: list[int]
    served: list[Side | None]

    @property
    def violations(self) -> list[float]:
        """Violation rate of each run."""
        return [1 - (slo_attainment_rate(run.result.records) or 0.0) for run in self.runs]


def run_cascade_bench(
    deployment: CascadeDeployment,
    bank: Bank,
    features: Mapping[str, torch.Tensor],
    trace: TraceSettings,
    defaults: ModelDefaults,
    settings: CascadeBenchSettings,
    *,
    start_phase: StartPhase,
) -> dict[str, Any]:
    """Run all points, and compare them.

    Args:
        deployment: deployment, whose system, SLO scale, lambda and seed are replaced.
        bank, features: bank of images, and their features.
        trace: settings of the trace; its seed is replaced.
        defaults: defaults of requests.
        settings: systems and settings to compare.
        start_phase: reports progress.

    Raises:
        UsageError: as `CascadeDeployment.run` and `draw_requests`.
    """
    traces = {}
    for seed in settings.seeds:
        traces[seed] = bank.dealt(draw_requests(replace(trace, seed=seed), defaults), seed)
    points, done = settings.points(), dict[tuple[str, float, float], _Point]()
    quality: Quality = ()
    if OURS.keys() & set(settings.systems):
        quality = quality_curve(features, bank.confidences, reuses_light=deployment.reuse_light)
    advance = start_phase("simulated traces", len(points) * len(settings.seeds))
    for name, scale, overprovision in points:
        point = _Point([], [], [])
        system = get_cascade_system(BASE if name in OURS else name)
        for seed in settings.seeds:
            own = replace(
                OURS[name](deployment, bank, quality) if name in OURS else deployment.of_system(system),
                slo_scale=scale,
                overprovision=overprovision,
                seed=seed,
            )
            requests, places = traces[seed]
            run = own.run(own.promised(requests), places)
            point.runs.append(run)
            point.places.extend(places)
            sides = run.result.sides()
            point.served.extend(sides.get(request.request_id) for request in requests)
            advance(1)
        done[name, scale, overprovision] = point
    compared = start_phase("comparisons of images", len(points))
    rows = []
    for key in points:
        base = done.get((BASE, key[1], key[2]))
        rows.append(_row(key, done[key], None if key[0] == BASE else base, features, settings.num_resamples))
        compared(1)
    return {
        "settings": asdict(settings),
        "num_workers": deployment.num_workers,
        "num_requests": {str(seed): len(requests) for seed, (requests, _) in traces.items()},
        "num_prompts": len(bank.entries),
        "num_reference": len(features["reference"]),
        "trace": trace.to_config(),
        "light": dict(deployment.profile.legs["light"].facts.to_json()),
        "heavy": dict(deployment.profile.legs["heavy"].facts.to_json()),
        "rows": rows,
        "dominating": _dominating(rows),
    }


def _dominating(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return points with fewer late requests and a better FID than `BASE` at the same SLO scale (figure 4)."""
    known = [row for row in rows if row["quality"]["fid"] is not None]
    return [
        {**{name: row[name] for name in ("system", "slo_scale", "overprovision")}, "base": base["overprovision"]}
        for base in known
        for row in known
        if base["system"] == BASE != row["system"]
        and base["slo_scale"] == row["slo_scale"]
        and row["violation_rate"]["value"] < base["violation_rate"]["value"]
        and row["quality"]["fid"] < base["quality"]["fid"]
    ]


def _row(
    key: tuple[str, float, float],
    point: _Point,
    base: _Point | None,
    features: Mapping[str, torch.Tensor],
    num_resamples: int,
) -> dict[str, Any]:
    figures = [run.figures() for run in point.runs]
    served = Counter(side for side in point.served if side is not None)

    def mean(name: str) -> float | None:
        known = [each[name] for each in figures if each[name] is not None]
        return sum(known) / len(known) if known else None

    row: dict[str, Any] = {
        "system": key[0],
        "slo_scale": key[1],
        "overprovision": key[2],
        "violation_rate": Estimate.of_mean(point.violations).to_json(),
        "quality": served_quality(features, point.places, point.served),
        "heavy_share": 1 - served["light"] / served.total() if served else None,
        **{name: mean(name) for name in ("deferred_share", "threshold_mean", "switches", "wasted_light_s")},
        "plans_replaced": mean("plans_replaced"),
        "plans_by_status": dict(sum((Counter(each["plans_by_status"]) for each in figures), Counter[str]())),
        "against_base": None,
    }
    if base is not None:
        fid = compare_served(features, point.places, base.served, point.served, num_resamples=num_resamples)
        late = [one - other for one, other in zip(point.violations, base.violations, strict=True)]
        row["against_base"] = {
            "fid_difference": fid.estimate.to_json(),
            "fid_base": fid.first,
            "fid": fid.second,
            "violation_difference": Estimate.of_mean(late).to_json(),
        }
    return row


def write_cascade_bench(result: dict[str, Any]) -> Outcome:
    """Write result, plots and page into the result's folder. Raises OSError."""
    pictures = {"over-lateness": plot_over_lateness, "side-by-side": plot_side_by_side}
    if len(result["settings"]["slo_scales"]) > 1:
        pictures["over-slo-scales"] = plot_over_slo_scales
    title = "A light and a heavy model: systems side by side"
    return write_page(title, result, lambda result: [bench_table(result)], pictures)


def bench_table(result: Mapping[str, Any]) -> Table:
    """Return a table with a row for each point."""
    rows = []
    for row in result["rows"]:
        late, against = row["violation_rate"], row["against_base"]
        rows.append(
            (
                row["system"],
                f"{row['slo_scale']:g}",
                f"{row['overprovision']:g}",
                _with_interval(late, "{:.1%}"),
                "-" if row["quality"]["fid"] is None else f"{row['quality']['fid']:.2f}",
                "-" if against is None else _with_interval(against["fid_difference"], "{:+.2f}"),
                "-" if against is None else _with_interval(against["violation_difference"], "{:+.1%}"),
                "-" if row["heavy_share"] is None else f"{row['heavy_share']:.0%}",
                "-" if row["threshold_mean"] is None else f"{row['threshold_mean']:.2f}",
            )
        )
    better = sorted({each["system"] for each in result["dominating"]})
    return Table(
        f"{result['num_workers']} workers, {sum(result['num_requests'].values())} requests, "
        f"{result['num_prompts']} prompts: {describe(result['heavy'])}",
        ("system", "SLO scale", "lambda", "late", "FID", f"- {BASE}", "late - it", "heavy", "threshold"),
        rows,
        note="late: discarded, failed or beyond the SLO, 95 % over seeds; FID of the images served, its difference "
        "with 95 % over prompts on the requests that both served. "
        f"In both better than {BASE} at some lambda: {', '.join(better) or 'none'}.",
    )


def _with_interval(estimate: Mapping[str, Any], form: str) -> str:
    text = form.format(estimate["value"])
    if estimate["low"] is None:
        return text
    return f"{text} ({form.format(estimate['low'])} to {form.format(estimate['high'])})"
