"""One serve run from end to end: draw the trace, measure step latencies and standalone latencies, replay, write the
results.

The run's folder in the workspace receives `trace.jsonl` (the requests with their SLOs), the files of `write_run`, and
some images. An interrupted run writes all of them as well.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.figures import write_figures
from ...data.files import atomic_write
from ...data.requests import Request
from ...data.traces.files import save_trace
from ...data.traces.traces import assign_slos
from ...data.workspace import ModelWorkspace
from ...training.latency.online_correction import OnlineCorrection
from ..core.metrics import summarize
from ..core.request_state import RequestRecord
from ..core.step_row import StepRow
from ..scheduling.policies import StepLatencyPredictor, get_policy, require_predictor
from ..scheduling.systems import System
from .corrections import correction_of
from .doubts import doubtful_alone, exact_s
from .figures import run_figures
from .notes import Notify, ignore
from .outside_profile import predictions_outside
from .run_folder import WriteReport, write_run
from .standalone import doubt_standalone, shape_of, standalone_latencies
from .step_file import latencies_of_file
from .step_latencies import MeasureLatencies, latencies_for_serving
from .summary import engine_figures, optional_figures
from .trace_requests import draw_requests
from .trace_settings import DEFAULT_SLO_SCALE, TraceSettings, check_slo_scale

if TYPE_CHECKING:
    from ..engine.run_result import RunResult
    from ..models.served import ServedModel

_MAX_REPORT_IMAGES = 24


@dataclass(frozen=True, slots=True)
class ServeOutcome:
    """Outcome of a serve run.

    Attributes:
        summary: figures of the run, as in `summary.json`.
        records, steps: one per request, and one per step.
        run_dir: folder of the run.
        was_interrupted: whether Ctrl-C ended the run.
        correction: what the run has learnt of step latencies; None if its predictor learns nothing.
    """

    summary: dict[str, Any]
    records: list[RequestRecord]
    steps: list[StepRow]
    run_dir: Path
    was_interrupted: bool
    correction: OnlineCorrection | None = None


@dataclass(frozen=True, slots=True)
class ServePlan:
    """Plan of a trace that is served.

    Attributes:
        trace: settings of the trace.
        system: system that serves, with the user's choice of engine and policy. It provides the policy and the share of
            steps; engine and cache are those of the loaded model.
        predictor: file of step latencies for policies that look ahead; None uses those of the workspace.
        slo_scale: SLO of each request without one, as a multiple of its standalone latency on plain diffusers.
        max_batch_size: maximum number of requests in the denoise batch.
        save_dir: folder for all images and a copy of the report; None keeps a few images for the report only.
        remeasure: whether standalone latencies are measured even if the workspace has them.
    """

    trace: TraceSettings
    system: System
    predictor: Path | None = None
    slo_scale: float = DEFAULT_SLO_SCALE
    max_batch_size: int = 16
    save_dir: Path | None = None
    remeasure: bool = False

    def ready(self, model: str, *, on_warning: Notify) -> "ReadyTrace":
        """Read the files of the plan and draw its requests, before the model is loaded.

        Args:
            model: the model as `load_model` takes it.
            on_warning: called with a line about latencies that may be inaccurate.

        Raises:
            UsageError: there is no such model, a file is damaged, or a setting is out of its range.
        """
        from ..models.loading import model_defaults, model_geometry

        latency = None
        if self.predictor is not None:
            latency = latencies_of_file(self.predictor, self.max_batch_size, on_warning=on_warning)
        requests = draw_requests(self.trace, model_defaults(model), geometry=lambda: model_geometry(model), name=model)
        check_slo_scale(self.slo_scale)
        return ReadyTrace(self, requests, latency)

    def to_config(self, model: "ServedModel") -> dict[str, Any]:
        """Return the settings by the names of the options, as JSON, for the summary and the report."""
        return {
            **self.trace.to_config(),
            "system": self.system.name,
            "policy": self.system.policy,
            "predictor": None if self.predictor is None else str(self.predictor),
            "engine": self.system.engine,
            "cache": model.options.cache.in_words(),
            "slo_scale": self.slo_scale,
            "max_batch_size": self.max_batch_size,
            "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
        }


@dataclass(frozen=True, slots=True)
class ReadyTrace:
    """Requests of a plan, and the step latencies of its file, None without one. The model is not loaded yet."""

    plan: ServePlan
    requests: Sequence[Request]
    latency: StepLatencyPredictor | None

    def serve(
        self,
        model: "ServedModel",
        workspace: ModelWorkspace,
        *,
        measure: MeasureLatencies,
        write_report: WriteReport,
        on_note: Notify,
        on_warning: Notify,
        on_start: Callable[[], None],
        on_finish: Callable[[RequestRecord], None],
    ) -> ServeOutcome:
        """Serve the requests and write the results.

        Args:
            model, workspace: the loaded model, and its part of the workspace.
            measure: measures step latencies, if the policy needs them and neither plan nor workspace has any.
            write_report: writes the report of the run.
            on_note: called with a line about each slow operation.
            on_warning: called with a line about possible inaccuracies.
            on_start, on_finish: as in `run_serve`.

        Raises as `run_serve`.
        """
        plan, latency = self.plan, self.latency
        if latency is None and get_policy(plan.system.policy).requires_predictor:
            sizes = [request.resolution for request in self.requests]
            latency = latencies_for_serving(
                model, workspace, sizes, plan.max_batch_size, measure=measure, on_note=on_note, on_warning=on_warning
            )
        correction = None
        if latency is not None:
            first = [plan.system.adapt(request) for request in self.requests[: plan.max_batch_size]]
            correction = correction_of(model, workspace, latency, first=first, on_note=on_note)
        return run_serve(
            model,
            self.requests,
            plan,
            workspace,
            write_report=write_report,
            predictor=correction,
            on_note=on_note,
            on_warning=on_warning,
            on_start=on_start,
            on_finish=on_finish,
        )


def run_serve(
    model: "ServedModel",
    requests: Sequence[Request],
    plan: ServePlan,
    workspace: ModelWorkspace,
    *,
    write_report: WriteReport,
    dataset: str | None = None,
    predictor: StepLatencyPredictor | None = None,
    on_note: Notify = ignore,
    on_warning: Notify = ignore,
    on_start: Callable[[], None] | None = None,
    on_finish: Callable[[RequestRecord], None] | None = None,
) -> ServeOutcome:
    """Serve a trace and write its results.

    Args:
        model, workspace: the loaded model, and its part of the workspace.
        requests: the trace, in order of arrival.
        plan: plan of the trace; requests and step latencies are those given here.
        write_report: writes the report of the run.
        dataset: name of the requests in the summary and the report; None for that of the plan's trace.
        predictor: step latencies for policies that look ahead; an online predictor observes every step.
        on_note: called with a line about each measurement.
        on_warning: called with a line that names a standalone latency that may be too long, and the reason.
        on_start, on_finish: called before the replay, and for each ended request.

    Raises:
        UsageError: if the model cannot serve a request, or the policy needs a predictor and there is none; nothing has
            run then.
        RunError: if a measurement fails.
        KeyboardInterrupt: on Ctrl-C before the replay; later, the outcome records the interruption.
        OSError: if results cannot be written.
    """
    from ..engine.engine import Engine
    from ..engine.replay import replay

    policy = get_policy(plan.system.policy)
    if policy.requires_predictor:
        require_predictor(policy, predictor)
    checked = [model.checked(plan.system.adapt(request)) for request in requests]
    model.tune([request.resolution for request in requests], workspace.tables, plan.max_batch_size)
    outside_before = predictions_outside(predictor)
    # Requests with their own SLO need no measurement.
    unmeasured = [request for request in requests if request.slo_s is None]
    standalone = standalone_latencies(
        model,
        unmeasured,
        workspace.tables,
        remeasure=plan.remeasure,
        on_measure=lambda shape: on_note(f"Measuring {shape.in_words} alone on plain diffusers ..."),
        on_doubt=on_warning,
    )
    requests = assign_slos(requests, lambda request: standalone[shape_of(model, request)], plan.slo_scale)
    run_dir = workspace.new_run("serve")
    save_trace(run_dir / "trace.jsonl", requests)
    checked = [
        each.promised(request.slo_s, standalone.get(shape_of(model, request)))
        for each, request in zip(checked, requests, strict=True)
    ]
    if on_start is not None:
        on_start()
    engine = Engine(
        model,
        policy,
        predictor=predictor,
        max_batch_size=plan.max_batch_size,
        image_path=_image_paths(requests, plan.save_dir, run_dir),
        on_finish=on_finish,
    )
    result = replay(engine, checked)
    summary = summarize(
        result.records,
        result.duration_s,
        slo_scale=plan.slo_scale,
        model=model.name,
        dataset=plan.trace.dataset if dataset is None else dataset,
    )
    summary |= engine_figures(result)
    summary |= optional_figures(model, predictor, outside_before)
    summary["standalone_latency"] = {
        f"{shape.in_words}, {shape.num_inference_steps} steps": latency_s for shape, latency_s in standalone.items()
    }
    if doubts := doubtful_alone(result.records, checked):
        summary["standalone_times_served"] = doubts
    summary["config"] = plan.to_config(model)
    summary["run_dir"] = str(run_dir)
    write_figures(summary, run_figures(summary, result.records))
    _write(run_dir, result, summary, plan.save_dir, write_report)
    served_s = exact_s(model, checked, result.records)
    for shape, known_s in doubt_standalone(model, workspace.tables, served_s).items():
        on_warning(
            f"{shape.in_words} was served in {served_s[shape]:.3g} s, but had taken {known_s:.3g} s alone: the next "
            "run measures that again"
        )
    correction = predictor if isinstance(predictor, OnlineCorrection) else None
    return ServeOutcome(summary, result.records, result.steps, run_dir, result.was_interrupted, correction)


def _image_paths(requests: Sequence[Request], save_dir: Path | None, run_dir: Path) -> Callable[[Request], Path | None]:
    """Return the function that maps a request to its image's path: all go to `save_dir`, or the first few to the run's
    folder for its report.
    """
    digits = max(3, len(str(max(request.request_id for request in requests))))
    kept = {request.request_id for request in requests[:_MAX_REPORT_IMAGES]}
    folder = run_dir / "images" if save_dir is None else save_dir

    def path_of(request: Request) -> Path | None:
        if save_dir is None and request.request_id not in kept:
            return None
        return folder / f"{request.request_id:0{digits}}.png"

    return path_of


def _write(
    run_dir: Path, result: "RunResult", summary: dict[str, Any], save_dir: Path | None, write_report: WriteReport
) -> None:
    images = [
        (Path(record.image_path), f"{record.prompt} ({record.resolution})")
        for record in result.records
        if record.image_path is not None
    ]
    write_run(run_dir, result.records, result.steps, summary, images, write_report=write_report)
    if save_dir is not None:
        with atomic_write(save_dir / "report.html") as temporary:
            shutil.copyfile(run_dir / "report.html", temporary)
