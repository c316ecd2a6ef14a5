"""SLO attainment over the request rate: PatchedServe's figures 11, 12 and 13 (section 8.1)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np

from ...data.statistics import Estimate
from ...data.tables.latency import TABLE_PATTERN
from ...profiling.runs.trace_settings import DEFAULT_SLO_SCALE, TraceSettings
from ...profiling.sweep.engine_side import EngineSide
from ...profiling.sweep.held import RATIO_TARGET, TARGETS, SustainedRates
from ...profiling.sweep.runner import SweepSide, WarmUp, sweep
from ...profiling.sweep.settings import SweepEngine, SweepSettings
from ...profiling.sweep.simulator_side import CALIBRATION_FILE, SimulatorFiles, SimulatorSide
from ...training.latency.predictor import PREDICTOR_FILE
from .lab import Lab, finish
from .paper import ExhibitResult
from .statement import Statement

_Settings = Mapping[str, Any]
_BASELINES = ("diffusers", "diffusers-fcfs", "bucketed")
_SYSTEMS = ("nirvana", "patched-fcfs", "patchedserve")
_SCHEDULED = "patched-schedule"
_BATCH = 16
"""Largest batch of all systems, section 8."""


def served_on_one_gpu(lab: Lab, settings: _Settings) -> ExhibitResult:
    """Figure 11: SLO attainment over the request rate, on the engine and in the simulator beside it.

    Beside the systems of the paper are `patched-slack`, which has no cache, and `patched-schedule`, which differs from
    it by its cache alone, as `patched-fcfs` differs from `patchedserve` by its policy.
    """
    rates = _rates(lab, settings)
    systems = (*_BASELINES, *_SYSTEMS, "patched-slack", _SCHEDULED)
    result = _served(lab, settings, systems, rates, settings["num_seeds"])
    figures = result["engines"]["real"]
    ours = _served_json(result) | {"by_slo_scale": _by_slo_scale(lab, settings, systems, median_low(rates), figures)}
    return ExhibitResult(ours, attainment_statements(figures))


def attainment_statements(figures: Mapping[str, Any]) -> list[Statement]:
    """What figure 11 says of the figures of a sweep, with intervals over its seeds."""
    lowest = next(point for point in figures["points"] if point["policy"] == "patchedserve")
    is_over_seeds = lowest["interval_over"] == "seeds"
    low, high = (lowest[end] if is_over_seeds else None for end in ("interval_low", "interval_high"))
    in_time = Estimate(lowest["slo_attainment_rate"], low, high, lowest["num_requests"])
    text = "PatchedServe over PatchedCache at the highest rate"
    statements = [
        Statement(
            "PatchedServe over NIRVANA, mean of the rates",
            _gain(figures, "patchedserve", "nirvana"),
            (30.1,),
            "points",
            0,
        ),
        Statement("PatchedServe in time at the lowest rate", in_time, (0.99,), "share", 0.99),
        Statement(text, _gain(figures, "patchedserve", "patched-fcfs", -1), (), "points", 0),
    ]
    held = {
        each["policy"]: {target: SustainedRates.from_json(rates) for target, rates in each["held_rates"].items()}
        for each in figures["policies"]
    }

    def sustained_longer(target: float, other: str, name: str, *said: float) -> Statement:
        """How many times as high a rate is held, which may be known from one side only: then there is no interval."""
        rate, base = (held[system][f"{target:.2f}"] for system in ("patchedserve", other))
        found = rate.ratio_to(base)
        bound = {"least": ", at least", "most": ", at most"}.get(found["kind"], "")
        ours = None if found["value"] is None else Estimate(found["value"], found["low"], found["high"])
        return Statement(f"rate with {target:.0%} in time, PatchedServe against {name}{bound}", ours, said)

    against_cache = [
        sustained_longer(target, "patched-fcfs", "PatchedCache", said)
        for target, said in zip(TARGETS, (1.5, 1.12, 1.1), strict=True)
    ]
    return [*statements, sustained_longer(RATIO_TARGET, "nirvana", "NIRVANA"), *against_cache]


def _gain(figures: Mapping[str, Any], system: str, other: str, place: int | None = None) -> Estimate:
    """How many points more requests of a system are in time, paired over the seeds: both have served the same traces.

    Args:
        figures: of a sweep.
        system, other: which are compared.
        place: of the rate, from the lowest; None: the mean of all rates.
    """
    own, base = (_by_seed(figures, name) for name in (system, other))
    points = [100 * np.subtract(own[seed], base[seed]) for seed in own if seed in base]
    return Estimate.of_mean([float(each.mean() if place is None else each[place]) for each in points])


def _by_seed(figures: Mapping[str, Any], system: str) -> dict[str, list[float]]:
    """Attainment of a system by rate, of every seed."""
    by_rate = [each["attainment_by_seed"] for each in figures["points"] if each["policy"] == system]
    return {seed: [shares[seed] for shares in by_rate] for seed in by_rate[0]}


def scheduling_shares(lab: Lab, settings: _Settings) -> dict[str, Estimate]:
    """What policies take as a share of a request's time, by system: over the seeds, at the middle rate of figure 11."""
    middle = median_low(_rates(lab, settings))
    result = _served(lab, settings, ("patchedserve", _SCHEDULED), [middle], settings["num_seeds"])
    return {
        each["policy"]: Estimate.of_mean(list(each["scheduling_share_by_seed"].values()))
        for each in result["engines"]["real"]["points"]
    }


def _by_slo_scale(
    lab: Lab, settings: _Settings, systems: Sequence[str], rate: float, figures: Mapping[str, Any]
) -> dict[str, Any]:
    """The points of a rate with other SLOs beside those of `figures`, by SLO scale; served on the engine alone."""
    points = {DEFAULT_SLO_SCALE: figures["points"]}
    for scale in settings["slo_scales"]:
        result = _served(lab, settings, systems, [rate], settings["num_seeds"], "real", scale)
        points[scale] = result["engines"]["real"]["points"]
    of_rate = {
        f"{scale:g}": [each for each in points[scale] if each["request_rate"] == rate] for scale in sorted(points)
    }
    return {"request_rate": rate, "points": of_rate}


def served_on_many_gpus(lab: Lab, settings: _Settings) -> ExhibitResult:
    """Figures 12 and 13: the same on 2, 4 and 8 GPUs, simulated.

    A request goes to the GPU with the fewest pixels left to draw; DistriFusion spans them all. Steps and stages last as
    they did on this machine in a run at the middle rate, which says as well how far the simulator is off.
    """
    rates = _rates(lab, settings)
    middle = median_low(rates)
    checked = _served(lab, settings, (*_SYSTEMS, _SCHEDULED), [middle], 1)
    source = Path(checked["run_dir"])
    patched, plain = (next((source / "tables" / name).glob(TABLE_PATTERN)) for name in ("patched", "plain"))
    files = SimulatorFiles(patched, plain, source / CALIBRATION_FILE)
    engines = files.engines(_BATCH, lab.on_warning)
    ours: dict[str, Any] = {"agreement": checked["agreement"], "middle_rate": middle, "served_in": str(source)}
    ours["gpus"] = {}
    statements = []
    for num_gpus in settings["gpus"]:
        names = ("distrifusion-fcfs", *_SYSTEMS)
        scaled = [float(f"{rate * num_gpus:.3g}") for rate in rates]
        asked = _sweep_settings(
            lab,
            settings,
            names,
            scaled,
            settings["num_seeds"],
            settings["simulated_prompts"] * num_gpus,
            "simulator",
            num_gpus,
        )
        side = SimulatorSide(asked, engines, lab.model.name, files.sources())
        result = _sweep(lab, asked, side, lab.folder("gpus", asked.fixed(), files.sources()))
        figures = result["engines"]["simulator"]
        ours["gpus"][str(num_gpus)] = _served_json(result)
        statements += statements_on_many(figures, num_gpus)
    return ExhibitResult(ours, statements)


def statements_on_many(figures: Mapping[str, Any], num_gpus: int) -> list[Statement]:
    """What figures 12 and 13 say of the figures of a sweep on so many GPUs, with intervals over its seeds."""
    mean = {each["policy"]: each["mean_attainment"] for each in figures["policies"] if each["policy"] != "patchedserve"}
    gain = _gain(figures, "patchedserve", max(mean, key=mean.__getitem__))
    text = f"{num_gpus} GPUs: PatchedServe over the best other, mean of the rates"
    statements = [Statement(text, gain, (), "points", 0)]
    for place, where, is_more in ((0, "lowest", False), (-1, "highest", True)):
        text = f"{num_gpus} GPUs: NIRVANA over DistriFusion at the {where} rate"
        difference = _gain(figures, "nirvana", "distrifusion-fcfs", place)
        statements.append(Statement(text, difference, (), "points", 0, is_more))
    return statements


def _rates(lab: Lab, settings: _Settings) -> list[float]:
    """The request rates of figure 11, in requests per second."""
    return lab.rates(
        settings["lowest_load"], settings["highest_load"], settings["num_rates"], _BATCH, settings["served_steps"]
    )


def _served(
    lab: Lab,
    settings: _Settings,
    systems: Sequence[str],
    rates: Sequence[float],
    num_seeds: int,
    engine: SweepEngine = "both",
    slo_scale: float = DEFAULT_SLO_SCALE,
) -> dict[str, Any]:
    """Runs on the engine, and in the simulator beside it; what other calls have finished is not served again.

    Runs are kept in one folder only if their systems have the same caches, so `_SCHEDULED` is always among them.
    """
    lab.require_schedule(settings["served_steps"])
    asked = _sweep_settings(
        lab, settings, systems, rates, num_seeds, settings["num_prompts"], engine, slo_scale=slo_scale
    )
    model = lab.cached_model()
    warm_up = WarmUp(settings["warmup_requests"], settings["tables"], settings["table_repeats"])
    side = EngineSide(
        asked,
        model,
        lab.place,
        predictor=lab.latency_predictor(_BATCH),
        predictor_file=lab.place.find_predictor(PREDICTOR_FILE),
        warm_up=warm_up,
        on_note=lab.on_note,
    )
    return _sweep(lab, asked, side, lab.folder("served", asked.fixed()))


def _sweep_settings(
    lab: Lab,
    settings: _Settings,
    systems: Sequence[str],
    rates: Sequence[float],
    num_seeds: int,
    num_prompts: int,
    engine: SweepEngine,
    num_gpus: int = 1,
    slo_scale: float = DEFAULT_SLO_SCALE,
) -> SweepSettings:
    sizes = ",".join(map(str, lab.sizes))
    trace = TraceSettings(num_prompts=num_prompts, num_inference_steps=settings["served_steps"], resolutions=sizes)
    seeds = tuple(range(lab.seed, lab.seed + num_seeds))
    return SweepSettings(tuple(systems), tuple(rates), seeds, engine, trace, slo_scale, _BATCH, num_gpus)


def _sweep(lab: Lab, settings: SweepSettings, side: SweepSide, folder: Path) -> dict[str, Any]:
    done = lab.start("served traces", settings.num_runs)
    outcome = sweep(settings, side, lab.model.defaults, lambda: folder, on_done=lambda: done(1))
    finish(outcome.was_interrupted)
    return outcome.result


def _served_json(result: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a sweep."""
    return {name: result[name] for name in ("engines", "agreement", "standalone_s", "run_dir")}
