"""One serve run from end to end: draw the trace, measure standalone latencies, replay, write the results.

The run's folder in the workspace receives `trace.jsonl` (the requests with their SLOs), the files of `write_run`, and
some images. An interrupted run writes all of them as well.
"""

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ...data.figures import write_figures
from ...data.files import atomic_write
from ...data.requests import Request
from ...data.traces.files import save_trace
from ...data.traces.traces import assign_slos
from ...data.workspace import ModelWorkspace
from ...serving.core.metrics import summarize
from ...serving.core.request_state import RequestRecord
from ...serving.core.step_row import StepRow
from ...serving.scheduling.policies import StepLatencyPredictor, get_policy, require_predictor
from ...serving.scheduling.systems import System
from ...training.latency.online_correction import OnlineCorrection
from ..measure.standalone import RequestShape, doubt_standalone, shape_of, standalone_latencies
from .figures import run_figures
from .outside_profile import predictions_outside
from .run_folder import write_run
from .trace_settings import DEFAULT_SLO_SCALE

if TYPE_CHECKING:
    from ...serving.engine.run_result import RunResult
    from ...serving.models.served import ServedModel

_MAX_REPORT_IMAGES = 24
_MAX_TIMES_SERVED = 5.0
"""Ratio of a request's standalone latency to its time in a run above which its SLO is in doubt."""


@dataclass(frozen=True, slots=True)
class ServeOutcome:
    """Outcome of a serve run: the summary as in `summary.json`, records, steps, the folder, and whether Ctrl-C ended
    the run.
    """

    summary: dict[str, Any]
    records: list[RequestRecord]
    steps: list[StepRow]
    run_dir: Path
    was_interrupted: bool


def run_serve(
    model: "ServedModel",
    requests: Sequence[Request],
    system: System,
    workspace: ModelWorkspace,
    *,
    dataset: str,
    config: dict[str, Any],
    predictor: StepLatencyPredictor | None = None,
    slo_scale: float = DEFAULT_SLO_SCALE,
    max_batch_size: int = 16,
    save_dir: Path | None = None,
    remeasure: bool = False,
    on_measure: Callable[[RequestShape], None] | None = None,
    on_doubt: Callable[[str], None] = lambda doubt: None,
    on_start: Callable[[], None] | None = None,
    on_finish: Callable[[RequestRecord], None] | None = None,
) -> ServeOutcome:
    """Serve a trace and write its results.

    Args:
        model, workspace: the loaded model, and its part of the workspace.
        requests: the trace, in order of arrival.
        system: system that provides the policy and the share of steps; engine and cache are those of the model.
        dataset, config: name of the trace or prompt file, and the user's settings, for the summary and the report.
        predictor: step latencies for policies that look ahead; an online predictor observes every step.
        slo_scale: SLO of each request without one, as a multiple of its standalone latency on plain diffusers.
        max_batch_size: maximum number of requests in the denoise batch.
        save_dir: folder for all images and a copy of the report; None keeps a few images for the report only.
        remeasure: whether standalone latencies are measured even if the workspace has them.
        on_measure, on_start, on_finish: called before each measurement, before the replay, and for each ended request.
        on_doubt: called with a line that names a standalone latency that may be too long, and the reason.

    Raises:
        UsageError: if the model cannot serve a request, or the policy needs a predictor and there is none; nothing has
            run then.
        RunError: if a measurement fails.
        KeyboardInterrupt: on Ctrl-C before the replay; later, the outcome records the interruption.
        OSError: if results cannot be written.
    """
    from ...serving.engine.engine import Engine
    from ...serving.engine.replay import replay

    policy = get_policy(system.policy)
    if policy.requires_predictor:
        require_predictor(policy, predictor)
    for request in requests:
        model.check_request(system.adapt(request))
    model.tune([request.resolution for request in requests], workspace.tables)
    outside_before = predictions_outside(predictor)
    # Requests with their own SLO need no measurement.
    unmeasured = [request for request in requests if request.slo_s is None]
    standalone = standalone_latencies(
        model, unmeasured, workspace.tables, remeasure=remeasure, on_measure=on_measure, on_doubt=on_doubt
    )
    requests = assign_slos(requests, lambda request: standalone[shape_of(model, request)], slo_scale)
    run_dir = workspace.new_run("serve")
    save_trace(run_dir / "trace.jsonl", requests)
    alone_s = {request.request_id: standalone.get(shape_of(model, request)) for request in requests}
    if on_start is not None:
        on_start()
    engine = Engine(
        model,
        policy,
        predictor=predictor,
        max_batch_size=max_batch_size,
        image_path=_image_paths(requests, save_dir, run_dir),
        on_finish=on_finish,
    )
    adapted = [system.adapt(request) for request in requests]
    result = replay(engine, adapted, standalone_s=lambda request: alone_s[request.request_id])
    summary = summarize(result.records, result.duration_s, slo_scale=slo_scale, model=model.name, dataset=dataset)
    summary |= engine_figures(result)
    summary |= optional_figures(model, predictor, outside_before)
    summary["standalone_latency"] = {
        f"{shape.resolution}, {shape.num_inference_steps} steps": latency_s for shape, latency_s in standalone.items()
    }
    if doubts := doubtful_alone(result.records, alone_s):
        summary["standalone_times_served"] = doubts
    summary["config"] = config
    summary["run_dir"] = str(run_dir)
    write_figures(summary, run_figures(summary, result.records))
    _write(run_dir, result, summary, save_dir)
    served_s = _exact_standalone_s(model, adapted, result.records)
    for shape, known_s in doubt_standalone(model, workspace.tables, served_s).items():
        on_doubt(
            f"{shape.resolution} was served in {served_s[shape]:.3g} s, but had taken {known_s:.3g} s alone: the next "
            "run measures that again"
        )
    return ServeOutcome(summary, result.records, result.steps, run_dir, result.was_interrupted)


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


def doubtful_alone(records: Sequence[RequestRecord], alone_s: Mapping[int, float | None]) -> dict[str, float]:
    """Return, by resolution, the ratio of the standalone latency on plain diffusers to the shortest time in which a
    request was served, waiting excluded. Only ratios above `_MAX_TIMES_SERVED` are returned.

    Steps take longer in a batch, not shorter, and neither the cache nor fewer steps save as much. Such a ratio means
    that the standalone latencies, from which the SLOs are derived, were measured on a busy machine.
    """
    found: dict[str, float] = {}
    for record in records:
        alone, served_s = alone_s[record.request_id], _without_waiting_s(record)
        if alone is None or served_s is None:
            continue
        times = alone / served_s
        found[str(record.resolution)] = max(times, found.get(str(record.resolution), 0.0))
    return {name: times for name, times in sorted(found.items()) if times > _MAX_TIMES_SERVED}


def _exact_standalone_s(
    model: "ServedModel", requests: Sequence[Request], records: Sequence[RequestRecord]
) -> dict[RequestShape, float]:
    """Return, by shape, the shortest time in which a new image without reused steps was served, waiting excluded.

    Empty if passes were compiled or recorded, which makes them faster by more than the error of a measurement.
    """
    least_s: dict[RequestShape, float] = {}
    shapes = {request.request_id: shape_of(model, request) for request in requests if request.edit is None}
    for record in () if model.options.compile or model.options.cuda_graphs else records:
        shape, served_s = shapes.get(record.request_id), _without_waiting_s(record)
        if shape is not None and served_s is not None and not record.steps_reused:
            least_s[shape] = min(served_s, least_s.get(shape, math.inf))
    return least_s


def _without_waiting_s(record: RequestRecord) -> float | None:
    """Return the seconds that a request took, excluding the time it waited for others; None if it was not served."""
    if record.latency_s is None or record.admitted_s is None:
        return None
    prepare_s = (record.prepare_end_s or 0.0) - (record.prepare_start_s or 0.0)
    return (record.finish_s or 0.0) - record.admitted_s + prepare_s


def engine_figures(result: "RunResult") -> dict[str, Any]:
    """Return the figures of the denoise loop: number of steps, mean batch size, share of the time in which it was busy,
    number of the policy's decisions, and the seconds that a decision took.
    """
    busy_s = sum(row.duration_s for row in result.steps)
    num_steps, ranked = len(result.steps), sorted(result.decision_times_s)
    return {
        "num_steps": num_steps,
        "batch_size_mean": sum(row.active for row in result.steps) / num_steps if num_steps else None,
        "step_latency_mean": busy_s / num_steps if num_steps else None,
        "num_decisions": len(ranked),
        "scheduling_mean": fmean(ranked) if ranked else None,
        # The smallest time that at least 95 % of the decisions did not exceed.
        "scheduling_p95": ranked[math.ceil(0.95 * len(ranked)) - 1] if ranked else None,
        "max_prepared": result.max_prepared,
        "denoise_busy_rate": busy_s / result.duration_s if result.duration_s > 0 else None,
        "was_interrupted": result.was_interrupted,
    }


def optional_figures(
    model: "ServedModel", predictor: StepLatencyPredictor | None, outside_before: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Return the parts of a summary that not every run has.

    They are the savings of the caches of prompts and patches, the memory freed by offloading text encoders, the error
    of predicted step latencies, the predictions outside the profile, the reasons why batches failed and why passes
    could not be recorded, and the facts of parallel ranks. `outside_before` is as in `predictions_outside`.
    """
    from ...serving.parallel.stepper import ParallelStepper
    from ...serving.patched.stepper import PatchedStepper
    from ...serving.plain.stepper import PlainStepper

    found: dict[str, Any] = {}
    if model.prompts is not None:
        found["prompt_cache"] = model.prompts.to_json()
    if model.offload is not None:
        found["offload"] = model.offload.to_json(model.pipe)
    if isinstance(predictor, OnlineCorrection):
        found["predictor_drift"] = asdict(predictor.drift())
    outside = predictions_outside(predictor, outside_before)
    if outside is not None:
        found["predictions_outside"] = outside
    if isinstance(model.stepper, PatchedStepper | PlainStepper) and model.stepper.recording_failure is not None:
        found["recording_failure"] = model.stepper.recording_failure
    failures = model.stepper.batch_failures
    if failures.count:
        found["batch_failures"] = asdict(failures)
    if model.cache_stats is not None:
        found["cache"] = model.cache_stats.to_json()
    if isinstance(model.stepper, ParallelStepper):
        found["parallel"] = model.stepper.facts()
    return found


def _write(run_dir: Path, result: "RunResult", summary: dict[str, Any], save_dir: Path | None) -> None:
    images = [
        (Path(record.image_path), f"{record.prompt} ({record.resolution})")
        for record in result.records
        if record.image_path is not None
    ]
    report = write_run(run_dir, result.records, result.steps, summary, images)
    if save_dir is not None:
        with atomic_write(save_dir / report.name) as temporary:
            shutil.copyfile(report, temporary)
