"""SLO attainment over the request rate: PatchedServe's figures 11, 12 and 13 (section 8.1)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np

from ...data.statistics import Estimate
from ...data.tables.latency import TABLE_PATTERN
from ...profiling.sweep.engine_side import EngineSide
from ...profiling.sweep.held import RATIO_TARGET, TARGETS, SustainedRates
from ...profiling.sweep.runner import Sweep, SweepSide, WarmUp
from ...profiling.sweep.settings import SweepEngine, SweepSettings
from ...profiling.sweep.simulator_side import SimulatorFiles, SimulatorSide
from ...serving.runs.simulated.files import CALIBRATION_FILE
from ...serving.runs.trace_settings import TraceSettings
from ...training.latency.predictor import PREDICTOR_FILE
from .lab import Lab, finish
from .paper import Measurement
from .statement import Statement

_Settings = Mapping[str, Any]
_BASELINES = ("diffusers", "diffusers-fcfs", "bucketed")
_SYSTEMS = ("nirvana", "patched-fcfs", "patchedserve")
_SCHEDULED = "patched-schedule"
_BATCH = 16
"""Largest batch of all systems, section 8."""
_MIN_REQUESTS = 12
"""Expected number of requests of a trace at the lowest rate, on slow machines, too: as many seconds as eight SLOs."""


def served_on_one_gpu(lab: Lab, settings: _Settings) -> Measurement:
    """Measure figure 11: SLO attainment over the request rate, on the engine and in the simulator.

    Beside the paper's systems are `patched-slack`, which has no cache, and `patched-schedule`, which differs from it in
    its cache only, as `patched-fcfs` differs from `patchedserve` in its policy only.
    """
    rates = _rates(lab, settings)
    systems = (*_BASELINES, *_SYSTEMS, "patched-slack", _SCHEDULED)
    result = _served(lab, settings, systems, rates, settings["num_seeds"])
    figures = result["engines"]["real"]
    return Measurement(_kept_parts(result), attainment_statements(figures))


def attainment_statements(figures: Mapping[str, Any]) -> list[Statement]:
    """Return figure 11's statements beside the figures of a sweep, with intervals over its seeds."""
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
        """Compare held rates as a ratio. If only a bound of the ratio is known, there is no interval."""
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
    """Return the difference in SLO attainment of two systems in percentage points, paired over the seeds, as both have
    served the same traces.

    Args:
        figures: figures of a sweep.
        system, other: the systems; the result is positive if `system` is better.
        place: index of the rate, from the lowest; None for the mean of all rates.
    """
    own, base = (_by_seed(figures, name) for name in (system, other))
    points = [100 * np.subtract(own[seed], base[seed]) for seed in own if seed in base]
    return Estimate.of_mean([float(each.mean() if place is None else each[place]) for each in points])


def _by_seed(figures: Mapping[str, Any], system: str) -> dict[str, list[float]]:
    """Return a system's attainment at each rate, by seed."""
    by_rate = [each["attainment_by_seed"] for each in figures["points"] if each["policy"] == system]
    return {seed: [shares[seed] for shares in by_rate] for seed in by_rate[0]}


def scheduling_shares(lab: Lab, settings: _Settings) -> dict[str, Estimate]:
    """Return the policies' share of a request's time, by system, over the seeds at the middle rate of figure 11."""
    middle = median_low(_rates(lab, settings))
    result = _served(lab, settings, ("patchedserve", _SCHEDULED), [middle], settings["num_seeds"])
    return {
        each["policy"]: Estimate.of_mean(list(each["scheduling_share_by_seed"].values()))
        for each in result["engines"]["real"]["points"]
    }


def served_on_many_gpus(lab: Lab, settings: _Settings) -> Measurement:
    """Measure figures 12 and 13: SLO attainment on 2, 4 and 8 GPUs, in the simulator.

    A request is sent to the GPU with the fewest pixels left to draw; DistriFusion spans all GPUs. Steps and stages last
    as long as on this machine in a run at the middle rate, which also yields the error of the simulator.
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
        sweep_settings = _sweep_settings(
            lab,
            settings,
            names,
            scaled,
            settings["num_seeds"],
            settings["simulated_prompts"] * num_gpus,
            "simulator",
            num_gpus=num_gpus,
        )
        side = SimulatorSide(sweep_settings, engines, lab.model.name, files.sources())
        result = _sweep(lab, sweep_settings, side, lab.folder("gpus", sweep_settings.fixed(), files.sources()))
        figures = result["engines"]["simulator"]
        ours["gpus"][str(num_gpus)] = _kept_parts(result)
        statements += many_gpu_statements(figures, num_gpus)
    return Measurement(ours, statements)


def many_gpu_statements(figures: Mapping[str, Any], num_gpus: int) -> list[Statement]:
    """Return the statements of figures 12 and 13 beside a sweep on `num_gpus` GPUs, with intervals over its seeds."""
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
    """Return the request rates of figure 11, in requests per second."""
    return lab.rates(
        settings["lowest_load"], settings["highest_load"], settings["num_rates"], _BATCH, settings["served_steps"]
    )


def _longest_trace_s(lab: Lab, settings: _Settings) -> float | None:
    """Return the maximum length of a trace: that of the settings, or that of a few requests at the lowest rate."""
    longest_s = settings["longest_trace_s"]
    return None if longest_s is None else max(longest_s, _MIN_REQUESTS / _rates(lab, settings)[0])


def _served(
    lab: Lab,
    settings: _Settings,
    systems: Sequence[str],
    rates: Sequence[float],
    num_seeds: int,
) -> dict[str, Any]:
    """Serve traces on the engine and in the simulator; runs that other calls have finished are not repeated.

    Runs share a folder only if their systems have the same caches, so `_SCHEDULED` is always among them.
    """
    lab.require_schedule(settings["served_steps"])
    sweep_settings = _sweep_settings(
        lab,
        settings,
        systems,
        rates,
        num_seeds,
        settings["num_prompts"],
        "both",
        duration_s=_longest_trace_s(lab, settings),
    )
    model = lab.cached_model()
    warm_up = WarmUp(settings["warmup_requests"], settings["tables"], settings["table_repeats"])
    side = EngineSide(
        sweep_settings,
        model,
        lab.place,
        predictor=lab.latency_predictor(_BATCH),
        predictor_file=lab.place.find_predictor(PREDICTOR_FILE),
        warm_up=warm_up,
        on_note=lab.on_note,
    )
    return _sweep(lab, sweep_settings, side, lab.folder("served", sweep_settings.fixed()))


def _sweep_settings(
    lab: Lab,
    settings: _Settings,
    systems: Sequence[str],
    rates: Sequence[float],
    num_seeds: int,
    num_prompts: int,
    engine: SweepEngine,
    *,
    num_gpus: int = 1,
    duration_s: float | None = None,
) -> SweepSettings:
    sizes = ",".join(map(str, lab.sizes))
    trace = TraceSettings(
        num_prompts=num_prompts,
        duration_s=duration_s,
        num_inference_steps=settings["served_steps"],
        resolutions=sizes,
    )
    seeds = tuple(range(lab.seed, lab.seed + num_seeds))
    return SweepSettings(tuple(systems), tuple(rates), seeds, engine, trace, max_batch_size=_BATCH, num_gpus=num_gpus)


def _sweep(lab: Lab, settings: SweepSettings, side: SweepSide, folder: Path) -> dict[str, Any]:
    done = lab.start("served traces", settings.num_runs)
    outcome = Sweep(settings, side, lab.model.defaults, lambda: folder).run(on_done=lambda: done(1))
    finish(outcome.was_interrupted)
    return outcome.result


def _kept_parts(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a sweep's result that are kept."""
    return {name: result[name] for name in ("engines", "agreement", "standalone_s", "run_dir")}
