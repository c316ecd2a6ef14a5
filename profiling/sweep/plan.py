"""Plan of a sweep: its settings, and what the side that serves it is made from. This module imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...data.workspace import ModelWorkspace, Workspace
from ...serving.models.defaults import ModelDefaults
from ...serving.models.loading import model_defaults
from ...serving.runs.notes import Notify
from ...serving.runs.step_file import latencies_of_file
from ...serving.runs.step_latencies import table_for_simulation
from ...serving.scheduling.policies import get_policy
from ...training.cache.schedule import CacheSchedule
from ...training.latency.predictor import PREDICTOR_FILE
from .runner import Sweep, SweepSide, WarmUp, examples_of
from .settings import RUN_KIND, SweepSettings, check_resumed
from .simulator_side import SimulatorFiles, SimulatorSide

if TYPE_CHECKING:
    from ...serving.models.served import ServedModel


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """Plan of a sweep.

    Attributes:
        settings: settings of the sweep.
        model, workspace: the model as `load_model` takes it, and the workspace with the files.
        files: files of the simulator; it takes a table of the workspace if they have no step latencies.
        predictor: step latencies for policies that look ahead on the engine; None for those of the workspace.
        warm_up: warm-up of the engine.
        resume: folder of the sweep to continue; None begins another.
    """

    settings: SweepSettings
    model: str
    workspace: Workspace
    files: SimulatorFiles = field(default_factory=SimulatorFiles)
    predictor: Path | None = None
    warm_up: WarmUp = field(default_factory=WarmUp)
    resume: Path | None = None

    def checked(self) -> ModelDefaults:
        """Return the default settings of the model, after drawing all traces once.

        Raises UsageError: there is no such model, a trace cannot be drawn, or the sweep cannot be continued.
        """
        defaults = model_defaults(self.model)
        examples_of(self.settings, defaults)
        if self.resume is not None:
            check_resumed(self.resume, self.settings)
        return defaults

    def on_simulator(
        self, defaults: ModelDefaults, schedule: CacheSchedule | None, *, on_note: Notify, on_warning: Notify
    ) -> Sweep:
        """Return the sweep in the simulator.

        Args:
            defaults: default settings of the model.
            schedule: schedule of computed steps, for systems whose cache is a schedule.
            on_note: called with a line that names the table of the workspace.
            on_warning: called with a line about possible inaccuracies.

        Raises UsageError or RunError as `SimulatorFiles.engines`.
        """
        files = self.files
        if files.latency is None:
            sizes = [request.resolution for request in examples_of(self.settings, defaults)]
            files = replace(files, latency=table_for_simulation(self.workspace, self.model, sizes, on_note=on_note))
        engines = files.engines(self.settings.max_batch_size, on_warning)
        side = SimulatorSide(self.settings, engines, self.model, files.sources(), schedule)
        return self._sweep(defaults, side, self.workspace.for_model(self.model, "simulated"))

    def on_engine(
        self,
        defaults: ModelDefaults,
        load: "Callable[[], tuple[ServedModel, ModelWorkspace]]",
        *,
        on_note: Notify,
        on_warning: Notify,
    ) -> Sweep:
        """Return the sweep on the engine, and in the simulator beside it if the settings ask for both.

        Args:
            defaults: default settings of the model.
            load: loads the model, and returns it with its part of the workspace; called after the files are read.
            on_note: called with notes on progress.
            on_warning: called with a line about possible inaccuracies.

        Raises UsageError: a file is damaged, or there is no predictor for a policy that looks ahead.
        """
        latency, file = None, self.predictor
        if file is not None:
            latency = latencies_of_file(file, self.settings.max_batch_size, on_warning=on_warning)
        model, place = load()
        from ..measure.latency import workspace_predictor
        from .engine_side import EngineSide

        if latency is None and any(get_policy(each.policy).requires_predictor for each in self.settings.presets):
            latency = workspace_predictor(model, place, on_warning=on_warning)
            file = place.find_predictor(PREDICTOR_FILE)
        side = EngineSide(
            self.settings,
            model,
            place,
            predictor=latency,
            predictor_file=file,
            warm_up=self.warm_up,
            on_note=on_note,
        )
        return self._sweep(defaults, side, place)

    def _sweep(self, defaults: ModelDefaults, side: SweepSide, place: ModelWorkspace) -> Sweep:
        return Sweep(self.settings, side, defaults, lambda: self.resume or place.new_run(RUN_KIND))
