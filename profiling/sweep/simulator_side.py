"""Sweeps on the virtual clock, with separate latencies for the plain and the patch engine. No torch."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...data.errors import UsageError
from ...data.files import named_by_content
from ...data.parsing import parse
from ...data.requests import Request
from ...data.resolution import Resolution
from ...data.tables.latency import TABLE_PATTERN, read_latencies
from ...data.workspace import Workspace
from ...serving.options import EngineName
from ...serving.scheduling.systems import System
from ...serving.simulator.stage_times import StageTimes
from ...training.cache.schedule import CacheSchedule
from ..runs.calibration import Calibration
from ..runs.outside_profile import warn_of_small_table
from ..runs.simulate import SimulatedEngine, StepFile, load_stage_times, load_step_file, loop_figures
from ..runs.step_latencies import measured_alone
from .figures import EngineKind, steps_by_batch
from .runner import Serve, Standalone
from .settings import SweepFolder, SweepRunResult, SweepSettings

CALIBRATION_FILE = "calibration.json"
"""File in a sweep's folder with the simulator's calibration by engine, fitted to real runs."""

_Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SimulatorSide:
    """Serves the runs of a sweep on the virtual clock.

    Attributes:
        settings: settings of the sweep.
        engines: engines by name, including that of every system. SLOs derive from the plain engine.
        model: name of the model whose defaults are used.
        sources: origin of the engines, as `SimulatorFiles.sources` returns it.
        schedule: schedule of computed steps, for systems whose cache is a schedule.
    """

    settings: SweepSettings
    engines: Mapping[EngineName, SimulatedEngine]
    model: str = ""
    sources: Mapping[str, str] | None = None
    schedule: CacheSchedule | None = None

    @property
    def extra_requests(self) -> Sequence[Request]:
        """Empty: nothing needs a warm-up."""
        return ()

    def check(self, examples: Sequence[Request]) -> None:
        """Raise UsageError if an engine's latencies do not cover the resolution of a request."""
        for request in examples:
            for name in self.settings.engine_names:
                self.engines[name].durations.steps.policy_latency.step_latency_s((request.resolution,))

    def head(self, examples: Sequence[Request], known_s: Mapping[str, float]) -> dict[str, Any]:
        """Return settings, model and sources of the runs, and simulated standalone latencies by resolution."""
        plain = self.engines["plain"]
        return {
            "settings": self.settings.fixed(),
            "circumstances": {"model": self.model, "device": "simulated", **(self.sources or {})},
            "standalone_s": {str(request.resolution): plain.standalone_s(request) for request in examples},
        }

    def begin(self, folder: SweepFolder, standalone_s: Standalone) -> Mapping[EngineKind, Serve]:
        """Return the function that serves the runs; there is nothing to prepare."""
        return {"simulator": self.run}

    def run(self, system: System, requests: Sequence[Request], standalone_s: Standalone) -> SweepRunResult:
        """Simulate a trace on the system's engine."""
        engine, limits = self.engines[system.engine], (self.settings.max_batch_size, self.settings.num_gpus)
        if system.cache == "schedule" and self.schedule is not None:
            engine = replace(engine, schedule=self.schedule)
        result = engine.serve(system, requests, standalone_s, *limits, keep_steps=True)
        figures = loop_figures(result) | {
            "busy_rate": [busy_s / result.duration_s for busy_s in result.busy_s],
            "steps_by_batch": steps_by_batch(result.steps),
        }
        return SweepRunResult(result.records, result.duration_s, figures)


@dataclass(frozen=True, slots=True)
class SimulatorFiles:
    """Files from which the simulator models both engines.

    Attributes:
        latency: step latencies of the patch engine: a table, or a fitted predictor.
        plain_latency: step latencies of the plain engine; None uses batches of one resolution of `latency`, with a
            warning.
        calibration: `calibration.json` of a sweep on both engines and simulator.
        stage_times: folder of a served run with the times of the other stages, if there is no calibration.

    Raises:
        UsageError: both a calibration and stage times are given.
    """

    latency: Path
    plain_latency: Path | None = None
    calibration: Path | None = None
    stage_times: Path | None = None

    def __post_init__(self) -> None:
        if self.calibration is not None and self.stage_times is not None:
            raise UsageError("--calibration brings the times of the stages; give it or --stage-times, not both")

    def sources(self) -> dict[str, str]:
        """Return the files by role, as `PATH (checksum)`, so that other content makes another sweep. Raises OSError."""
        records = None if self.stage_times is None else self.stage_times / "records.parquet"
        files = {
            "latency": self.latency,
            "plain_latency": self.plain_latency,
            "calibration": self.calibration,
            "stage_times": records,
        }
        return {name: named_by_content(path) for name, path in files.items() if path is not None}

    def engines(
        self, max_batch_size: int = 16, on_warning: _Notify = lambda text: None
    ) -> dict[EngineName, SimulatedEngine]:
        """Return both engines from the files, for batches of up to `max_batch_size`.

        Raises:
            UsageError: a file cannot be read, is damaged, or is of the wrong engine.
            RunError: no request of the served run was completed.
        """
        times = None if self.stage_times is None else load_stage_times(self.stage_times)
        if self.plain_latency is None:
            on_warning(
                f"no --plain-latency is given: systems of the plain engine take the times that {self.latency} has for "
                "batches of one resolution"
            )
        files: dict[EngineName, tuple[Path, bool]] = {
            "patched": (self.latency, True),
            "plain": (self.plain_latency or self.latency, self.plain_latency is not None),
        }
        engines: dict[EngineName, SimulatedEngine] = {}
        for name, (path, is_own) in files.items():
            steps = load_step_file(path, on_warning=on_warning)
            if is_own:
                warn_of_small_table(steps.steady, path, max_batch_size, on_warning)
                _require_engine(steps, path, name)
            known = None if self.calibration is None else calibration_of(self.calibration, name)
            engines[name] = SimulatedEngine.of(steps.of(name), known, times)
        return engines


def calibration_of(path: Path, engine: EngineName) -> Calibration:
    """Return the calibration of an engine. Raises UsageError as `read_calibrations`, or if the file has none of it."""
    known = read_calibrations(path)
    if engine not in known:
        raise UsageError(f"{path} has no calibration of the {engine} engine, but of {', '.join(known)}")
    return known[engine]


def newest_calibration(
    workspace: Workspace, model: str, engine: EngineName, resolutions: Sequence[Resolution], on_warning: _Notify
) -> Path | None:
    """Return the newest `calibration.json` in a workspace that has an engine and whose table has these resolutions.

    A damaged file, or one without its table, is skipped with a warning, because the user did not name it. None if there
    is no suitable file.
    """
    folder = workspace.for_model(model, "any").root.parent
    files = sorted(folder.glob(f"*/runs/*/{CALIBRATION_FILE}"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    wanted = set(resolutions)
    for file in files:
        try:
            if engine in read_calibrations(file) and wanted <= measured_alone(read_latencies(table_of(file, engine))):
                return file
        except UsageError as error:
            on_warning(f"{error}; it is passed over")
    return None


def plain_engine(
    latency: Path | None, calibration: Path | None, times: StageTimes, *, on_warning: _Notify
) -> SimulatedEngine | None:
    """Return the plain engine from a file of its step latencies, or else from a calibration; None if neither has it.

    Args:
        latency: file of step latencies.
        calibration: `calibration.json`, with its table beside it.
        times: times of the other stages, used if there is no calibration of the plain engine.
        on_warning: as in `load_step_file`.

    Raises:
        UsageError: a file cannot be read, is damaged, or is of another engine.
    """
    known = None if calibration is None else read_calibrations(calibration).get("plain")
    if latency is None:
        if calibration is None or known is None:
            return None
        latency = table_of(calibration, "plain")
    steps = load_step_file(latency, on_warning=on_warning)
    _require_engine(steps, latency, "plain")
    return SimulatedEngine.of(steps.of("plain"), known, times)


def _require_engine(steps: StepFile, path: Path, engine: EngineName) -> None:
    """Raise UsageError if a file is known to be of the other engine."""
    if steps.facts is not None and steps.facts.engine != engine:
        option = "--latency" if engine == "patched" else "--plain-latency"
        raise UsageError(f"{path} is of the {steps.facts.engine} engine, but {option} must be of the {engine} one")


def table_of(path: Path, engine: EngineName) -> Path:
    """Return the table of step latencies that a calibration was fitted to. Raises UsageError if it is not beside the
    file.
    """
    folder = path.parent / "tables" / engine
    tables = list(folder.glob(TABLE_PATTERN))
    if len(tables) != 1:
        raise UsageError(f"{folder} holds {len(tables)} tables of step latencies, but it must be one: give --latency")
    return tables[0]


def read_calibrations(path: Path) -> dict[str, Calibration]:
    """Read `calibration.json` of a sweep with `--on both`: calibrations by engine.

    Raises:
        UsageError: the file cannot be read or is damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot read the calibration: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{path}: the calibration is damaged: {error}") from error
    if not isinstance(content, dict) or not content:
        raise UsageError(f"{path}: the calibration is damaged: it names no engine")
    return {name: parse(Calibration, data, f"{path}, {name}") for name, data in content.items()}
