"""Simulated runs from end to end: the plan of a trace on the virtual clock, its deployment, and the results.

A run writes the same files as a served one to its folder of the workspace; the steps are those of the first GPU. A plan
with an SLO target is searched instead (`planning`), and nothing is written. This module imports no torch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ....data.errors import UsageError
from ....data.figures import write_figures
from ....data.requests import Request
from ....data.resolution import parse_list
from ....data.traces.files import save_trace
from ....data.traces.traces import TRACE_KINDS
from ....data.workspace import Workspace
from ....training.cache.schedule import CacheSchedule
from ...editing.costs import profiled_edits
from ...editing.profile import EditProfile
from ...models.defaults import ModelDefaults
from ...models.loading import model_defaults, model_geometry
from ...scheduling.routers import DEFAULT_ROUTER, check_router
from ...scheduling.systems import DEFAULT_SYSTEM, System, get_system
from ...simulator.distrifusion import Speedups
from ...simulator.graphs import GraphModel, GraphsMode
from ..notes import Notify
from ..run_folder import WriteReport, write_run
from ..step_latencies import edit_profile_for_simulation
from ..trace_requests import draw_requests
from ..trace_settings import DEFAULT_SLO_SCALE, TraceSettings, check_slo_scale
from .calibration import Calibration
from .deployment import OnFinish, SimulatedDeployment
from .files import EngineFiles, read_graph_costs
from .planning import SearchResult, at_rate, duration_ratio_range, gpus_needed, highest_rate, with_error
from .summary import simulation_summary

DEFAULT_NUM_PROMPTS = 1000
MAX_REPORTED = 20_000
"""Largest number of requests of a run that gets a report."""
"""Kinds of traces that have `DEFAULT_NUM_PROMPTS` requests unless something limits them."""


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """Plan of a trace that is served on the virtual clock.

    Attributes:
        model, workspace: model whose defaults and files are used, and the workspace with the files.
        system: system that is simulated, with the user's choice of engine and policy.
        trace: settings of the trace, except for its rate.
        request_rate: mean arrivals per second; None for 1 and, for a trace file, its own rate.
        files: files and times from which the engine is modelled.
        schedule: schedule of computed steps, for a system whose cache is a schedule.
        slo_scale, gpus, router, max_batch_size: as in `SimulatedDeployment`.
        speedups: source of the speed-ups of all GPUs together, for a system that spans them.
        slo_target: SLO attainment of a search; None to simulate the trace.
        graphs: how passes are launched, with the costs of `files`; None if launching is not modelled.

    Raises:
        UsageError: a number is out of its range, or options exclude each other.
    """

    model: str
    workspace: Workspace
    system: System = field(default_factory=lambda: get_system(DEFAULT_SYSTEM))
    trace: TraceSettings = field(default_factory=TraceSettings)
    request_rate: float | None = None
    files: EngineFiles = field(default_factory=EngineFiles)
    schedule: CacheSchedule | None = None
    slo_scale: float = DEFAULT_SLO_SCALE
    gpus: int = 1
    router: str = DEFAULT_ROUTER
    max_batch_size: int = 16
    speedups: str = "published"
    slo_target: float | None = None
    graphs: GraphsMode | None = None

    def __post_init__(self) -> None:
        rate, system = self.request_rate, self.system
        if self.is_file and rate is not None and not 0 < rate < math.inf:
            raise UsageError(f"request rate is {rate:g}, but it must be more than 0 and finite for a trace file")
        check_slo_scale(self.slo_scale)
        if self.slo_target is not None and not 0 < self.slo_target <= 1:
            raise UsageError(f"--slo-target is {self.slo_target:g}, but it must be more than 0 and at most 1")
        if self.slo_target is not None and self.trace.trace == "shape":
            raise UsageError("--trace shape has rates of its own, so that --slo-target has none to search")
        check_router(self.router)
        if self.router != DEFAULT_ROUTER and system.spans_gpus:
            raise UsageError(f"--router is {self.router}, but {system.name} draws every request on all GPUs")
        if self.speedups != "published" and not system.spans_gpus:
            raise UsageError(f"--speedups is for systems whose GPUs share an image, and {system.name} has none that do")
        if self.files.plain_latency is not None and system.engine == "plain":
            raise UsageError(
                f"{system.name} runs on the plain engine, so that --latency is its file, not --plain-latency"
            )
        if (self.graphs is None) != (self.files.graph_costs is None):
            raise UsageError("--graphs and --graph-costs belong together: give both or neither")
        if self.graphs is not None and (system.engine != "patched" or system.spans_gpus):
            raise UsageError(f"--graphs is for the passes of one GPU's patch engine, and {system.name} has others")

    @property
    def is_file(self) -> bool:
        """Whether the trace is read from a file."""
        return self.trace.trace not in TRACE_KINDS

    def trace_at(self, rate: float | None, defaults: ModelDefaults) -> list[Request]:
        """Draw or read the trace at a rate in requests per second; None as for `request_rate`. Raises UsageError."""
        if rate is not None and self.trace.speed is not None:
            raise UsageError(f"--speed is {self.trace.speed:g}, but a request rate of {rate:g} has another: omit one")
        trace = replace(self.trace, request_rate=1.0 if rate is None else rate)
        requests = draw_requests(
            trace.with_length(DEFAULT_NUM_PROMPTS),
            defaults,
            geometry=lambda: model_geometry(self.model),
            name=self.model,
            sizes_only=True,
        )
        return at_rate(requests, rate) if self.is_file and rate is not None else requests

    def ready(
        self, *, read_speedups: Callable[[str], Speedups], on_note: Notify, on_warning: Notify
    ) -> "ReadySimulation":
        """Draw the trace, find the files that the plan leaves to the workspace, and read all of them.

        Args:
            read_speedups: returns the speed-ups of a source.
            on_note: called with a line about each choice of a file, and about what is not simulated.
            on_warning: called with a line about possible inaccuracies.

        Raises:
            UsageError: there is no such model or file, a file is damaged, or does not cover the trace.
            RunError: the run of `stage_times` has completed no request.
        """
        defaults = model_defaults(self.model)
        requests = self.trace_at(self.request_rate, defaults)
        edit_profile = edit_profile_for_simulation(
            requests, self.system, self.files.edit_profile, self.workspace, self.model, on_note=on_note
        )
        edited = None if edit_profile is None else EditProfile.read(edit_profile)
        sizes = defaults.resolutions if self.trace.resolutions is None else parse_list(self.trace.resolutions)
        sizes = tuple(dict.fromkeys((*sizes, *(request.resolution for request in requests))))
        files, calibrated = replace(self.files, edit_profile=edit_profile).found(
            self.workspace, self.model, self.system.engine, sizes, on_note=on_note, on_warning=on_warning
        )
        served, alone = files.engines(
            self.system, self.max_batch_size, sizes, calibrated, edited, on_note=on_note, on_warning=on_warning
        )
        if self.graphs is not None and files.graph_costs is not None:
            graphs = GraphModel(self.graphs, read_graph_costs(files.graph_costs), math.gcd(*chain(*sizes)))
            served = replace(served, durations=replace(served.durations, graphs=graphs))
        deployment = SimulatedDeployment(
            self.system,
            served if self.schedule is None else replace(served, schedule=self.schedule),
            num_gpus=self.gpus,
            max_batch_size=self.max_batch_size,
            slo_scale=self.slo_scale,
            alone=alone,
            speedups=read_speedups(self.speedups),
            router=self.router,
            edits=None if edited is None else profiled_edits(edited, model_geometry(self.model)),
        )
        return ReadySimulation(replace(self, files=files), defaults, requests, deployment, calibrated)

    def to_config(self) -> dict[str, Any]:
        """Return the settings of a plan with files by the names of the options, as JSON."""
        spans_gpus, files = self.system.spans_gpus, asdict(self.files)
        text = {name: str(each) if isinstance(each, Path) else each for name, each in files.items()}
        rate = 1.0 if self.request_rate is None else self.request_rate
        return {
            **replace(self.trace, request_rate=rate).to_config(),
            **({} if self.request_rate is not None else {"request_rate": None}),
            "system": self.system.name,
            "policy": self.system.policy,
            "engine": self.system.engine,
            "latency": text["latency"],
            "plain_latency": text["plain_latency"],
            "slo_scale": self.slo_scale,
            "gpus": self.gpus,
            "router": None if spans_gpus else self.router,
            "speedups": self.speedups if spans_gpus else None,
            "max_batch_size": self.max_batch_size,
            "prepare_ms": text["prepare_ms"],
            "postprocess_ms": text["postprocess_ms"],
            "stage_times": text["stage_times"],
            "calibration": text["calibration"],
            **({} if text["edit_profile"] is None else {"edit_profile": text["edit_profile"]}),
            **({} if self.graphs is None else {"graphs": self.graphs, "graph_costs": text["graph_costs"]}),
        }


@dataclass(frozen=True, slots=True)
class ReadySimulation:
    """A plan whose files are read.

    Attributes:
        plan: the plan with its files.
        defaults: default settings of the model.
        requests: the trace.
        deployment: deployment that serves it.
        calibrated: calibration of the system's engine; None without one.
    """

    plan: SimulationPlan
    defaults: ModelDefaults
    requests: Sequence[Request]
    deployment: SimulatedDeployment
    calibrated: Calibration | None

    def run(self, *, write_report: WriteReport, on_finish: OnFinish = None) -> "SimulatedRun":
        """Serve the trace and write the results; up to `MAX_REPORTED` requests get a report. Raises OSError, or as
        `SimulatedDeployment.run`.
        """
        plan, has_report = self.plan, len(self.requests) <= MAX_REPORTED
        promised, result = self.deployment.run(self.requests, keep_steps=True, on_finish=on_finish)
        summary = simulation_summary(
            result, self.deployment, model=plan.model, dataset=plan.trace.trace, config=plan.to_config()
        )
        run_dir = plan.workspace.for_model(plan.model, "simulated").new_run("simulate")
        summary["run_dir"] = str(run_dir)
        save_trace(run_dir / "trace.jsonl", promised)
        write_run(run_dir, result.records, result.steps, summary, write_report=write_report if has_report else None)
        return SimulatedRun(summary, run_dir, has_report)

    def search(self) -> dict[str, Any]:
        """Return the highest rate that the GPUs sustain and, if the plan has a rate, the number of GPUs that it needs,
        as JSON.

        Raises:
            UsageError: the trace has no rate, or the result of the calibration's sweep is damaged.
            RunError: the target is met at no rate, or at every rate.
        """
        plan, deployment, target = self.plan, self.deployment, self.plan.slo_target
        assert target is not None, "of a plan with a target"

        def rate_of(deployment: SimulatedDeployment) -> SearchResult:
            return highest_rate(deployment, lambda rate: plan.trace_at(rate, self.defaults), target)

        def gpus_of(deployment: SimulatedDeployment) -> SearchResult:
            return gpus_needed(deployment, self.requests, target)

        rate = rate_of(deployment)
        needed = None if plan.request_rate is None else gpus_of(deployment)
        error = None
        if self.calibrated is not None and (file := plan.files.calibration) is not None:
            error = duration_ratio_range(self.calibrated, plan.system.engine, file)
        figures = {"highest_request_rate": with_error(rate, rate_of, deployment, error, worst=0.0)}
        if needed is not None:
            figures["gpus_needed"] = with_error(needed, gpus_of, deployment, error)
        config = plan.to_config()
        found = {
            "slo_target": target,
            "gpus": plan.gpus,
            "highest_request_rate": rate.value,
            "attainment_at_highest_rate": rate.attainment,
            "tried_rates": _tried(rate, "request_rate"),
            "request_rate": config["request_rate"],
            "gpus_needed": None if needed is None else int(needed.value),
            "attainment_with_gpus_needed": None if needed is None else needed.attainment,
            "tried_gpus": None if needed is None else _tried(needed, "gpus"),
            "error_of_steps": None if error is None else asdict(error),
            "config": config,
        }
        return write_figures(found, figures)


class SimulatedRun(NamedTuple):
    """Summary of a simulated run, its folder, and whether the folder has a report."""

    summary: dict[str, Any]
    run_dir: Path
    has_report: bool


def _tried(search: SearchResult, name: Literal["request_rate", "gpus"]) -> list[dict[str, float]]:
    return [{name: value, "slo_attainment_rate": share} for value, share in search.tried.items()]
