"""Sweeps on real engines, which share one set of weights, and in the simulator beside them if the settings say both."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median_low
from typing import Any

from ...data.files import atomic_write, named_by_content, write_json
from ...data.requests import Request
from ...data.tables.latency import LatencyTable
from ...data.workspace import ModelWorkspace
from ...serving.cache.patch_cache import CacheStats
from ...serving.engine.engine import Engine
from ...serving.engine.replay import replay
from ...serving.engine.run_result import RunResult
from ...serving.models.build import as_plain, without_cache
from ...serving.models.served import ServedModel
from ...serving.options import EngineName
from ...serving.patched.stepper import BatchFailures, PatchedStepper
from ...serving.scheduling.policies import StepLatencyPredictor, get_policy, require_predictor
from ...serving.scheduling.systems import System, get_system
from ...training.latency.online_correction import OnlineCorrection
from ..machine import run_facts
from ..measure.latency import LatencySettings, profile_latency
from ..measure.standalone import shape_of, standalone_latencies
from ..runs.calibration import Calibration, calibrate, step_sources
from ..runs.outside_profile import predictions_outside
from ..runs.serve import engine_figures, what_was_learnt
from ..runs.simulate import SimulatedEngine
from ..runs.step_latencies import tables_measured_under
from .figures import EngineKind
from .runner import Serve, Standalone, WarmUp
from .settings import Served, SweepFolder, SweepSettings
from .simulator_side import SimulatorSide, read_calibrations

CALIBRATION_FILE = "calibration.json"
_WARMUP_SYSTEM: Mapping[EngineName, str] = {"plain": "bucketed", "patched": "patched-fcfs"}


class EngineSide:
    """Serves the runs of a sweep on the wall clock. What a predictor learns stays known from run to run.

    Args:
        settings: what is swept.
        model, workspace: loaded for the patch engine, with the cache of its systems; those of the plain engine share
            its weights.
        predictor: step latencies of the patch engine, for policies that look ahead; corrected by what is measured.
        predictor_file: where it was read from; runs with different ones are not compared.
        warm_up: what comes before.
        on_note: told what happens.
    """

    def __init__(
        self,
        settings: SweepSettings,
        model: ServedModel,
        workspace: ModelWorkspace,
        *,
        predictor: StepLatencyPredictor | None = None,
        predictor_file: Path | None = None,
        warm_up: WarmUp | None = None,
        on_note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._settings, self._model, self._workspace, self._on_note = settings, model, workspace, on_note
        self._predictor = None if predictor is None else OnlineCorrection(predictor)
        self._predictor_file = predictor_file
        self._warm_up = warm_up or WarmUp()
        self._plain = as_plain(model)
        self._models: dict[EngineName, ServedModel] = {
            name: self._plain if name == "plain" else model for name in settings.engine_names
        }
        self._rate, seed = median_low(settings.rates), max(settings.seeds) + 1
        trace = replace(settings.trace, num_prompts=self._warm_up.num_requests, duration_s=None)
        self.others = replace(settings, trace=trace).requests(self._rate, seed, model.defaults)
        self._sizes = ()

    def check(self, examples: Sequence[Request]) -> None:
        """See `Side`. Measures as well what is faster for these resolutions, where the workspace does not know."""
        self._sizes = tuple(request.resolution for request in examples)
        for served in (self._plain, *self._models.values()):
            for request in examples:
                served.check_request(request)
        for policy in (get_policy(system.policy) for system in self._settings.presets):
            if policy.requires_predictor:
                require_predictor(policy, self._predictor)
        for served in self._models.values():
            served.tune(self._sizes, self._workspace.tables)

    def head(self, examples: Sequence[Request], known_s: Mapping[str, float]) -> dict[str, Any]:
        """See `Side`."""
        missing = [request for request in examples if str(request.resolution) not in known_s]
        found = standalone_latencies(
            self._plain,
            missing,
            self._workspace.tables,
            remeasure=True,
            on_measure=lambda shape: self._on_note(f"Measuring {shape.resolution} alone on plain diffusers ..."),
        )
        options = self._model.options
        cache = options.cache.identity() if options.cache.is_on else "off"
        # With the order that was asked for, and without the engine, which each system brings.
        about = run_facts(self._model).key() | options.patch_options
        del about["engine"]
        return {
            "settings": {
                **self._settings.fixed(),
                "cache": cache if "patched" in self._models else None,
                "warmup_requests": self._warm_up.num_requests,
            },
            "circumstances": about,
            "standalone_s": {
                **known_s,
                **{str(request.resolution): found[shape_of(self._plain, request)] for request in missing},
            },
            "predictor": {} if self._predictor_file is None else {"file": named_by_content(self._predictor_file)},
        }

    def begin(self, folder: SweepFolder, standalone_s: Standalone) -> Mapping[EngineKind, Serve]:
        """Warm the engines up, and calibrate the simulator by them where it serves, too. Raises KeyboardInterrupt."""
        is_both = self._settings.engine == "both"
        sources = {name: step_sources(self._table(name, folder.path)) for name in self._models} if is_both else {}
        calibrations: dict[str, Calibration] = {}
        for name in self._models:
            self._on_note(f"Warming up the {name} engine: {len(self.others)} requests at {self._rate:g}/s ...")
            result = self._serve_warm_up(name, standalone_s)
            if is_both:
                self._on_note(f"Calibrating the simulator of the {name} engine ...")
                result = self._serve_warm_up(name, standalone_s)
                calibrations[name] = calibrate(result.records, result.steps, *sources[name])
        if not is_both:
            return {"real": self.run}
        file = folder.path / CALIBRATION_FILE
        if file.exists():
            # Runs that were simulated before and those to come must agree with each other.
            calibrations |= read_calibrations(file)
        write_json(file, {name: asdict(each) for name, each in calibrations.items()})
        engines: dict[EngineName, SimulatedEngine] = {
            name: SimulatedEngine.of(name, *sources[name], calibrations[name]) for name in self._models
        }
        return {"real": self.run, "simulator": SimulatorSide(self._settings, engines).run}

    def run(self, system: System, requests: Sequence[Request], standalone_s: Standalone) -> Served:
        """See `Serve`."""
        predictor = self._predictor if get_policy(system.policy).requires_predictor else None
        before = predictions_outside(predictor)
        result = self._replay(system, requests, standalone_s, predictor)
        figures = engine_figures(result) | what_was_learnt(self._models[system.engine], predictor, before)
        return Served(result.records, result.duration_s, figures, result.was_interrupted)

    def _serve_warm_up(self, name: EngineName, standalone_s: Standalone) -> RunResult:
        """Serve what is not counted, in full batches of all resolutions; the predictor learns from it."""
        predictor = self._predictor if name == "patched" else None
        result = self._replay(get_system(_WARMUP_SYSTEM[name]), self.others, standalone_s, predictor)
        if result.was_interrupted:
            raise KeyboardInterrupt
        return result

    def _replay(
        self,
        system: System,
        requests: Sequence[Request],
        standalone_s: Standalone,
        predictor: OnlineCorrection | None,
    ) -> RunResult:
        model = self._models[system.engine]
        if isinstance(model.stepper, PatchedStepper):
            # The cache's figures and the failures are to be those of one run.
            model.stepper.batch_failures = BatchFailures()
            cache = model.stepper.model.cache
            if cache is not None:
                cache.forget()
                cache.stats = CacheStats()
        batch = self._settings.max_batch_size
        engine = Engine(model, get_policy(system.policy), predictor=predictor, max_batch_size=batch)
        return replay(engine, list(map(system.adapt, requests)), standalone_s=standalone_s)

    def _table(self, name: EngineName, run_dir: Path) -> LatencyTable:
        """Latencies of an engine; the table is kept in the sweep's folder."""
        folder, warm_up = run_dir / "tables" / name, self._warm_up
        largest = self._settings.max_batch_size
        wanted = LatencySettings(
            self._sizes, warm_up.combinations, largest, warm_up.repeats, one_resolution=name == "plain"
        )

        def on_start(num_all: int, num_done: int) -> None:
            self._on_note(f"Profiling the {name} engine: {num_all} visits ...")

        table, path = latency_table(self._models[name], self._workspace, wanted, folder, on_start=on_start)
        if path.parent != folder:
            self._on_note(f"Latencies of the {name} engine: {path}")
            with atomic_write(folder / path.name) as temporary:
                shutil.copyfile(path, temporary)
        return table


def latency_table(
    model: ServedModel,
    workspace: ModelWorkspace,
    settings: LatencySettings,
    folder: Path,
    *,
    on_start: Callable[[int, int], None] = lambda num_all, num_done: None,
) -> tuple[LatencyTable, Path]:
    """The latency table of a model's engine: the newest of `folder` or the workspace that is whole and has all
    resolutions of the settings and batches as large, else measured now and kept in `folder`.

    Steps are profiled without the patch cache, which saves what depends on the requests; `calibration` scales them.
    Raises as `profile_latency`, and KeyboardInterrupt.
    """
    for path, table in tables_measured_under(run_facts(model), folder, workspace.root / "tables"):
        largest = (table.settings or {}).get("max_batch_size", 0)
        covers = set(settings.resolutions) <= set(table.resolutions) and settings.max_batch_size <= largest
        if covers and table.share_done == 1:
            return table, path
    outcome = profile_latency(without_cache(model), settings, workspace, folder=folder, on_start=on_start)
    if outcome.was_interrupted:
        raise KeyboardInterrupt
    return outcome.table, outcome.table_file
