"""`psctl simulate`: serves a trace on a virtual clock, and plans the number of GPUs for a rate."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...data.files import require_places
from ...serving.options import EngineOptions
from ...serving.runs.trace_settings import DEFAULT_SLO_SCALE, TraceSettings
from ...serving.scheduling.routers import DEFAULT_ROUTER, ROUTERS
from ...serving.scheduling.systems import DEFAULT_SYSTEM
from ...serving.simulator.graphs import GraphsMode
from ..flags import flag
from ..options.cascade import CascadeOptions, CascadePlan, ServedCascade
from ..options.common import CalibrationFile, Gpus, MaxBatchSize, OutputFile, SloScale, StageTimesRun
from ..options.groups import EDITED_TRACE, ENGINE
from ..options.system import PolicyName, SystemName, chosen_system
from ..options.target import WHERE, Target
from ..output import Output
from .simulate_cascade import check_cascade_flags, simulate_cascade

if TYPE_CHECKING:
    from ...serving.runs.simulated.simulate import ReadySimulation

_NUM_PROMPTS = flag("--num-prompts", "Number of requests. Default: 1000, or all with --duration, a file or azure.")


def simulate(
    *,
    context: typer.Context,
    cascade: ServedCascade = None,
    latency: Annotated[
        Path | None,
        flag(
            "--latency",
            "Step latencies: a fitted predictor, a table of psctl profile latency, or CSV with the columns "
            "combination,ms and combinations such as 2*512x512 + 1024x1024. Default: the model's table in the "
            "workspace, else a bundled one.",
            metavar="FILE",
            dir_okay=False,
        ),
    ] = None,
    plain_latency: Annotated[
        Path | None,
        flag(
            "--plain-latency",
            "Step latencies of plain diffusers, for standalone latencies, of which SLOs are multiples. Default: those "
            "of the calibration, else --latency.",
            metavar="FILE",
            dir_okay=False,
        ),
    ] = None,
    edit_profile: Annotated[
        Path | None,
        flag(
            "--edit-profile",
            "Edits: latencies with records, from psctl profile edits. Default: the model's newest in the workspace.",
            metavar="FILE",
            dir_okay=False,
        ),
    ] = None,
    request_rate: Annotated[
        float | None,
        flag(
            "--request-rate",
            "Mean arrivals per second of a random trace; inf: all at once. Default: 1, or the rate of the trace file.",
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
        str, flag("--router", f"Router that assigns requests to --gpus: {', '.join(ROUTERS)}.", metavar="NAME")
    ] = DEFAULT_ROUTER,
    max_batch_size: MaxBatchSize = 16,
    prepare_ms: Annotated[float, flag("--prepare-ms", "Milliseconds of text encoding per request.")] = 0.0,
    postprocess_ms: Annotated[float, flag("--postprocess-ms", "Milliseconds of decoding per image.")] = 0.0,
    stage_times: StageTimesRun = None,
    calibration: CalibrationFile = None,
    speedups: Annotated[
        str,
        flag(
            "--speedups",
            "Speed-up of one image on --gpus, for distrifusion-fcfs: as printed in DistriFusion's paper, from the "
            "latency model for up to 8 GPUs, or as measured by psctl bench parallel.",
            metavar="published|model|FILE,...",
        ),
    ] = "published",
    slo_target: Annotated[
        float | None,
        flag(
            "--slo-target",
            "SLO attainment to reach, such as 0.99: find the highest rate that --gpus sustain, and the number of GPUs "
            "for --request-rate.",
        ),
    ] = None,
    graphs: Annotated[
        GraphsMode | None,
        flag(
            "--graphs",
            "Launches of passes, with --graph-costs: kernel by kernel (off), one CUDA graph per composition of a "
            "batch (exact), or one per bucket of padded patches (bucketed). Default: as measured in --latency.",
        ),
    ] = None,
    graph_costs: Annotated[
        Path | None,
        flag(
            "--graph-costs",
            "JSON file with the costs of launching, recording and replaying a pass; --latency then contains GPU times "
            "only.",
            metavar="FILE",
            dir_okay=False,
        ),
    ] = None,
    output_file: OutputFile = None,
    cascading: CascadeOptions,
    engine: Annotated[EngineOptions, ENGINE.only("engine")],
    target: Annotated[Target, WHERE.only("base", "workspace")],
    out: Output,
) -> None:
    """Serve a trace on a virtual clock, with step latencies from a table instead of a model.

    Records, steps, a summary and an HTML report are written to the workspace, as by psctl serve. --slo-target prints
    the rate that the GPUs sustain and the number of GPUs that the rate needs, and writes nothing. With --cascade, a
    light and a heavy model serve with the times that psctl profile cascade has measured, and the served images are
    measured by FID.

    Examples:

        psctl simulate --request-rate 8 --num-prompts 100000
        psctl simulate --latency h200.csv --resolutions 512,768,1024 --gpus 4 --slo-target 0.99 --request-rate 20
        psctl simulate --calibration psctl-workspace/emoji-xl/cpu/runs/slo-20260131T094500Z/calibration.json \
            --slo-target 0.95
        psctl simulate --gpus 8 --router least-requests --request-rate 20
        psctl simulate --edits 1 --mask-ratios public --gpus 8 --router mask-aware --request-rate 20
        psctl simulate --latency table.csv --trace diurnal --amplitude 0.9 --period 3600 --duration 7200
        psctl simulate --latency replayed.csv --resolutions 512,1024 --graphs bucketed --graph-costs costs.json
        psctl simulate --system distrifusion-fcfs --speedups model --gpus 3
        psctl simulate --cascade emoji-xl-turbo:1,emoji-xl:50 --gpus 16 --trace diurnal --request-rate 20 --slo-scale 3
        psctl simulate --latency table.csv --trace azure --arrivals splitwise_code.csv --request-rate 5 --json
    """
    from ...profiling.parallel.speedups import read_speedups
    from ...serving.runs.simulated.files import EngineFiles
    from ...serving.runs.simulated.simulate import SimulationPlan

    check_cascade_flags(context, cascade, system)
    if cascade is not None:
        trace = replace(trace, request_rate=1.0 if request_rate is None else request_rate)
        simulate_cascade(CascadePlan(cascade, system, trace, cascading, gpus, slo_scale), output_file, target, out)
        return
    files = EngineFiles(
        latency, plain_latency, edit_profile, calibration, stage_times, prepare_ms, postprocess_ms, graph_costs
    )
    chosen = chosen_system(system, policy, engine, is_simulated=True)
    plan = SimulationPlan(
        target.model,
        target.root,
        chosen,
        trace,
        request_rate,
        files,
        slo_scale=slo_scale,
        gpus=gpus,
        router=router,
        max_batch_size=max_batch_size,
        speedups=speedups,
        slo_target=slo_target,
        graphs=graphs,
    )
    if chosen.cache == "schedule":
        plan = replace(plan, schedule=target.schedule())
    ready = plan.ready(read_speedups=read_speedups, on_note=out.note, on_warning=out.warn)
    require_places(file=output_file)
    if slo_target is None:
        require_places(target.workspace)
        _run(ready, output_file, out)
    else:
        _search(ready, output_file, out)


def _run(ready: "ReadySimulation", output_file: Path | None, out: Output) -> None:
    """Simulate the trace and print its figures."""
    from ...profiling.report.html import write_report
    from ...profiling.report.table import to_rich
    from ...profiling.report.tables import run_tables
    from ...serving.runs.simulated.simulate import MAX_REPORTED

    with out.phases() as start:
        advance = start("requests", len(ready.requests))
        run = ready.run(write_report=write_report, on_finish=lambda record: advance())
    out.data(run.summary, table=lambda: to_rich(run_tables(run.summary)), file=output_file)
    more = "" if run.has_report else f" (no report for more than {MAX_REPORTED} requests)"
    out.note(f"Results: {run.run_dir / 'report.html' if run.has_report else run.run_dir}{more}")


def _search(ready: "ReadySimulation", output_file: Path | None, out: Output) -> None:
    """Search the rate that the GPUs sustain, and print it."""
    from ...profiling.report.tables import search_table

    with out.status("Searching ..."):
        found = ready.search()
    out.data(found, table=lambda: search_table(found).to_rich(), file=output_file)
    if found["error_of_steps"] is None:
        out.note("How far the simulator is off is not known: psctl bench slo --on both measures it (--calibration).")
