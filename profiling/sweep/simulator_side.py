"""Sweeps on the virtual clock, with separate latencies for the plain and the patch engine. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...data.errors import UsageError
from ...data.files import named_by_content
from ...data.requests import Request
from ...serving.options import EngineName
from ...serving.runs.notes import Notify
from ...serving.runs.outside_profile import warn_of_small_table
from ...serving.runs.simulated.deployment import SimulatedEngine
from ...serving.runs.simulated.files import calibration_of, load_stage_times, require_engine
from ...serving.runs.simulated.summary import loop_figures
from ...serving.runs.step_file import load_step_file
from ...serving.scheduling.systems import System
from ...training.cache.schedule import CacheSchedule
from .figures import EngineKind, steps_by_batch
from .runner import Serve, Standalone
from .settings import SweepFolder, SweepRunResult, SweepSettings


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
            "standalone_s": {request.sizes_in_words: plain.standalone_s(request) for request in examples},
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
        latency: step latencies of the patch engine: a table, or a fitted predictor; None until one is chosen.
        plain_latency: step latencies of the plain engine; None uses batches of one resolution of `latency`, with a
            warning.
        calibration: `calibration.json` of a sweep on both engines and simulator.
        stage_times: folder of a served run with the times of the other stages, if there is no calibration.

    Raises:
        UsageError: both a calibration and stage times are given.
    """

    latency: Path | None = None
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
        self, max_batch_size: int = 16, on_warning: Notify = lambda text: None
    ) -> dict[EngineName, SimulatedEngine]:
        """Return both engines from the files, for batches of up to `max_batch_size`.

        Raises:
            UsageError: a file cannot be read, is damaged, or is of the wrong engine.
            RunError: no request of the served run was completed.
        """
        assert self.latency is not None, "of chosen files"
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
                require_engine(steps, path, name)
            known = None if self.calibration is None else calibration_of(self.calibration, name)
            engines[name] = SimulatedEngine.of(steps.of(name), known, times)
        return engines
