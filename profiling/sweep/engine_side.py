"""Sweeps on real engines, which share one set of weights, followed by the simulator if the settings ask for both.

Separate served runs calibrate the simulator (`calibration`). They are spread evenly over the runs of the sweep, so that
a machine that is slower or faster for an hour affects both alike.
"""

import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median_low
from typing import Any

from ...data.files import atomic_write, named_by_content, write_json
from ...data.requests import Request
from ...data.tables.latency import LatencyTable
from ...data.workspace import ModelWorkspace
from ...serving.cache.options import CacheOptions
from ...serving.core.failures import Failures
from ...serving.engine.engine import Engine
from ...serving.engine.replay import replay
from ...serving.engine.run_result import RunResult
from ...serving.models.build import as_plain, with_engine, without_cache
from ...serving.models.loading import resolve_model
from ...serving.models.served import ServedModel
from ...serving.options import EngineName
from ...serving.runs.machine import run_facts
from ...serving.runs.outside_profile import predictions_outside
from ...serving.runs.simulated.calibration import Calibration, ServedRun, calibrate
from ...serving.runs.simulated.deployment import SimulatedEngine
from ...serving.runs.simulated.files import CALIBRATION_FILE, read_calibrations
from ...serving.runs.simulated.planning import at_rate
from ...serving.runs.standalone import shape_of, standalone_latencies
from ...serving.runs.step_file import StepFile, step_sources
from ...serving.runs.step_latencies import tables_measured_under
from ...serving.runs.summary import engine_figures, optional_figures
from ...serving.scheduling.policies import StepLatencyPredictor, get_policy, require_predictor
from ...serving.scheduling.systems import System, get_system
from ...serving.simulator.step_durations import ProfiledSteps
from ...training.latency.online_correction import OnlineCorrection
from ..measure.latency import LatencySettings, profile_latency
from .figures import EngineKind, steps_by_batch
from .runner import Serve, Standalone, WarmUp
from .settings import IDLE, SweepFolder, SweepRunResult, SweepSettings
from .simulator_side import SimulatorSide

_CALIBRATION_LOADS = (0.4, 0.8, 1.3)
"""Shares of an engine's capacity: almost no request waits, some wait, and the queue grows."""
_CALIBRATION_SEED = 1_000_000
"""First seed of calibration traces, far from the seeds of the sweep's traces, including seeds added later."""
_WARMUP_SYSTEM: Mapping[EngineName, str] = {"plain": "bucketed", "patched": "patched-fcfs"}


class EngineSide:
    """Serves the runs of a sweep. Times in which an engine is idle are skipped (`replay`). Corrections that a predictor
    learns carry over from run to run.

    Args:
        settings: settings of the sweep.
        model, workspace: model on the patch engine, with the cache of one of the systems or with a cache for all
            systems, and its workspace. Systems with another cache or none, and those of the plain engine, share its
            weights.
        predictor: step latencies of the patch engine, for policies that look ahead; corrected online for each cache.
        predictor_file: file of the predictor; runs with different files are not compared.
        warm_up: warm-up before the sweep.
        on_note: called with notes on progress.
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
        self._predictor_file = predictor_file
        self._warm_up = warm_up or WarmUp()
        self._plain = as_plain(model)
        modes = {system.cache for system in settings.presets if system.engine == "patched"}
        # A cache that belongs to none of the systems was chosen for all of them.
        is_theirs = model.options.cache.mode in modes - {"off"}
        self._by_cache = {mode: self._with_cache(mode) if is_theirs else model for mode in sorted(modes)}
        self._predictors = {
            id(served): None if predictor is None else OnlineCorrection(predictor)
            for served in (model, *self._by_cache.values())
        }
        self._models: dict[EngineName, ServedModel] = {
            name: self._plain if name == "plain" else model for name in settings.engine_names
        }
        self._rate = median_low(settings.rates)
        self._warm = self._trace(max(settings.seeds) + 1, self._warm_up.num_requests)
        num = self._warm_up.num_requests / _CALIBRATION_LOADS[1]
        self._calibrating = {
            (load, seed): self._trace(_CALIBRATION_SEED + seed, max(2, round(load * num)))
            for seed, load in itertools.product(settings.seeds, _CALIBRATION_LOADS if settings.engine == "both" else ())
        }
        self._sizes = ()
        # Remaining calibration runs, each with the number of the sweep's runs that precede it.
        self._due: dict[EngineName, list[tuple[int, tuple[float, int]]]] = {}
        self._num_served = Counter[EngineName]()
        self._profiled: dict[EngineName, ProfiledSteps] = {}
        self._simulated: dict[EngineName, SimulatedEngine] = {}
        self._capacity: dict[System, float] = {}

    @property
    def extra_requests(self) -> Sequence[Request]:
        """Requests of the warm-up and of the calibration."""
        return [*self._warm, *itertools.chain.from_iterable(self._calibrating.values())]

    def check(self, examples: Sequence[Request]) -> None:
        """Raise UsageError if a request cannot be served or a policy lacks its predictor. Tunes the engines for these
        resolutions if the workspace has no measurements.
        """
        self._sizes = tuple(dict.fromkeys(request.resolution for request in examples))
        for served in (self._plain, *self._models.values(), *self._by_cache.values()):
            for request in examples:
                served.check_request(request)
        for policy in (get_policy(system.policy) for system in self._settings.presets):
            if policy.requires_predictor:
                require_predictor(policy, self._predictors[id(self._model)])
        for served in (*self._models.values(), *self._by_cache.values()):
            served.tune(self._sizes, self._workspace.tables, self._settings.max_batch_size)

    def head(self, examples: Sequence[Request], known_s: Mapping[str, float]) -> dict[str, Any]:
        """Return the settings, circumstances and predictor of the runs, and standalone latencies, of which those not
        yet known are measured.
        """
        missing = [request for request in examples if request.sizes_in_words not in known_s]
        found = standalone_latencies(
            self._plain,
            missing,
            self._workspace.tables,
            remeasure=True,
            on_measure=lambda shape: self._on_note(f"Measuring {shape.in_words} alone on plain diffusers ..."),
            on_doubt=self._on_note,
        )
        options = [served.options.cache for served in self._by_cache.values()]
        caches = {cache.mode: cache.identity() for cache in options if cache.is_on}
        cache = caches if len(caches) > 1 else next(iter(caches.values()), "off")
        # With the requested order, and without the engine, which each system determines.
        about = run_facts(self._model).key() | self._model.options.patch_options
        del about["engine"]
        return {
            "settings": {
                **self._settings.fixed(),
                "cache": cache if "patched" in self._models else None,
                "warmup_requests": self._warm_up.num_requests,
                **IDLE,
            },
            "circumstances": about,
            "standalone_s": {
                **known_s,
                **{request.sizes_in_words: found[shape_of(self._plain, request)] for request in missing},
            },
            "predictor": {} if self._predictor_file is None else {"file": named_by_content(self._predictor_file)},
        }

    def begin(self, folder: SweepFolder, standalone_s: Standalone) -> Mapping[EngineKind, Serve]:
        """Warm up the engines and, if the simulator also serves, profile them. Returns the function that serves the
        runs of each kind of engine.

        Raises:
            KeyboardInterrupt: on Ctrl-C.
            UsageError: the folder's calibration is damaged.
        """
        self._folder, self._standalone_s = folder, standalone_s
        is_both, file = self._settings.engine == "both", folder.path / CALIBRATION_FILE
        # Calibrations of engines that an earlier call served and this one does not. Read early, as the file may be
        # damaged.
        self._known = read_calibrations(file) if is_both and file.exists() else {}
        for name in self._models:
            self._on_note(f"Warming up the {name} engine: {len(self._warm)} requests at {self._rate:g}/s ...")
            self._serve_other(name, self._warm)
            if is_both:
                self._profiled[name] = StepFile(*step_sources(self._table(name, folder.path)), None).of(name)
                mine = [run for run in self._settings.runs() if run[0] == "real" and get_system(run[1]).engine == name]
                num_runs = sum(not folder.has(*run) for run in mine)
                left = [key for key in self._calibrating if not folder.has_calibration(name, *key)]
                self._due[name] = [(place * num_runs // len(left), key) for place, key in enumerate(left)]
                if left or num_runs:
                    # Earlier simulated runs would not agree with the new calibration.
                    folder.delete_runs("simulator")
        return {"real": self.run, "simulator": self._simulate} if is_both else {"real": self.run}

    def run(self, system: System, requests: Sequence[Request], standalone_s: Standalone) -> SweepRunResult:
        """Serve a trace on the system's engine, after the calibration runs that are due before it."""
        if system.engine in self._due:
            self._calibrate_between_runs(system.engine)
            self._num_served[system.engine] += 1
        predictor = None
        if get_policy(system.policy).requires_predictor:
            predictor = self._predictors[id(self._model_of(system))]
        before = predictions_outside(predictor)
        result = self._replay(self._model_of(system), system, requests, standalone_s, predictor)
        figures = engine_figures(result) | optional_figures(self._model_of(system), predictor, before)
        figures["steps_by_batch"] = steps_by_batch(result.steps)
        return SweepRunResult(result.records, result.duration_s, figures, result.was_interrupted)

    def _simulate(self, system: System, requests: Sequence[Request], standalone_s: Standalone) -> SweepRunResult:
        """Serve a trace in the simulator, which is calibrated first, after all calibration runs."""
        if not self._simulated:
            for name in self._models:
                self._calibrate_between_runs(name, all_left=True)
            self._simulated = self._calibrated()
        model = self._model_of(system)
        engine = replace(self._simulated[system.engine], schedule=model.schedule)
        if model is not self._models[system.engine] and engine.durations.reuse is not None:
            # The calibrated reuse is that of the other model's cache.
            engine = replace(engine, durations=replace(engine.durations, reuse=None), told_scale=1.0)
        served = SimulatorSide(self._settings, {system.engine: engine}).run(system, requests, standalone_s)
        if system not in self._capacity:
            largest = self._settings.max_batch_size
            self._capacity[system] = engine.capacity(system, requests, largest)
        return replace(served, figures={**served.figures, "capacity_qps": self._capacity[system]})

    def _calibrated(self) -> dict[EngineName, SimulatedEngine]:
        """Return the simulator's engines, calibrated with all calibration runs of the folder. Writes the calibrations
        to `CALIBRATION_FILE`.
        """
        found: dict[EngineName, Calibration] = {}
        for name in self._models:
            runs = [self._folder.load_calibration(name, *key) for key in self._calibrating]
            options = self._models[name].options
            warmup_steps = options.cache.warmup_steps if options.cache.is_of_patches else 0
            is_inline = options.stages == "inline"
            found[name] = calibrate(runs, self._profiled[name], warmup_steps=warmup_steps, is_inline=is_inline)
        content = {name: asdict(each) for name, each in (self._known | found).items()}
        write_json(self._folder.path / CALIBRATION_FILE, content)
        return {name: SimulatedEngine.of(self._profiled[name], each) for name, each in found.items()}

    def _calibrate_between_runs(self, name: EngineName, *, all_left: bool = False) -> None:
        """Serve the calibration runs that precede the next run of the sweep, or all remaining ones."""
        due = self._due[name]
        while due and (all_left or due[0][0] <= self._num_served[name]):
            load, seed = due[0][1]
            self._on_note(f"Calibrating the simulator of the {name} engine at {load:.0%} of its capacity ...")
            requests = self._calibrating[load, seed]
            system = get_system(_WARMUP_SYSTEM[name])
            engine, largest = SimulatedEngine.of(self._profiled[name]), self._settings.max_batch_size
            requests = at_rate(requests, load * engine.capacity(system, requests, largest))
            result = self._serve_other(name, requests)
            self._folder.save_calibration(name, load, seed, ServedRun(result.records, result.steps))
            del due[0]

    def _serve_other(self, name: EngineName, requests: Sequence[Request]) -> RunResult:
        """Serve requests that are not counted, in batches of all resolutions; the predictor learns from them."""
        predictor = self._predictors[id(self._model)] if name == "patched" else None
        system = get_system(_WARMUP_SYSTEM[name])
        result = self._replay(self._models[name], system, requests, self._standalone_s, predictor)
        if result.was_interrupted:
            raise KeyboardInterrupt
        return result

    def _trace(self, seed: int, num: int) -> list[Request]:
        """Return requests other than the sweep's own."""
        trace = replace(self._settings.trace, num_prompts=num, duration_s=None)
        return replace(self._settings, trace=trace).requests(self._rate, seed, self._model.defaults)

    def _replay(
        self,
        model: ServedModel,
        system: System,
        requests: Sequence[Request],
        standalone_s: Standalone,
        predictor: OnlineCorrection | None,
    ) -> RunResult:
        # Reset, so that the failures and the cache's figures are those of one run.
        model.stepper.batch_failures = Failures()
        model.clear_cache()
        batch = self._settings.max_batch_size
        engine = Engine(model, get_policy(system.policy), predictor=predictor, max_batch_size=batch)
        checked = [model.checked(system.adapt(each), standalone_s(each)) for each in requests]
        return replay(engine, checked, skips_idle=True)

    def _model_of(self, system: System) -> ServedModel:
        return self._plain if system.engine == "plain" else self._by_cache[system.cache]

    def _with_cache(self, mode: str) -> ServedModel:
        """Return the model with a cache of this mode and the workspace's file for it, or else the model's file."""
        options = self._model.options
        if mode == options.cache.mode:
            return self._model
        if mode == "off":
            return without_cache(self._model)
        cache = replace(CacheOptions(), mode=mode)
        cache = cache.with_file_of(self._workspace.predictors, resolve_model(self._model.name))
        return with_engine(self._model, replace(options, cache=cache))

    def _table(self, name: EngineName, run_dir: Path) -> LatencyTable:
        """Return the latency table of an engine, which is kept in the sweep's folder."""
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
    """Return the latency table of a model's engine: the newest complete one of `folder` or the workspace that has all
    resolutions and batch sizes of the settings, or else one that is measured now and kept in `folder`.

    Steps are profiled without the patch cache, whose savings depend on the requests; `calibration` scales them. Raises
    as `profile_latency`, and KeyboardInterrupt.
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
