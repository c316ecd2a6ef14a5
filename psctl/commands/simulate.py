"""`psctl simulate`: serve a trace on a virtual clock, and plan how many GPUs a rate needs."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ...data.errors import UsageError
from ...data.files import require_places
from ...data.resolution import parse_list
from ...profiling.runs.trace_settings import DEFAULT_SLO_SCALE, TraceSettings
from ...serving.options import EngineOptions
from ...serving.scheduling.routers import DEFAULT_ROUTER, ROUTERS, check_router
from ...serving.scheduling.systems import DEFAULT_SYSTEM
from ..flags import flag
from ..options.cascade import CascadeOptions, ServedCascade
from ..options.common import CalibrationFile, Gpus, MaxBatchSize, OutputFile, SloScale, StageTimesRun
from ..options.groups import EDITED_TRACE, ENGINE
from ..options.system import PolicyName, SystemName, chosen_system
from ..options.target import WHERE, Target
from ..output import Output
from .simulate_cascade import check_cascade_flags, simulate_cascade

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...data.requests import Request
    from ...profiling.runs.planning import SearchResult

_DEFAULT_NUM_PROMPTS = 1000
_MAX_REPORTED = 20_000
_NUM_PROMPTS = flag("--num-prompts", "Number of requests. Default: 1000, or with --duration, a file or azure all.")


def simulate(
    *,
    context: typer.Context,
    cascade: ServedCascade = None,
    latency: Annotated[
        Path | None,
        flag(
            "--latency",
            "Step latencies: a fitted predictor, or a table (of psctl profile latency, or CSV: combination,ms with "
            "combinations such as 2*512x512 + 1024x1024). Default: the workspace's table of the model, else one in the "
            "box.",
            metavar="FILE",
            dir_okay=False,
        ),
    ] = None,
    plain_latency: Annotated[
        Path | None,
        flag(
            "--plain-latency",
            "Step latencies of plain diffusers, for the latency of a request alone, of which SLOs are multiples. "
            "Default: the calibration's, else --latency.",
            metavar="FILE",
            dir_okay=False,
        ),
    ] = None,
    edit_profile: Annotated[
        Path | None,
        flag(
            "--edit-profile",
            "Of edits: what they take over records, of psctl profile edits. Default: the workspace's newest of the "
            "model.",
            metavar="FILE",
            dir_okay=False,
        ),
    ] = None,
    request_rate: Annotated[
        float | None,
        flag(
            "--request-rate",
            "Mean arrivals per second of a random trace; inf: all at once. Default: 1, of a file its own.",
        ),
    ] = None,
    trace: Annotated[
        TraceSettings,
        EDITED_TRACE.without("request_rate", "prompts", "guidance_scale").using(num_prompts=_NUM_PROMPTS),
    ],
    slo_scale: SloScale = DEFAULT_SLO_SCALE,
    policy: PolicyName = None,
    system: SystemName = DEFAULT_SYSTEM,
    gpus: Gpus = 1,
    router: Annotated[
        str, flag("--router", f"What sends requests to --gpus: {', '.join(ROUTERS)}.", metavar="NAME")
    ] = DEFAULT_ROUTER,
    max_batch_size: MaxBatchSize = 16,
    prepare_ms: Annotated[float, flag("--prepare-ms", "Milliseconds of text encoding a request.")] = 0.0,
    postprocess_ms: Annotated[float, flag("--postprocess-ms", "Milliseconds of decoding an image.")] = 0.0,
    stage_times: StageTimesRun = None,
    calibration: CalibrationFile = None,
    speedups: Annotated[
        str,
        flag(
            "--speedups",
            "How many times as fast --gpus draw one image, for distrifusion-fcfs: as DistriFusion's paper prints it, "
            "by the latency model for up to 8, or as psctl bench parallel has measured it.",
            metavar="published|model|FILE,...",
        ),
    ] = "published",
    slo_target: Annotated[
        float | None,
        flag(
            "--slo-target", "Such as 0.99: find the highest rate of --gpus, and the number of GPUs for --request-rate."
        ),
    ] = None,
    output_file: OutputFile = None,
    cascading: CascadeOptions,
    engine: Annotated[EngineOptions, ENGINE.only("engine")],
    target: Annotated[Target, WHERE.only("model", "workspace")],
    out: Output,
) -> None:
    """Serve a trace on a virtual clock: no model is loaded, steps last as long as a table says.

    Records, steps, summary and HTML report go to the workspace, as those of psctl serve do. With --slo-target nothing
    is written but the result is printed: what the GPUs can take, and how many are needed. With --cascade a light and a
    heavy model serve together, as psctl profile cascade has measured them, and the images served are judged by FID.

    Examples:

        psctl simulate --request-rate 8 --num-prompts 100000
        psctl simulate --latency h200.csv --resolutions 512,768,1024 --gpus 4 --slo-target 0.99 --request-rate 20
        psctl simulate --calibration psctl-workspace/emoji-xl/cpu/runs/slo-20260131T094500Z/calibration.json \
            --slo-target 0.95
        psctl simulate --gpus 8 --router least-requests --request-rate 20
        psctl simulate --edits 1 --mask-ratios public --gpus 8 --router mask-aware --request-rate 20
        psctl simulate --latency table.csv --trace diurnal --amplitude 0.9 --period 3600 --duration 7200
        psctl simulate --system distrifusion-fcfs --speedups model --gpus 3
        psctl simulate --cascade emoji-xl-turbo:1,emoji-xl:50 --gpus 16 --trace diurnal --request-rate 20 --slo-scale 3
        psctl simulate --latency table.csv --trace azure --arrivals splitwise_code.csv --request-rate 5 --json
    """
    from ...data.figures import write_figures
    from ...data.traces.traces import TRACE_KINDS
    from ...profiling.parallel.speedups import read_speedups
    from ...profiling.report.table import to_rich
    from ...profiling.report.tables import run_tables, search_table
    from ...profiling.runs.outside_profile import warn_of_small_table
    from ...profiling.runs.planning import at_rate, duration_ratio_range, gpus_needed, highest_rate, with_error
    from ...profiling.runs.simulate import (
        SimulatedDeployment,
        SimulatedEngine,
        load_stage_times,
        load_step_file,
        simulation_summary,
        write_simulation,
    )
    from ...profiling.runs.step_latencies import edit_profile_for_simulation, table_for_simulation
    from ...profiling.runs.trace_settings import check_slo_scale, draw_trace
    from ...profiling.sweep.simulator_side import calibration_of, newest_calibration, plain_engine, table_of
    from ...serving.editing.costs import profiled_edits
    from ...serving.editing.profile import EditProfile
    from ...serving.simulator.stage_times import StageTimes

    check_cascade_flags(context, cascade, system)
    if cascade is not None:
        simulate_cascade(
            cascade,
            system,
            trace,
            cascading,
            request_rate=request_rate,
            slo_scale=slo_scale,
            gpus=gpus,
            output_file=output_file,
            target=target,
            out=out,
        )
        return
    is_file = trace.trace not in TRACE_KINDS
    if is_file and request_rate is not None and not 0 < request_rate < math.inf:
        raise UsageError(f"request rate is {request_rate:g}, but it must be more than 0 and finite for a trace file")
    check_slo_scale(slo_scale)
    for option, time_ms in {"--prepare-ms": prepare_ms, "--postprocess-ms": postprocess_ms}.items():
        if not 0 <= time_ms < math.inf:
            raise UsageError(f"{option} is {time_ms:g}, but it must be finite and not negative")
    if slo_target is not None and not 0 < slo_target <= 1:
        raise UsageError(f"--slo-target is {slo_target:g}, but it must be more than 0 and at most 1")
    if slo_target is not None and trace.trace == "shape":
        raise UsageError("--trace shape has rates of its own, so that --slo-target has none to search")
    if stage_times is not None and (prepare_ms or postprocess_ms):
        raise UsageError("--stage-times takes the place of --prepare-ms and --postprocess-ms; give one or the other")
    if calibration is not None and (stage_times is not None or prepare_ms or postprocess_ms):
        raise UsageError("--calibration brings the times of the stages; give it or those, not both")
    chosen = chosen_system(system, policy, engine, is_simulated=True)
    check_router(router)
    if router != DEFAULT_ROUTER and chosen.spans_gpus:
        raise UsageError(f"--router is {router}, but {chosen.name} draws every request on all GPUs")
    if speedups != "published" and not chosen.spans_gpus:
        raise UsageError(f"--speedups is for systems whose GPUs share an image, and {chosen.name} has none that do")
    if plain_latency is not None and chosen.engine == "plain":
        raise UsageError(f"{chosen.name} runs on the plain engine, so that --latency is its file, not --plain-latency")
    defaults = target.defaults()
    num_prompts = trace.num_prompts
    trace = replace(trace, request_rate=1.0 if request_rate is None else request_rate)
    if num_prompts is None and trace.duration_s is None and trace.trace in ("poisson", "gamma", "diurnal"):
        trace = replace(trace, num_prompts=_DEFAULT_NUM_PROMPTS)

    def trace_at(rate: float | None) -> "Sequence[Request]":
        drawn = draw_trace(trace if rate is None else replace(trace, request_rate=rate), defaults)
        return at_rate(drawn, rate) if is_file and rate is not None else drawn

    requests = trace_at(request_rate)
    edit_profile = edit_profile_for_simulation(
        requests, chosen, edit_profile, target.root, target.model, on_note=out.note
    )
    edited = None if edit_profile is None else EditProfile.read(edit_profile)
    sizes = defaults.resolutions if trace.resolutions is None else parse_list(trace.resolutions)
    sizes = tuple(dict.fromkeys((*sizes, *(request.resolution for request in requests))))
    if latency is None and calibration is None and stage_times is None and not (prepare_ms or postprocess_ms):
        calibration = newest_calibration(target.root, target.model, chosen.engine, sizes, out.warn)
        if calibration is not None:
            out.note(f"Calibrated by the newest comparison with real runs, {calibration}; --latency leaves it out.")
    calibrated = None if calibration is None else calibration_of(calibration, chosen.engine)
    if calibration is not None and latency is None:
        latency = table_of(calibration, chosen.engine)
    if latency is None:
        latency = table_for_simulation(target.root, target.model, sizes, on_note=out.note)
    steps = load_step_file(latency, on_warning=out.warn)
    warn_of_small_table(steps.steady, latency, max_batch_size, out.warn)
    edits = None
    if edited is not None:
        from ...serving.models.loading import model_geometry

        edits, steps = profiled_edits(edited, model_geometry(target.model)), steps.with_edits(edited)
        if calibrated is not None:
            calibrated = replace(calibrated, reuse=None)
    if edits is not None and chosen.cache != "off":
        out.note("Beside edits that read records no patch is reused: the system is simulated without its cache.")
    elif chosen.cache not in ("off", "schedule") and (calibrated is None or calibrated.reuse is None):
        out.note("The patch cache is not simulated: steps last as long as without it.")
    times = StageTimes.constant(sizes, prepare_ms / 1e3, postprocess_ms / 1e3)
    if stage_times is not None:
        times = load_stage_times(stage_times)
    simulated = SimulatedEngine.of(steps.of(chosen.engine), calibrated, times)
    if chosen.cache == "schedule":
        simulated = replace(simulated, schedule=target.schedule())
    alone = None
    if chosen.engine != "plain":
        alone = plain_engine(plain_latency, calibration, times, on_warning=out.warn)
        if alone is None:
            out.note(
                f"SLOs are multiples of what {latency} says of a request alone; --plain-latency takes plain diffusers."
            )
    deployment = SimulatedDeployment(
        chosen,
        simulated,
        num_gpus=gpus,
        max_batch_size=max_batch_size,
        slo_scale=slo_scale,
        alone=alone,
        speedups=read_speedups(speedups),
        router=router,
        edits=edits,
    )
    require_places(file=output_file)
    config = {
        **trace.to_config(),
        **({} if request_rate is not None else {"request_rate": None}),
        "num_prompts": num_prompts,
        "system": system,
        "policy": chosen.policy,
        "engine": engine.engine,
        "latency": str(latency),
        "plain_latency": None if plain_latency is None else str(plain_latency),
        "slo_scale": slo_scale,
        "gpus": gpus,
        "router": None if chosen.spans_gpus else router,
        "speedups": speedups if chosen.spans_gpus else None,
        "max_batch_size": max_batch_size,
        "prepare_ms": prepare_ms,
        "postprocess_ms": postprocess_ms,
        "stage_times": None if stage_times is None else str(stage_times),
        "calibration": None if calibration is None else str(calibration),
        **({} if edit_profile is None else {"edit_profile": str(edit_profile)}),
    }

    if slo_target is not None:
        with out.status("Searching ..."):
            rate = highest_rate(deployment, trace_at, slo_target)
            needed = None if request_rate is None else gpus_needed(deployment, requests, slo_target)
            error = None
            if calibrated is not None and calibration is not None:
                error = duration_ratio_range(calibrated, chosen.engine, calibration)
            figures = {
                "highest_request_rate": with_error(
                    rate, lambda each: highest_rate(each, trace_at, slo_target), deployment, error, worst=0.0
                )
            }
            if needed is not None:
                figures["gpus_needed"] = with_error(
                    needed, lambda each: gpus_needed(each, requests, slo_target), deployment, error
                )
        found: dict[str, Any] = {
            "slo_target": slo_target,
            "gpus": gpus,
            "highest_request_rate": rate.value,
            "attainment_at_highest_rate": rate.attainment,
            "tried_rates": _search_rows(rate, "request_rate"),
            "request_rate": config["request_rate"],
            "gpus_needed": None if needed is None else int(needed.value),
            "attainment_with_gpus_needed": None if needed is None else needed.attainment,
            "tried_gpus": None if needed is None else _search_rows(needed, "gpus"),
            "error_of_steps": None if error is None else asdict(error),
            "config": config,
        }
        out.data(write_figures(found, figures), table=lambda: search_table(found).to_rich(), file=output_file)
        if error is None:
            out.note(
                "How far the simulator is off is not known: psctl bench slo --on both measures it (--calibration)."
            )
        return

    require_places(target.workspace)
    with out.phases() as start:
        advance = start("requests", len(requests))
        promised, result = deployment.run(requests, keep_steps=True, on_finish=lambda record: advance())
    summary = simulation_summary(result, deployment, model=target.model, dataset=trace.trace, config=config)
    with_report = len(requests) <= _MAX_REPORTED
    run_dir = write_simulation(
        target.root.for_model(target.model, "simulated"), promised, result, summary, with_report=with_report
    )
    out.data(summary, table=lambda: to_rich(run_tables(summary)), file=output_file)
    more = "" if with_report else f" (no report for more than {_MAX_REPORTED} requests)"
    out.note(f"Results: {run_dir / 'report.html' if with_report else run_dir}{more}")


def _search_rows(search: "SearchResult", name: Literal["request_rate", "gpus"]) -> list[dict[str, float]]:
    return [{name: value, "slo_attainment_rate": share} for value, share in search.tried.items()]
