"""`psctl serve`: replay a trace of requests on the wall clock and report latency, queueing and SLO attainment."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...data.errors import RunError
from ...data.files import require_places, write_json
from ...data.workspace import DEFAULT_WORKSPACE, Workspace
from ...serving.scheduling.systems import DEFAULT_SYSTEM, get_system
from ..options.common import (
    Device,
    DType,
    GuidanceScale,
    Json,
    MaxBatchSize,
    Model,
    NumInferenceSteps,
    OutputFile,
    Prompts,
    Quiet,
    Resolutions,
    Seed,
    WorkspaceRoot,
)
from ..options.groups import CACHE_FLAGS, PATCH_FLAGS, CacheFlags, PatchFlags, with_option_groups
from ..options.trace import (
    Amplitude,
    Arrivals,
    Cv,
    Duration,
    FromZero,
    Mix,
    NumPrompts,
    Period,
    PolicyName,
    RequestRate,
    SloScale,
    SystemEngine,
    SystemName,
    Trace,
)
from ..output import Output

if TYPE_CHECKING:
    from rich.console import RenderableType


@with_option_groups
def serve(
    trace: Trace = "poisson",
    request_rate: RequestRate = 1.0,
    cv: Cv = None,
    amplitude: Amplitude = None,
    period: Period = None,
    arrivals: Arrivals = None,
    num_prompts: NumPrompts = None,
    duration: Duration = None,
    resolutions: Resolutions = None,
    mix: Mix = None,
    prompts: Prompts = None,
    num_inference_steps: NumInferenceSteps = None,
    guidance_scale: GuidanceScale = None,
    slo_scale: SloScale = 5.0,
    system: SystemName = DEFAULT_SYSTEM,
    policy: PolicyName = None,
    predictor: Annotated[
        Path | None,
        typer.Option("--predictor", metavar="FILE", help="Step latencies, for --policy slack.", dir_okay=False),
    ] = None,
    max_batch_size: MaxBatchSize = 16,
    seed: Seed = 0,
    output_file: OutputFile = None,
    save_dir: Annotated[
        Path | None,
        typer.Option("--save-dir", help="Save all images, and a copy of the report, in this folder.", file_okay=False),
    ] = None,
    from_zero: FromZero = False,
    remeasure: Annotated[
        bool, typer.Option("--remeasure", help="Measure standalone latencies again instead of using the workspace's.")
    ] = False,
    model: Model = "emoji-xl",
    device: Device = "auto",
    dtype: DType = "auto",
    engine: SystemEngine = None,
    patching: PatchFlags = PATCH_FLAGS,
    caching: CacheFlags = CACHE_FLAGS,
    workspace: WorkspaceRoot = Path(DEFAULT_WORKSPACE),
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Serve a trace of requests and report latency, queueing and SLO attainment.

    Requests arrive on the wall clock. The run's records, steps, summary and HTML report go to the workspace. Ctrl-C
    ends the run early and keeps what is finished.

    Examples:

        psctl serve --trace poisson --request-rate 2 --num-prompts 60

        psctl serve --trace gamma --cv 3 --duration 60 --resolutions 128,256 --mix 3,1 --policy static

        psctl serve --trace requests.jsonl --json --output-file summary.json
    """
    out = Output(json=json, quiet=quiet)
    # Everything that can be wrong is looked at before torch is imported and the model loaded.
    from ...profiling.runs.outside_profile import warn_of_small_table
    from ...profiling.runs.serve import run_serve
    from ...profiling.runs.simulate import load_step_latency
    from ...profiling.runs.trace_settings import TraceSettings, check_slo_scale, draw_requests
    from ...serving.models.loading import load_model, model_defaults
    from ...serving.scheduling.policies import get_policy
    from ...training.latency.online_correction import OnlineCorrection

    chosen = get_system(system).overridden(engine=engine, policy=policy)
    options = patching.to_options(chosen.engine, caching)
    step_latency = None
    if predictor is not None:
        step_latency = load_step_latency(predictor.expanduser(), on_warning=out.warn)
        warn_of_small_table(step_latency, predictor, max_batch_size, out.warn)
    settings = TraceSettings(
        trace=trace,
        request_rate=request_rate,
        cv=cv,
        num_prompts=num_prompts,
        duration_s=duration,
        resolutions=resolutions,
        mix=mix,
        prompts=prompts,
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
        seed=seed,
        from_zero=from_zero,
        amplitude=amplitude,
        period_s=period,
        arrivals=arrivals,
    )
    requests = draw_requests(settings, model_defaults(model))
    check_slo_scale(slo_scale)
    require_places(save_dir, workspace, file=output_file)

    with out.status(f"Loading {model} ..."):
        served = load_model(model, device, dtype, options, workspace=Workspace(workspace))
    config = {
        **settings.to_config(),
        "system": system,
        "policy": chosen.policy,
        "predictor": None if predictor is None else str(predictor),
        "engine": chosen.engine,
        "slo_scale": slo_scale,
        "max_batch_size": max_batch_size,
        "device": str(served.device),
        "dtype": str(served.dtype).removeprefix("torch."),
    }
    model_workspace = Workspace(workspace).for_model(model, str(served.device))
    if step_latency is None and get_policy(chosen.policy).requires_predictor:
        from ...profiling.measure.latency import workspace_predictor

        step_latency = workspace_predictor(served, model_workspace, on_warning=out.warn)
    correction = None if step_latency is None else OnlineCorrection(step_latency)
    with out.progress() as progress:
        task = progress.add_task("requests", total=len(requests), start=False)
        outcome = run_serve(
            served,
            requests,
            chosen,
            model_workspace,
            dataset=trace if prompts is None else f"{trace}, {prompts.name}",
            config=config,
            predictor=correction,
            slo_scale=slo_scale,
            max_batch_size=max_batch_size,
            save_dir=None if save_dir is None else save_dir.expanduser(),
            remeasure=remeasure,
            on_measure=lambda shape: out.note(f"Measuring {shape.resolution} alone ..."),
            on_start=lambda: out.note(
                f"Serving {len(requests)} requests, the last of which arrives after {requests[-1].arrival_s:.1f} s ..."
            ),
            on_finish=lambda record: progress.advance(task),
        )
    if output_file is not None:
        write_json(output_file.expanduser(), outcome.summary)
    out.data(outcome.summary, table=lambda: summary_tables(outcome.summary))
    out.note(f"Report: {outcome.run_dir / 'report.html'}")
    if outcome.was_interrupted:
        raise KeyboardInterrupt
    if repeated := outcome.summary.get("batch_failures"):
        out.warn(f"{repeated['count']} steps of whole batches failed and were repeated one by one; {repeated['first']}")
    failed = [record for record in outcome.records if record.status == "failed"]
    if failed:
        first = f"request {failed[0].request_id}: {failed[0].reason}"
        if len(failed) == len(outcome.records):
            raise RunError(f"all {len(failed)} requests failed; {first}")
        out.warn(f"{len(failed)} of {len(outcome.records)} requests failed; {first}")


def summary_tables(summary: dict[str, Any]) -> "RenderableType":
    """What people see of the summary of a served or simulated run."""
    from rich.console import Group
    from rich.table import Table

    whole = Table(title=f"{summary['model']}, {summary['config']['system']}", title_justify="left")
    whole.add_column("figure")
    whole.add_column("value", justify="right")
    counts = ("total", "completed", "failed", "discarded", "cancelled")
    for name in counts:
        if name in ("total", "completed") or summary[f"{name}_requests"]:
            whole.add_row(f"{name} requests", str(summary[f"{name}_requests"]))
    for reason, count in summary["discarded_by_reason"].items():
        whole.add_row(f"  {reason}", str(count))
    for label, key, unit in (
        ("duration", "duration", "s"),
        ("throughput", "throughput_qps", "images/s"),
        ("goodput", "goodput_qps", "images/s"),
        ("latency mean", "latency_mean", "s"),
        ("latency p50", "latency_p50", "s"),
        ("latency p95", "latency_p95", "s"),
        ("latency p99", "latency_p99", "s"),
        ("queueing mean", "queueing_mean", "s"),
        ("mean batch size", "batch_size_mean", ""),
    ):
        whole.add_row(label, _number(summary[key], unit))
    decision_s = summary["scheduling_mean"]
    whole.add_row("scheduling mean", _number(None if decision_s is None else decision_s * 1e3, "ms"))
    whole.add_row(f"SLO attainment ({summary['slo_scale']:g}x standalone)", _share(summary["slo_attainment_rate"]))

    each = Table(title="by resolution", title_justify="left")
    for name in (
        "resolution",
        "requests",
        "completed",
        "SLO attainment",
        "latency mean",
        "latency p95",
        "queueing mean",
    ):
        each.add_column(name, justify="left" if name == "resolution" else "right")
    for resolution, figures in summary["per_resolution"].items():
        each.add_row(
            resolution,
            str(figures["requests"]),
            str(figures["completed"]),
            _share(figures["slo_attainment_rate"]),
            *(_number(figures[key], "s") for key in ("latency_mean", "latency_p95", "queueing_mean")),
        )
    return Group(whole, each)


def _number(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.3g} {unit}".strip()


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
