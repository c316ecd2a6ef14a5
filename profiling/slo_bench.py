"""`psctl bench slo` from end to end: get an engine or the simulator ready, sweep, and write what was found."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any

from ..data.checks import require_counts
from ..data.errors import RunError, UsageError
from ..data.files import atomic_write, sha256_of, write_json
from ..data.latency_table import Circumstances, read_latencies
from ..data.requests import Request
from ..serving.defaults import ModelDefaults
from ..serving.policies import StepLatencyPredictor
from ..serving.stage_times import StageTimes
from ..serving.stepper import EngineName
from ..training.latency_predictor import LatencyPredictor
from ..training.online_correction import OnlineCorrection
from .calibration import Calibration, calibrate, step_sources
from .machine import circumstances
from .slo_figures import EngineKind
from .slo_report import sweep_result, write_sweep
from .slo_simulated import SimulatedEngine, SimulatedRunner, read_calibrations
from .slo_sweep import SWEEP_FILE, Runner, SweepFolder, SweepSettings, read_head, run_sweep

if TYPE_CHECKING:
    from ..data.workspace import ModelWorkspace
    from ..serving.model import ServedModel

CALIBRATION_FILE = "calibration.json"
_Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What comes before the sweep on an engine.

    Attributes:
        num_requests: served by each engine at the middle rate before anything counts; twice if the simulator is to be
            calibrated, by the second time.
        combinations, repeats: of the latency tables, where the simulator needs one that the workspace does not have.
    """

    num_requests: int = 32
    combinations: int = 60
    repeats: int = 2

    def __post_init__(self) -> None:
        require_counts({"num requests": self.num_requests, "combinations": self.combinations, "repeats": self.repeats})


@dataclass(frozen=True, slots=True)
class SweepOutcome:
    """What a sweep gives: its result as in `result.json`, its page, its folder, and whether Ctrl-C ended it."""

    result: dict[str, Any]
    report: Path
    run_dir: Path
    was_interrupted: bool


def examples_of(settings: SweepSettings, defaults: ModelDefaults) -> list[Request]:
    """A request of every resolution that occurs in the sweep, from small to large; draws all traces once.

    Raises:
        UsageError: a trace cannot be drawn.
    """
    found: dict[Any, Request] = {}
    for rate, seed, _ in settings.order():
        for request in settings.requests(rate, seed, defaults):
            found.setdefault(request.resolution, request)
    return [found[size] for size in sorted(found, key=lambda size: (size.pixels, size))]


def bench_on_engine(
    settings: SweepSettings,
    model: "ServedModel",
    workspace: "ModelWorkspace",
    open_folder: Callable[[], Path],
    *,
    predictor: StepLatencyPredictor | None = None,
    warm_up: WarmUp | None = None,
    on_note: _Tell = lambda text: None,
    on_run: _Tell = lambda text: None,
    on_done: Callable[[], None] = lambda: None,
) -> SweepOutcome:
    """Sweep on the real engine, and beside it in the simulator if the settings say both.

    Args:
        settings: what is swept.
        model: loaded for the patch engine; policies of the plain engine share its weights.
        workspace: of the model.
        open_folder: gives an empty folder, or one of an earlier call that is gone on with; called once all is checked.
        predictor: step latencies of the patch engine, for policies that look ahead; corrected by what is measured.
        warm_up: what comes before.
        on_note: told what happens.
        on_run, on_done: of `run_sweep`.

    Raises:
        UsageError: the model cannot serve a request, a policy needs a predictor, or the folder is of another sweep.
        RunError: a measurement fails, or no run was finished.
        KeyboardInterrupt: on Ctrl-C before the first run; later the outcome says so.
        OSError: results cannot be written.
    """
    from ..serving.stepper import EngineOptions
    from .slo_real import RealRunner, with_engine

    warm_up = warm_up or WarmUp()
    examples = examples_of(settings, model.defaults)
    plain = with_engine(model, EngineOptions("plain"))
    models: dict[EngineName, ServedModel] = {
        name: plain if name == "plain" else model for name in settings.engine_names
    }
    for served in (plain, *models.values()):
        for request in examples:
            served.check_request(request)
    correction = None if predictor is None else OnlineCorrection(predictor)
    runner = RealRunner(models, max_batch_size=settings.max_batch_size, predictor=correction)
    runner.check(settings.policies)
    for served in models.values():
        served.tune([request.resolution for request in examples], workspace.tables)
    run_dir = open_folder()
    if (run_dir / SWEEP_FILE).exists():
        standalone = dict(read_head(run_dir)["standalone_s"])
    else:
        standalone = _measure_standalone(plain, examples, workspace, on_note)
    options = model.options
    cache = {name: str(value) for name, value in asdict(options.cache).items()} if options.cache.is_on else "off"
    head = {
        "settings": {**settings.fixed(), "cache": cache, "warmup_requests": warm_up.num_requests},
        "circumstances": {
            **circumstances(model),
            "fingerprint": model.fingerprint,
            **{name: getattr(options, name) for name in ("order", "patch_size", "strategy", "kernels")},
        },
        "standalone_s": standalone,
    }
    folder = SweepFolder(run_dir, head)
    alone_s = _lookup(standalone)
    runners: dict[EngineKind, Runner] = {"real": runner}
    if len(folder.finished(settings)) < settings.num_runs:
        rate, seed = median_low(settings.rates), max(settings.seeds) + 1
        warm_trace = replace(settings.trace, num_prompts=warm_up.num_requests, duration_s=None)
        trace = replace(settings, trace=warm_trace).requests(rate, seed, model.defaults)
        tables = None
        if settings.engine == "both":
            tables = {
                name: _table_of(models[name], name, settings, examples, workspace, run_dir, warm_up, on_note)
                for name in models
            }
        calibrations: dict[str, Calibration] = {}
        for name in models:
            on_note(f"Warming up the {name} engine: {len(trace)} requests at {rate:g}/s ...")
            result = runner.warm_up(name, trace, alone_s)
            if tables is not None:
                on_note(f"Calibrating the simulator of the {name} engine ...")
                result = runner.warm_up(name, trace, alone_s)
                calibrations[name] = calibrate(result.records, result.steps, *tables[name])
        if tables is not None:
            file = run_dir / CALIBRATION_FILE
            if file.exists():
                # Runs that were simulated before and those to come must agree with each other.
                calibrations |= read_calibrations(file)
            write_json(file, {name: each.to_json() for name, each in calibrations.items()})
            engines: dict[EngineName, SimulatedEngine] = {
                name: SimulatedEngine.of(name, *tables[name], calibrations[name]) for name in models
            }
            runners["simulator"] = SimulatedRunner(engines, max_batch_size=settings.max_batch_size)
    return _sweep(settings, runners, folder, model.defaults, on_run, on_done)


def bench_in_simulator(
    settings: SweepSettings,
    model_name: str,
    defaults: ModelDefaults,
    engines: Mapping[EngineName, SimulatedEngine],
    open_folder: Callable[[], Path],
    sources: Mapping[str, str],
    *,
    on_run: _Tell = lambda text: None,
    on_done: Callable[[], None] = lambda: None,
) -> SweepOutcome:
    """Sweep on the virtual clock.

    Args:
        settings: what is swept.
        model_name: whose defaults are taken.
        defaults: of the model.
        engines: what is known of both engines; SLOs are those of the plain one.
        open_folder: as of `bench_on_engine`.
        sources: the files that `engines` were made of, by what they are, as `sources_of` gives them.
        on_run, on_done: of `run_sweep`.

    Raises:
        UsageError: the latencies do not know a resolution, or the folder is of another sweep.
        RunError: no run was finished.
        OSError: results cannot be written.
    """
    examples = examples_of(settings, defaults)
    alone = {str(request.resolution): engines["plain"].standalone_s(request) for request in examples}
    for request in examples:
        for name in settings.engine_names:
            engines[name].durations.steady.step_latency_s((request.resolution,))
    head = {
        "settings": settings.fixed(),
        "circumstances": {"model": model_name, "device": "simulated", **sources},
        "standalone_s": alone,
    }
    runner = SimulatedRunner(engines, max_batch_size=settings.max_batch_size, num_gpus=settings.num_gpus)
    return _sweep(settings, {"simulator": runner}, SweepFolder(open_folder(), head), defaults, on_run, on_done)


def simulated_engines(
    latency: Path,
    plain_latency: Path | None,
    calibration: Path | None,
    times: StageTimes | None,
    on_warning: _Tell = lambda text: None,
) -> dict[EngineName, SimulatedEngine]:
    """What files say of both engines.

    Args:
        latency: step latencies of the patch engine: a table, or a fitted predictor.
        plain_latency: those of the plain engine; None: batches of one resolution of `latency`, which is warned of.
        calibration: `calibration.json` of a sweep on both.
        times: of the stages beside the steps, where there is no calibration.
        on_warning: told what may be inexact.

    Raises:
        UsageError: a file cannot be read, is damaged, or is of the wrong engine.
    """
    known = {} if calibration is None else read_calibrations(calibration)
    if plain_latency is None:
        on_warning(
            f"no --plain-latency is given: policies of the plain engine take the times that {latency} has for batches "
            "of one resolution"
        )
    files: dict[EngineName, tuple[Path, bool]] = {
        "patched": (latency, True),
        "plain": (plain_latency or latency, plain_latency is not None),
    }
    engines: dict[EngineName, SimulatedEngine] = {}
    for name, (path, is_own) in files.items():
        about, steady, first = _read_source(path)
        if is_own and about is not None and about.engine != name:
            option = "--latency" if name == "patched" else "--plain-latency"
            raise UsageError(f"{path} is of the {about.engine} engine, but {option} must be of the {name} one")
        if calibration is not None and name not in known:
            raise UsageError(f"{calibration} has no calibration of the {name} engine, but of {', '.join(known)}")
        engines[name] = SimulatedEngine.of(name, steady, first, known.get(name), times)
    return engines


def sources_of(files: Mapping[str, Path | None]) -> dict[str, str]:
    """Files by what they are, as `PATH (checksum)`: another content makes another sweep. Raises OSError."""
    return {name: f"{path} ({sha256_of(path)[:12]})" for name, path in files.items() if path is not None}


def _read_source(path: Path) -> tuple[Circumstances | None, StepLatencyPredictor, StepLatencyPredictor | None]:
    """What step latencies were measured on, and those of steady and of first steps."""
    if path.suffix.lower() == ".safetensors":
        predictor = LatencyPredictor.load(path)
        return predictor.about.circumstances, predictor, None
    table = read_latencies(path)
    return table.circumstances, *step_sources(table)


def _measure_standalone(
    plain: "ServedModel", examples: Sequence[Request], workspace: "ModelWorkspace", on_note: _Tell
) -> dict[str, float]:
    from .standalone import shape_of, standalone_latencies

    found = standalone_latencies(
        plain,
        examples,
        workspace.tables,
        remeasure=True,
        on_measure=lambda shape: on_note(f"Measuring {shape.resolution} alone on plain diffusers ..."),
    )
    return {str(request.resolution): found[shape_of(plain, request)] for request in examples}


def _table_of(
    model: "ServedModel",
    name: EngineName,
    settings: SweepSettings,
    examples: Sequence[Request],
    workspace: "ModelWorkspace",
    run_dir: Path,
    warm_up: WarmUp,
    on_note: _Tell,
) -> tuple[StepLatencyPredictor, StepLatencyPredictor | None]:
    """Steady and first steps of an engine; the table is kept in the sweep's folder."""
    from .latency import LatencySettings
    from .slo_real import latency_table

    folder = run_dir / "tables" / name
    wanted = LatencySettings(
        tuple(request.resolution for request in examples),
        warm_up.combinations,
        settings.max_batch_size,
        warm_up.repeats,
        one_resolution=name == "plain",
    )
    table, path = latency_table(
        model,
        workspace,
        wanted,
        folder,
        on_start=lambda num_all, num_done: on_note(f"Profiling the {name} engine: {num_all} visits ..."),
    )
    if path.parent != folder:
        on_note(f"Latencies of the {name} engine: {path}")
        with atomic_write(folder / path.name) as temporary:
            shutil.copyfile(path, temporary)
    return step_sources(table)


def _sweep(
    settings: SweepSettings,
    runners: Mapping[EngineKind, Runner],
    folder: SweepFolder,
    defaults: ModelDefaults,
    on_run: _Tell,
    on_done: Callable[[], None],
) -> SweepOutcome:
    alone_s = _lookup(folder.head["standalone_s"])
    was_interrupted = run_sweep(settings, runners, folder, alone_s, defaults, on_run=on_run, on_done=on_done)
    runs = folder.finished(settings)
    if not runs:
        if was_interrupted:
            raise KeyboardInterrupt
        raise RunError("no run of the sweep was finished")
    result = sweep_result(settings, folder.head, runs, folder.path, was_interrupted=was_interrupted)
    return SweepOutcome(result, write_sweep(result, folder.path), folder.path, was_interrupted)


def _lookup(standalone_s: Mapping[str, float]) -> Callable[[Request], float]:
    return lambda request: standalone_s[str(request.resolution)]
