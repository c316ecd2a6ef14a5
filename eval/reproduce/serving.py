"""SLO attainment over the request rate: PatchedServe's figures 11, 12 and 13 (section 8.1)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import Any

from ...data.tables.latency import TABLE_PATTERN
from ...profiling.runs.trace_settings import DEFAULT_SLO_SCALE, TraceSettings
from ...profiling.sweep.engine_side import EngineSide
from ...profiling.sweep.held import RATIO_TARGET, TARGETS, HeldRate, ratio
from ...profiling.sweep.runner import Side, WarmUp, sweep
from ...profiling.sweep.settings import SweepEngine, SweepSettings
from ...profiling.sweep.simulator_side import CALIBRATION_FILE, SimulatorFiles, SimulatorSide
from ...training.latency.predictor import PREDICTOR_FILE
from .lab import Lab, finish
from .paper import Found, Statement

_Settings = Mapping[str, Any]
_PLAIN_SYSTEMS = ("diffusers", "diffusers-fcfs", "bucketed")
_SYSTEMS = ("nirvana", "patched-fcfs", "patchedserve")
_BATCH = 16
"""Largest batch of all systems, section 8."""


def served_on_one_gpu(lab: Lab, settings: _Settings) -> Found:
    """Figure 11: SLO attainment over the request rate, on the engine and in the simulator beside it."""
    rates = lab.rates(settings["shares"], _BATCH, settings["num_steps"])
    systems = (*_PLAIN_SYSTEMS, *_SYSTEMS)
    result = _served(lab, settings, systems, rates, settings["num_seeds"])
    figures = result["engines"]["real"]
    mean = {each["policy"]: 100 * each["mean_attainment"] for each in figures["policies"]}
    own, others = _points(figures, "patchedserve"), _points(figures, "patched-fcfs")
    statements = [
        Statement(
            "PatchedServe over NIRVANA, mean of the rates",
            mean["patchedserve"] - mean["nirvana"],
            (30.1,),
            unit="points",
            neutral=0,
        ),
        Statement("PatchedServe in time at the lowest rate", own[0], (0.99,), unit="share", neutral=0.99),
        Statement(
            "PatchedServe over PatchedCache at the highest rate", 100 * (own[-1] - others[-1]), unit="points", neutral=0
        ),
    ]
    held = {
        each["policy"]: {target: HeldRate(**_only(rate)) for target, rate in each["held_rates"].items()}
        for each in figures["policies"]
    }
    key = f"{RATIO_TARGET:.2f}"
    text = f"rate with {RATIO_TARGET:.0%} in time, PatchedServe against NIRVANA"
    statements.append(_held_longer(text, held["patchedserve"][key], held["nirvana"][key]))
    for target, said in zip(TARGETS, (1.5, 1.12, 1.1), strict=True):
        rate, base = (held[name][f"{target:.2f}"] for name in ("patchedserve", "patched-fcfs"))
        text = f"rate with {target:.0%} in time, PatchedServe against PatchedCache"
        statements.append(_held_longer(text, rate, base, said))
    ours = _served_json(result) | {"by_slo_scale": _by_slo_scale(lab, settings, systems, median_low(rates), figures)}
    return Found(ours, statements)


def _held_longer(text: str, rate: HeldRate, base: HeldRate, *said: float) -> Statement:
    """How many times as high a rate is held, which may be known from one side only."""
    found = ratio(rate, base)
    bound = {"least": ", at least", "most": ", at most"}.get(found["kind"], "")
    return Statement(text + bound, found["value"], said)


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


def served_on_many_gpus(lab: Lab, settings: _Settings) -> Found:
    """Figures 12 and 13: the same on 2, 4 and 8 GPUs, simulated.

    A request goes to the GPU with the fewest pixels left to draw; DistriFusion spans them all. Steps and stages last as
    they did on this machine in a run at the middle rate, which says as well how far the simulator is off.
    """
    rates = lab.rates(settings["shares"], _BATCH, settings["num_steps"])
    middle = median_low(rates)
    checked = _served(lab, settings, _SYSTEMS, [middle], 1)
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
        mean = {each["policy"]: 100 * each["mean_attainment"] for each in figures["policies"]}
        best = max(mean[name] for name in names if name != "patchedserve")
        gain = mean["patchedserve"] - best
        text = f"{num_gpus} GPUs: PatchedServe over the best other, mean of the rates"
        statements.append(Statement(text, gain, unit="points", neutral=0))
        nirvana, spanning = _points(figures, "nirvana"), _points(figures, "distrifusion-fcfs")
        for place, where, is_more in ((0, "lowest", False), (-1, "highest", True)):
            text = f"{num_gpus} GPUs: NIRVANA over DistriFusion at the {where} rate"
            difference = 100 * (nirvana[place] - spanning[place])
            statements.append(Statement(text, difference, unit="points", neutral=0, is_more=is_more))
    return Found(ours, statements)


def _served(
    lab: Lab,
    settings: _Settings,
    systems: Sequence[str],
    rates: Sequence[float],
    num_seeds: int,
    engine: SweepEngine = "both",
    slo_scale: float = DEFAULT_SLO_SCALE,
) -> dict[str, Any]:
    """Runs on the engine, and in the simulator beside it; what other calls have finished is not served again."""
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
    trace = TraceSettings(num_prompts=num_prompts, num_inference_steps=settings["num_steps"], resolutions=sizes)
    seeds = tuple(range(lab.seed, lab.seed + num_seeds))
    return SweepSettings(tuple(systems), tuple(rates), seeds, engine, trace, slo_scale, _BATCH, num_gpus)


def _sweep(lab: Lab, settings: SweepSettings, side: Side, folder: Path) -> dict[str, Any]:
    done = lab.start("served traces", settings.num_runs)
    outcome = sweep(settings, side, lab.model.defaults, lambda: folder, on_done=lambda: done(1))
    finish(outcome.was_interrupted)
    return outcome.result


def _served_json(result: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a sweep."""
    return {name: result[name] for name in ("engines", "agreement", "standalone_s", "run_dir")}


def _points(figures: Mapping[str, Any], system: str) -> list[float]:
    """Attainment of a system by rate."""
    return [each["slo_attainment_rate"] for each in figures["points"] if each["policy"] == system]


def _only(held: Mapping[str, Any]) -> dict[str, Any]:
    return {name: held[name] for name in ("where", "rate")}
