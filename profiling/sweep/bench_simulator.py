"""`psctl bench slo` in the simulator: what files tell of both engines, and a sweep on the virtual clock. No torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...data.errors import UsageError
from ...data.files import named_by_content
from ...data.tables.latency import Circumstances, read_latencies
from ...serving.models.defaults import ModelDefaults
from ...serving.options import EngineName
from ...serving.scheduling.policies import StepLatencyPredictor
from ...training.latency.predictor import LatencyPredictor
from ..runs.calibration import step_sources
from ..runs.outside_profile import warn_of_small_table
from ..runs.simulate import load_stage_times
from .bench import SweepOutcome, examples_of, sweep_and_report
from .simulated import SimulatedEngine, SimulatedRunner, read_calibrations
from .sweep import SweepFolder, SweepSettings

_Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SimulatorFiles:
    """The files that tell the simulator about both engines.

    Attributes:
        latency: step latencies of the patch engine: a table, or a fitted predictor.
        plain_latency: those of the plain engine; None: batches of one resolution of `latency`, which is warned of.
        calibration: `calibration.json` of a sweep on both.
        stage_times: folder of a served run, for the times of the stages beside the steps if there is no calibration.

    Raises:
        UsageError: there are a calibration and stage times.
    """

    latency: Path
    plain_latency: Path | None = None
    calibration: Path | None = None
    stage_times: Path | None = None

    def __post_init__(self) -> None:
        if self.calibration is not None and self.stage_times is not None:
            raise UsageError("--calibration brings the times of the stages; give it or --stage-times, not both")

    def sources(self) -> dict[str, str]:
        """The files by what they are, as `PATH (checksum)`: another content makes another sweep. Raises OSError."""
        records = None if self.stage_times is None else self.stage_times / "records.parquet"
        files = {
            "latency": self.latency,
            "plain_latency": self.plain_latency,
            "calibration": self.calibration,
            "stage_times": records,
        }
        return {name: named_by_content(path) for name, path in files.items() if path is not None}

    def engines(
        self, max_batch_size: int = 16, on_warning: _Tell = lambda text: None
    ) -> dict[EngineName, SimulatedEngine]:
        """What the files say of both engines.

        Args:
            max_batch_size: of what will be simulated.
            on_warning: told what may be inexact.

        Raises:
            UsageError: a file cannot be read, is damaged, or is of the wrong engine.
            RunError: no request of the served run was completed.
        """
        times = None if self.stage_times is None else load_stage_times(self.stage_times)
        known = {} if self.calibration is None else read_calibrations(self.calibration)
        if self.plain_latency is None:
            on_warning(
                f"no --plain-latency is given: policies of the plain engine take the times that {self.latency} has for "
                "batches of one resolution"
            )
        files: dict[EngineName, tuple[Path, bool]] = {
            "patched": (self.latency, True),
            "plain": (self.plain_latency or self.latency, self.plain_latency is not None),
        }
        engines: dict[EngineName, SimulatedEngine] = {}
        for name, (path, is_own) in files.items():
            about, steady, first = _read_source(path, on_warning)
            if is_own:
                warn_of_small_table(steady, path, max_batch_size, on_warning)
            if is_own and about is not None and about.engine != name:
                option = "--latency" if name == "patched" else "--plain-latency"
                raise UsageError(f"{path} is of the {about.engine} engine, but {option} must be of the {name} one")
            if self.calibration is not None and name not in known:
                raise UsageError(
                    f"{self.calibration} has no calibration of the {name} engine, but of {', '.join(known)}"
                )
            engines[name] = SimulatedEngine.of(name, steady, first, known.get(name), times)
        return engines


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
        sources: what `engines` were made of, as `SimulatorFiles.sources` gives it.
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
    folder = SweepFolder(open_folder(), head)
    return sweep_and_report(settings, {"simulator": runner}, folder, defaults, on_run=on_run, on_done=on_done)


def _read_source(
    path: Path, on_warning: _Tell
) -> tuple[Circumstances | None, StepLatencyPredictor, StepLatencyPredictor | None]:
    """What step latencies were measured on, and those of steady and of first steps."""
    if path.suffix.lower() == ".safetensors":
        predictor = LatencyPredictor.load(path, on_warning=on_warning)
        return predictor.about.circumstances, predictor, None
    table = read_latencies(path)
    return table.circumstances, *step_sources(table)
