"""`psctl bench slo` on the engine, and on the simulator beside it: tune, measure, warm up, calibrate, sweep."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median_low

from ...data.files import atomic_write, named_by_content, write_json
from ...data.requests import Request
from ...data.workspace import ModelWorkspace
from ...serving.models.served import ServedModel
from ...serving.options import EngineName, EngineOptions
from ...serving.scheduling.policies import StepLatencyPredictor
from ...training.latency.online_correction import OnlineCorrection
from ..machine import circumstances
from ..measure.latency import LatencySettings
from ..measure.standalone import shape_of, standalone_latencies
from ..runs.calibration import Calibration, calibrate, step_sources
from .bench import SweepOutcome, WarmUp, examples_of, standalone_lookup, sweep_and_report
from .figures import EngineKind
from .real import RealRunner, latency_table, with_engine
from .simulated import SimulatedEngine, SimulatedRunner, read_calibrations
from .sweep import SWEEP_FILE, Runner, SweepFolder, SweepSettings, read_head

CALIBRATION_FILE = "calibration.json"
_Tell = Callable[[str], None]


def bench_on_engine(
    settings: SweepSettings,
    model: ServedModel,
    workspace: ModelWorkspace,
    open_folder: Callable[[], Path],
    *,
    predictor: StepLatencyPredictor | None = None,
    predictor_file: Path | None = None,
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
        predictor_file: where it was read from; runs with different ones are not compared.
        warm_up: what comes before.
        on_note: told what happens.
        on_run, on_done: of `run_sweep`.

    Raises:
        UsageError: the model cannot serve a request, a policy needs a predictor, or the folder is of another sweep.
        RunError: a measurement fails, or no run was finished.
        KeyboardInterrupt: on Ctrl-C before the first run; later the outcome says so.
        OSError: results cannot be written.
    """
    warm_up = warm_up or WarmUp()
    rate, seed = median_low(settings.rates), max(settings.seeds) + 1
    warm_trace = replace(settings.trace, num_prompts=warm_up.num_requests, duration_s=None)
    trace = replace(settings, trace=warm_trace).requests(rate, seed, model.defaults)
    examples = examples_of(settings, model.defaults, trace)
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
    standalone = dict(read_head(run_dir)["standalone_s"]) if (run_dir / SWEEP_FILE).exists() else {}
    missing = [request for request in examples if str(request.resolution) not in standalone]
    standalone |= _measure_standalone(plain, missing, workspace, on_note)
    options = model.options
    cache = options.cache.identity() if options.cache.is_on else "off"
    head = {
        "settings": {**settings.fixed(), "cache": cache, "warmup_requests": warm_up.num_requests},
        "circumstances": {
            **circumstances(model),
            "fingerprint": model.fingerprint,
            **options.patch_options,
        },
        "standalone_s": standalone,
        "predictor": {} if predictor_file is None else {"file": named_by_content(predictor_file)},
    }
    folder = SweepFolder(run_dir, head)
    alone_s = standalone_lookup(standalone)
    runners: dict[EngineKind, Runner] = {"real": runner}
    if folder.num_finished(settings) < settings.num_runs:
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
    return sweep_and_report(settings, runners, folder, model.defaults, on_run=on_run, on_done=on_done)


def _measure_standalone(
    plain: ServedModel, examples: Sequence[Request], workspace: ModelWorkspace, on_note: _Tell
) -> dict[str, float]:
    found = standalone_latencies(
        plain,
        examples,
        workspace.tables,
        remeasure=True,
        on_measure=lambda shape: on_note(f"Measuring {shape.resolution} alone on plain diffusers ..."),
    )
    return {str(request.resolution): found[shape_of(plain, request)] for request in examples}


def _table_of(
    model: ServedModel,
    name: EngineName,
    settings: SweepSettings,
    examples: Sequence[Request],
    workspace: ModelWorkspace,
    run_dir: Path,
    warm_up: WarmUp,
    on_note: _Tell,
) -> tuple[StepLatencyPredictor, StepLatencyPredictor | None]:
    """Steady and first steps of an engine; the table is kept in the sweep's folder."""
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
