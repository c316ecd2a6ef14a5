"""`psctl simulate`: serve a trace on a virtual clock, and plan how many GPUs a rate needs."""

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ...data.errors import UsageError
from ...data.files import require_places, write_json
from ...data.workspace import DEFAULT_WORKSPACE, Workspace
from ...serving.scheduling.systems import DEFAULT_SYSTEM, get_system
from ..options.common import (
    Json,
    MaxBatchSize,
    Model,
    NumInferenceSteps,
    OutputFile,
    Quiet,
    Resolutions,
    Seed,
    WorkspaceRoot,
)
from ..options.trace import (
    Amplitude,
    Arrivals,
    Cv,
    Duration,
    FromZero,
    Gpus,
    Mix,
    NumPromptsSimulated,
    OptionalRequestRate,
    Period,
    PolicyName,
    SloScale,
    StageTimesRun,
    SystemEngine,
    SystemName,
    Trace,
)
from ..output import Output
from .serve import summary_tables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from ...data.requests import Request
    from ...profiling.runs.simulate import SearchResult

_DEFAULT_NUM_PROMPTS = 1000
_MAX_REPORTED = 20_000


def simulate(
    latency: Annotated[
        Path,
        typer.Option(
            "--latency",
            metavar="FILE",
            help="Step latencies: a fitted predictor, or a table (of psctl profile latency, or "
            "CSV: combination,ms with combinations such as 2*512x512 + 1024x1024).",
            dir_okay=False,
        ),
    ],
    trace: Trace = "poisson",
    request_rate: OptionalRequestRate = None,
    cv: Cv = None,
    amplitude: Amplitude = None,
    period: Period = None,
    arrivals: Arrivals = None,
    num_prompts: NumPromptsSimulated = None,
    duration: Duration = None,
    resolutions: Resolutions = None,
    mix: Mix = None,
    num_inference_steps: NumInferenceSteps = None,
    slo_scale: SloScale = 5.0,
    system: SystemName = DEFAULT_SYSTEM,
    policy: PolicyName = None,
    gpus: Gpus = 1,
    max_batch_size: MaxBatchSize = 16,
    prepare_ms: Annotated[float, typer.Option("--prepare-ms", help="Milliseconds of text encoding a request.")] = 0.0,
    postprocess_ms: Annotated[float, typer.Option("--postprocess-ms", help="Milliseconds of decoding an image.")] = 0.0,
    stage_times: StageTimesRun = None,
    slo_target: Annotated[
        float | None,
        typer.Option(
            "--slo-target",
            help="Such as 0.99: find the highest rate of --gpus, and the number of GPUs for --request-rate.",
        ),
    ] = None,
    seed: Seed = 0,
    output_file: OutputFile = None,
    from_zero: FromZero = False,
    model: Model = "emoji-xl",
    engine: SystemEngine = None,
    workspace: WorkspaceRoot = Path(DEFAULT_WORKSPACE),
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Serve a trace on a virtual clock: no model is loaded, steps last as long as --latency says.

    Records, steps, summary and HTML report go to the workspace, as those of psctl serve do. With --slo-target nothing
    is written but the result is printed: what the GPUs can take, and how many are needed.

    Examples:

        psctl simulate --latency table.csv --request-rate 8 --num-prompts 100000 --policy slack

        psctl simulate --latency h200.csv --resolutions 512,768,1024 --gpus 4 --slo-target 0.99 --request-rate 20

        psctl simulate --latency table.csv --trace diurnal --amplitude 0.9 --period 3600 --duration 7200

        psctl simulate --latency table.csv --trace azure --arrivals splitwise_code.csv --request-rate 5 --json
    """
    out = Output(json=json, quiet=quiet)
    from ...data.resolution import parse_list
    from ...data.traces.traces import TRACE_KINDS
    from ...profiling.runs.outside_profile import warn_of_small_table
    from ...profiling.runs.simulate import (
        Deployment,
        at_rate,
        gpus_needed,
        highest_rate,
        load_first_steps,
        load_stage_times,
        load_step_latency,
        simulation_summary,
        write_simulation,
    )
    from ...profiling.runs.trace_settings import TraceSettings, check_slo_scale, draw_requests
    from ...serving.models.loading import model_defaults
    from ...serving.simulator.stage_times import StageTimes

    is_file = trace not in TRACE_KINDS
    if is_file and request_rate is not None and not 0 < request_rate < math.inf:
        raise UsageError(f"request rate is {request_rate:g}, but it must be more than 0 and finite for a trace file")
    check_slo_scale(slo_scale)
    for option, time_ms in {"--prepare-ms": prepare_ms, "--postprocess-ms": postprocess_ms}.items():
        if not 0 <= time_ms < math.inf:
            raise UsageError(f"{option} is {time_ms:g}, but it must be finite and not negative")
    if slo_target is not None and not 0 < slo_target <= 1:
        raise UsageError(f"--slo-target is {slo_target:g}, but it must be more than 0 and at most 1")
    if stage_times is not None and (prepare_ms or postprocess_ms):
        raise UsageError("--stage-times takes the place of --prepare-ms and --postprocess-ms; give one or the other")
    chosen = get_system(system, is_simulated=True).overridden(engine=engine, policy=policy)
    defaults = model_defaults(model)
    is_unlimited = num_prompts is None and duration is None and trace in ("poisson", "gamma", "diurnal")

    settings = TraceSettings(
        trace=trace,
        request_rate=1.0 if request_rate is None else request_rate,
        cv=cv,
        num_prompts=_DEFAULT_NUM_PROMPTS if is_unlimited else num_prompts,
        duration_s=duration,
        resolutions=resolutions,
        mix=mix,
        num_inference_steps=num_inference_steps,
        seed=seed,
        from_zero=from_zero,
        amplitude=amplitude,
        period_s=period,
        arrivals=arrivals,
    )

    def trace_at(rate: float | None) -> "Sequence[Request]":
        drawn = draw_requests(settings if rate is None else replace(settings, request_rate=rate), defaults)
        return at_rate(drawn, rate) if is_file and rate is not None else drawn

    requests = trace_at(request_rate)
    predictor = load_step_latency(latency.expanduser(), on_warning=out.warn)
    warn_of_small_table(predictor, latency, max_batch_size, out.warn)
    sizes = defaults.resolutions if resolutions is None else parse_list(resolutions)
    sizes = tuple(dict.fromkeys((*sizes, *(request.resolution for request in requests))))
    deployment = Deployment(
        chosen,
        predictor,
        StageTimes.constant(sizes, prepare_ms / 1e3, postprocess_ms / 1e3)
        if stage_times is None
        else load_stage_times(stage_times.expanduser()),
        num_gpus=gpus,
        max_batch_size=max_batch_size,
        slo_scale=slo_scale,
        first=load_first_steps(latency.expanduser()),
    )
    require_places(file=output_file)
    config = {
        **settings.to_config(),
        **({} if request_rate is not None else {"request_rate": None}),
        "num_prompts": num_prompts,
        "system": system,
        "policy": chosen.policy,
        "engine": chosen.engine,
        "latency": str(latency),
        "slo_scale": slo_scale,
        "gpus": gpus,
        "max_batch_size": max_batch_size,
        "prepare_ms": prepare_ms,
        "postprocess_ms": postprocess_ms,
        "stage_times": None if stage_times is None else str(stage_times),
    }

    if slo_target is not None:
        with out.status("Searching ..."):
            rate = highest_rate(deployment, trace_at, slo_target)
            needed = None if request_rate is None else gpus_needed(deployment, requests, slo_target)
        found: dict[str, Any] = {
            "slo_target": slo_target,
            "gpus": gpus,
            "highest_request_rate": rate.value,
            "attainment_at_highest_rate": rate.attainment,
            "tried_rates": _tried(rate, "request_rate"),
            "request_rate": config["request_rate"],
            "gpus_needed": None if needed is None else int(needed.value),
            "attainment_with_gpus_needed": None if needed is None else needed.attainment,
            "tried_gpus": None if needed is None else _tried(needed, "gpus"),
            "config": config,
        }
        if output_file is not None:
            write_json(output_file.expanduser(), found)
        out.data(found, table=lambda: _search_table(found))
        return

    require_places(workspace)
    with out.progress() as progress:
        task = progress.add_task("requests", total=len(requests))
        promised, result = deployment.run(requests, keep_steps=True, on_finish=lambda record: progress.advance(task))
    summary = simulation_summary(result, deployment, model=model, dataset=trace, config=config)
    with_report = len(requests) <= _MAX_REPORTED
    run_dir = write_simulation(
        Workspace(workspace).for_model(model, "simulated"), promised, result, summary, with_report=with_report
    )
    if output_file is not None:
        write_json(output_file.expanduser(), summary)
    out.data(summary, table=lambda: summary_tables(summary))
    more = "" if with_report else f" (no report for more than {_MAX_REPORTED} requests)"
    out.note(f"Results: {run_dir / 'report.html' if with_report else run_dir}{more}")


def _tried(search: "SearchResult", name: Literal["request_rate", "gpus"]) -> list[dict[str, float]]:
    return [{name: value, "slo_attainment_rate": share} for value, share in search.tried.items()]


def _search_table(found: dict[str, Any]) -> "RenderableType":
    from rich.table import Table

    table = Table(title=f"SLO attainment of at least {found['slo_target']:.2%}", title_justify="left")
    for name in ("", "requests/s", "GPUs", "attainment"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row(
        "highest rate",
        f"{found['highest_request_rate']:.3g}",
        str(found["gpus"]),
        f"{found['attainment_at_highest_rate']:.2%}",
    )
    if found["gpus_needed"] is not None:
        table.add_row(
            "GPUs needed",
            str(found["request_rate"]),
            str(found["gpus_needed"]),
            f"{found['attainment_with_gpus_needed']:.2%}",
        )
    return table
