"""`psctl bench slo`: SLO attainment of every policy over the request rate, on the engine or in the simulator."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ...data.errors import UsageError
from ...data.files import require_places, write_json
from ...data.workspace import DEFAULT_WORKSPACE, Workspace
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
    numbers_of,
)
from ..options.groups import CACHE_FLAGS, PATCH_FLAGS, CacheFlags, PatchFlags, with_option_groups
from ..options.trace import Amplitude, Arrivals, Cv, Duration, Gpus, Mix, Period, RandomTrace, SloScale, StageTimesRun
from ..output import Output

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...profiling.sweep.bench import SweepOutcome
    from ...profiling.sweep.bench_simulator import SimulatorFiles

_DEFAULT_POLICIES = "diffusers,bucketed,nirvana,patched-fcfs,patchedserve"
_DEFAULT_NUM_PROMPTS = {"real": 60, "both": 60, "simulator": 1000}


@with_option_groups
def bench_slo(
    engine: Annotated[
        Literal["real", "simulator", "both"],
        typer.Option("--engine", help="What serves; both: the simulator beside the engine, and how far they differ."),
    ] = "real",
    policies: Annotated[
        str,
        typer.Option(
            "--policies",
            metavar="NAME,...",
            help="Systems: patchedserve, patched-fcfs, patched-edf, bucketed, nirvana, diffusers, diffusers-fcfs; the "
            "simulator has distrifusion-fcfs, too.",
        ),
    ] = _DEFAULT_POLICIES,
    rates: Annotated[
        str, typer.Option("--rates", metavar="X,...", help="Request rates: mean arrivals per second.")
    ] = "1,2,3,4",
    num_seeds: Annotated[int, typer.Option("--num-seeds", help="Traces of every rate: --seed and on.", min=1)] = 1,
    seed: Seed = 0,
    trace: RandomTrace = "poisson",
    cv: Cv = None,
    amplitude: Amplitude = None,
    period: Period = None,
    arrivals: Arrivals = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            "--num-prompts", help="Requests of every run. Default: 60 (simulator: 1000), or with --duration all."
        ),
    ] = None,
    duration: Duration = None,
    resolutions: Resolutions = None,
    mix: Mix = None,
    prompts: Prompts = None,
    num_inference_steps: NumInferenceSteps = None,
    guidance_scale: GuidanceScale = None,
    slo_scale: SloScale = 5.0,
    max_batch_size: MaxBatchSize = 16,
    predictor: Annotated[
        Path | None,
        typer.Option(
            "--predictor", metavar="FILE", help="Step latencies, for slack. Default: the workspace's.", dir_okay=False
        ),
    ] = None,
    warmup_requests: Annotated[
        int, typer.Option("--warmup-requests", help="Served by each engine before anything counts.", min=1)
    ] = 32,
    combinations: Annotated[
        int,
        typer.Option(
            "--combinations", help="Of the latency tables that --engine both measures if it finds none.", min=6
        ),
    ] = 60,
    latency: Annotated[
        Path | None,
        typer.Option(
            "--latency", metavar="FILE", help="Simulator: step latencies of the patch engine.", dir_okay=False
        ),
    ] = None,
    plain_latency: Annotated[
        Path | None,
        typer.Option("--plain-latency", metavar="FILE", help="Simulator: those of the plain engine.", dir_okay=False),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration",
            metavar="FILE",
            help="Simulator: calibration.json of a sweep with --engine both.",
            dir_okay=False,
        ),
    ] = None,
    stage_times: StageTimesRun = None,
    gpus: Gpus = 1,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="DIR",
            help="Go on with this sweep: the same options, but for policies, rates and seeds.",
            file_okay=False,
        ),
    ] = None,
    output_file: OutputFile = None,
    model: Model = "emoji-xl",
    device: Device = "auto",
    dtype: DType = "auto",
    patching: PatchFlags = PATCH_FLAGS,
    caching: CacheFlags = CACHE_FLAGS,
    workspace: WorkspaceRoot = Path(DEFAULT_WORKSPACE),
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Serve the same traces under every policy and request rate, and compare their SLO attainment.

    SLOs are multiples of the standalone latency on plain diffusers, the same for all policies. Every finished run is
    kept at once: Ctrl-C ends the sweep early, and the same command with --resume goes on. Table, plots and HTML report
    go to the workspace.

    Examples:

        psctl bench slo --rates 1,2,3,4 --num-prompts 60

        psctl bench slo --cache patch --policies bucketed,patched-fcfs,patchedserve --rates 2,4,6 --num-seeds 3

        psctl bench slo --engine both --policies bucketed,patched-fcfs,patchedserve --rates 1,2,3 --duration 20

        psctl bench slo --engine simulator --latency h200.csv --resolutions 512,768,1024 --rates 5,10,15,20 --gpus 4

        psctl bench slo --resume psctl-workspace/emoji-xl/cpu/runs/slo-20260131T094500Z --num-seeds 2
    """
    out = Output(json=json, quiet=quiet)
    # Everything that can be wrong is looked at before torch is imported and the model loaded.
    from ...profiling.runs.trace_settings import TraceSettings
    from ...profiling.sweep.bench import WarmUp, examples_of
    from ...profiling.sweep.sweep import RUN_KIND, SweepSettings, check_resumed
    from ...serving.engine.stepper import EngineOptions
    from ...serving.models.loading import model_defaults

    options = patching.to_options(cache=caching)
    is_simulated = engine == "simulator"
    _check_side(
        {"--latency": latency, "--plain-latency": plain_latency, "--calibration": calibration}
        | {"--stage-times": stage_times},
        is_simulated,
        "simulator",
    )
    changed = None if options == EngineOptions() else "given"
    _check_side(
        {"--predictor": predictor, "--order, --patch-size, --strategy, --kernels or --cache": changed},
        not is_simulated,
        "real or both",
    )
    files = _simulator_files(latency, plain_latency, calibration, stage_times) if is_simulated else None
    is_unlimited = num_prompts is None and duration is None and trace != "azure"
    settings = SweepSettings(
        policies=_names(policies),
        rates=tuple(numbers_of("--rates", rates)),
        seeds=tuple(range(seed, seed + num_seeds)),
        engine=engine,
        trace=TraceSettings(
            trace=trace,
            cv=cv,
            num_prompts=_DEFAULT_NUM_PROMPTS[engine] if is_unlimited else num_prompts,
            duration_s=duration,
            resolutions=resolutions,
            mix=mix,
            prompts=prompts,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            amplitude=amplitude,
            period_s=period,
            arrivals=arrivals,
        ),
        slo_scale=slo_scale,
        max_batch_size=max_batch_size,
        num_gpus=gpus,
    )
    defaults = model_defaults(model)
    examples_of(settings, defaults)
    warm_up = WarmUp(warmup_requests, combinations)
    if resume is not None:
        check_resumed(resume.expanduser(), settings)
    require_places(workspace, file=output_file)

    def folder_on(device_name: str) -> Path:
        if resume is not None:
            return resume.expanduser()
        return Workspace(workspace).for_model(model, device_name).new_run(RUN_KIND)

    sweep: Callable[..., SweepOutcome]
    if files is not None:
        from ...profiling.sweep.bench_simulator import bench_in_simulator

        engines = files.engines(max_batch_size, out.warn)
        sweep = partial(
            bench_in_simulator, settings, model, defaults, engines, lambda: folder_on("simulated"), files.sources()
        )
    else:
        from ...profiling.runs.outside_profile import warn_of_small_table
        from ...profiling.runs.simulate import load_step_latency
        from ...serving.models.loading import load_model
        from ...serving.scheduling.policies import get_policy
        from ...serving.scheduling.systems import get_system

        predictor_file = None if predictor is None else predictor.expanduser()
        step_latency = None
        if predictor_file is not None:
            step_latency = load_step_latency(predictor_file, on_warning=out.warn)
            warn_of_small_table(step_latency, predictor_file, max_batch_size, out.warn)
        with out.status(f"Loading {model} ..."):
            served = load_model(model, device, dtype, options, workspace=Workspace(workspace))
        part = Workspace(workspace).for_model(model, str(served.device))
        policies_used = [get_policy(get_system(name).policy) for name in settings.policies]
        if step_latency is None and any(policy.requires_predictor for policy in policies_used):
            from ...profiling.measure.latency import workspace_predictor
            from ...training.latency.predictor import PREDICTOR_FILE

            step_latency = workspace_predictor(served, part, on_warning=out.warn)
            predictor_file = part.find_predictor(PREDICTOR_FILE)
        from ...profiling.sweep.bench_engine import bench_on_engine

        sweep = partial(
            bench_on_engine,
            settings,
            served,
            part,
            lambda: folder_on(str(served.device)),
            predictor=step_latency,
            predictor_file=predictor_file,
            warm_up=warm_up,
            on_note=out.note,
        )
    with out.progress() as progress:
        task = progress.add_task("runs", total=settings.num_runs)
        outcome = sweep(
            on_run=lambda text: progress.update(task, description=text), on_done=lambda: progress.advance(task)
        )
    if output_file is not None:
        write_json(output_file.expanduser(), outcome.result)
    out.data(outcome.result, table=lambda: result_tables(outcome.result))
    out.note(f"Report: {outcome.report}")
    if outcome.was_interrupted:
        out.note(f"The same command with --resume {outcome.run_dir} goes on from here.")
        raise KeyboardInterrupt


def result_tables(result: dict[str, Any]) -> "RenderableType":
    """What people see of `result.json`."""
    from rich.console import Group
    from rich.table import Table

    from ...profiling.sweep.tables import tables_of

    tables = []
    for each in tables_of(result):
        table = Table(title=each.title, title_justify="left", caption=each.note or None, caption_justify="left")
        for index, name in enumerate(each.columns):
            table.add_column(name, justify="left" if index < each.num_words else "right")
        for row in each.rows:
            table.add_row(*row)
        tables.append(table)
    return Group(*tables)


def _simulator_files(
    latency: Path | None, plain_latency: Path | None, calibration: Path | None, stage_times: Path | None
) -> "SimulatorFiles":
    from ...profiling.sweep.bench_simulator import SimulatorFiles

    if latency is None:
        raise UsageError("--engine simulator needs --latency: step latencies of the patch engine")
    others = (None if path is None else path.expanduser() for path in (plain_latency, calibration, stage_times))
    return SimulatorFiles(latency.expanduser(), *others)


def _check_side(given: dict[str, Any], is_allowed: bool, engine: str) -> None:
    for option, value in given.items():
        if value is not None and not is_allowed:
            raise UsageError(f"{option} belongs to --engine {engine}")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
