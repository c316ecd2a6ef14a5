"""Files from which the simulator models engines: step latencies, times of stages, and calibrations.

This module imports no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Self

from ....data.errors import UsageError
from ....data.parsing import parse
from ....data.records import read_json
from ....data.resolution import Resolution
from ....data.tables.latency import TABLE_PATTERN, read_latencies
from ....data.tables.schemas import RECORDS, read_rows
from ....data.workspace import Workspace
from ...core.request_state import RequestRecord
from ...editing.profile import EditProfile
from ...options import EngineName
from ...scheduling.systems import System
from ...simulator.graphs import GraphCosts
from ...simulator.stage_times import StageTimes
from ..notes import Notify
from ..outside_profile import warn_of_small_table
from ..step_file import StepFile, load_step_file
from ..step_latencies import measured_alone, table_for_simulation
from .calibration import Calibration
from .deployment import SimulatedEngine

CALIBRATION_FILE = "calibration.json"
"""File in a sweep's folder with the simulator's calibration by engine, fitted to real runs."""


@dataclass(frozen=True, slots=True)
class EngineFiles:
    """Files and times from which the simulator models the engine of one system.

    Attributes:
        latency, calibration: files of step latencies, and of a calibration; None for those of the workspace.
        edit_profile: profile of edits that read records; None for the workspace's if the trace has edits.
        plain_latency: step latencies of the plain engine, for standalone latencies; None for those of the calibration.
        stage_times: folder of a served run with the times of the other stages.
        prepare_ms, postprocess_ms: times of these stages in milliseconds, without `stage_times` and a calibration.
        graph_costs: costs of launching, recording and replaying passes; None if launching is not modelled.

    Raises:
        UsageError: a time is out of range, or times have two sources.
    """

    latency: Path | None = None
    plain_latency: Path | None = None
    edit_profile: Path | None = None
    calibration: Path | None = None
    stage_times: Path | None = None
    prepare_ms: float = 0.0
    postprocess_ms: float = 0.0
    graph_costs: Path | None = None

    def __post_init__(self) -> None:
        for option, time_ms in {"--prepare-ms": self.prepare_ms, "--postprocess-ms": self.postprocess_ms}.items():
            if not 0 <= time_ms < math.inf:
                raise UsageError(f"{option} is {time_ms:g}, but it must be finite and not negative")
        has_constant = bool(self.prepare_ms or self.postprocess_ms)
        if self.stage_times is not None and has_constant:
            raise UsageError(
                "--stage-times takes the place of --prepare-ms and --postprocess-ms; give one or the other"
            )
        if self.calibration is not None and (self.stage_times is not None or has_constant):
            raise UsageError("--calibration brings the times of the stages; give it or those, not both")

    def found(
        self,
        workspace: Workspace,
        model: str,
        engine: EngineName,
        sizes: Sequence[Resolution],
        *,
        on_note: Notify,
        on_warning: Notify,
    ) -> tuple[Self, Calibration | None]:
        """Return the files, with those of the workspace for step latencies and calibration, and the calibration.

        Args:
            workspace, model: workspace to look in, and the model.
            engine: engine of the system.
            sizes: resolutions of the requests.
            on_note: called with a line about each choice.
            on_warning: called with a line about files that are passed over.

        Raises:
            UsageError: there are no step latencies of these sizes, or a calibration is damaged.
        """
        latency, calibration = self.latency, self.calibration
        has_times = self.stage_times is not None or self.prepare_ms or self.postprocess_ms
        if latency is None and calibration is None and not has_times:
            calibration = newest_calibration(workspace, model, engine, sizes, on_warning)
            if calibration is not None:
                on_note(f"Calibrated by the newest comparison with real runs, {calibration}; --latency leaves it out.")
        calibrated = None if calibration is None else calibration_of(calibration, engine)
        if calibration is not None and latency is None:
            latency = table_of(calibration, engine)
        if latency is None:
            latency = table_for_simulation(workspace, model, sizes, on_note=on_note)
        return replace(self, latency=latency, calibration=calibration), calibrated

    def engines(
        self,
        system: System,
        max_batch_size: int,
        sizes: Sequence[Resolution],
        calibrated: Calibration | None,
        edited: EditProfile | None,
        *,
        on_note: Notify,
        on_warning: Notify,
    ) -> tuple[SimulatedEngine, SimulatedEngine | None]:
        """Return the engine of each GPU, and the plain engine of standalone latencies, None if there is no file of it.

        Args:
            system: system that the engine is of.
            max_batch_size: maximum number of requests in a batch.
            sizes: resolutions of the requests.
            calibrated: calibration of the engine.
            edited: profile of edits that read records; None without edits.
            on_note: called with a line about what is not simulated.
            on_warning: called with a line about possible inaccuracies.

        Raises:
            UsageError: a file is damaged, or of another engine or model.
            RunError: the run of `stage_times` has completed no request.
        """
        assert self.latency is not None, "of found files"
        steps = load_step_file(self.latency, on_warning=on_warning)
        warn_of_small_table(steps.steady, self.latency, max_batch_size, on_warning)
        if edited is not None:
            steps = steps.with_edits(edited)
            calibrated = None if calibrated is None else replace(calibrated, reuse=None)
        if edited is not None and system.cache != "off":
            on_note("Beside edits that read records no patch is reused: the system is simulated without its cache.")
        elif system.cache not in ("off", "schedule") and (calibrated is None or calibrated.reuse is None):
            on_note("The patch cache is not simulated: steps last as long as without it.")
        times = StageTimes.constant(sizes, self.prepare_ms / 1e3, self.postprocess_ms / 1e3)
        if self.stage_times is not None:
            times = load_stage_times(self.stage_times)
        served = SimulatedEngine.of(steps.of(system.engine), calibrated, times)
        if system.engine == "plain":
            return served, None
        alone = plain_engine(self.plain_latency, self.calibration, times, on_warning=on_warning)
        if alone is None:
            on_note(
                f"SLOs are multiples of what {self.latency} says of a request alone; --plain-latency takes plain "
                "diffusers."
            )
        return served, alone


def calibration_of(path: Path, engine: EngineName) -> Calibration:
    """Return the calibration of an engine. Raises UsageError as `read_calibrations`, or if the file has none of it."""
    known = read_calibrations(path)
    if engine not in known:
        raise UsageError(f"{path} has no calibration of the {engine} engine, but of {', '.join(known)}")
    return known[engine]


def newest_calibration(
    workspace: Workspace, model: str, engine: EngineName, resolutions: Sequence[Resolution], on_warning: Notify
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
    latency: Path | None, calibration: Path | None, times: StageTimes, *, on_warning: Notify
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
    require_engine(steps, latency, "plain")
    return SimulatedEngine.of(steps.of("plain"), known, times)


def require_engine(steps: StepFile, path: Path, engine: EngineName) -> None:
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
    content = read_json(path, "the calibration")
    if not content:
        raise UsageError(f"{path}: the calibration is damaged: it names no engine")
    return parse(dict[str, Calibration], content, f"{path}: the calibration is damaged")


def read_graph_costs(path: Path) -> GraphCosts:
    """Read a file of `--graph-costs`.

    Raises UsageError: it cannot be read, a number is missing or out of its range, or a name is unknown.
    """
    content = read_json(path, "the file of costs")
    known = [each.name for each in fields(GraphCosts)]
    if unknown := sorted({*content} - {*known}):
        raise UsageError(f"{path}: unknown key {unknown[0]!r}; known: {', '.join(known)}")
    return parse(GraphCosts, content, str(path))


def load_stage_times(run_dir: Path) -> StageTimes:
    """Return the mean times of the stages of a served run. Raises UsageError if it has no records, and RunError if it
    has no image.
    """
    rows = read_rows(run_dir / "records.parquet", RECORDS)
    return StageTimes.measured(RequestRecord.from_row(row) for row in rows)
