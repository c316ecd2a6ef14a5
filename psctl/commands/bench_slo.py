"""`psctl bench slo`: SLO attainment of every system over the request rate, on the engine or in the simulator."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ...data.errors import UsageError
from ...data.files import require_places
from ...profiling.runs.trace_settings import DEFAULT_SLO_SCALE, TraceSettings
from ...serving.options import EngineOptions
from ...serving.scheduling.systems import COMPARED_SYSTEMS, SYSTEMS
from ..flags import flag, given_flags
from ..options.common import CalibrationFile, Gpus, MaxBatchSize, OutputFile, Seed, SloScale, StageTimesRun, numbers_of
from ..options.groups import ENGINE, TRACE
from ..options.system import with_cache_of
from ..options.target import Target
from ..output import Output

if TYPE_CHECKING:
    from ...profiling.sweep.runner import SweepSide
    from ...profiling.sweep.settings import SweepEngine

_NAMES = ", ".join(name for name, system in SYSTEMS.items() if system.engine != "parallel")
_DEFAULT_NUM_PROMPTS = {"engine": 60, "both": 60, "simulator": 1000}
_PATCHED = ENGINE.without("engine")
_ONLY_ON = {
    "simulator": {"--latency", "--plain-latency", "--calibration", "--stage-times", "--gpus"},
    "both": {"--combinations"},
    "engine or both": {"--predictor", "--warmup-requests", "--device", "--dtype", *_PATCHED.names()},
}


def bench_slo(
    *,
    context: typer.Context,
    on: Annotated[
        Literal["engine", "simulator", "both"],
        flag("--on", "What serves; both: the simulator beside the engine, and how far they differ."),
    ] = "engine",
    systems: Annotated[
        str,
        flag(
            "--systems",
            f"{_NAMES} (simulated only: distrifusion-fcfs). NAME:POLICY: the same with another policy.",
            metavar="NAME,...",
        ),
    ] = ",".join(COMPARED_SYSTEMS),
    rates: Annotated[str, flag("--rates", "Request rates: mean arrivals per second.", metavar="X,...")] = "1,2,3,4",
    num_seeds: Annotated[int, flag("--num-seeds", "Traces of every rate: --seed and on.", min=1)] = 1,
    seed: Seed = 0,
    trace: Annotated[
        TraceSettings,
        TRACE.without("request_rate", "seed", "from_zero").using(
            trace=flag(
                "--trace",
                "Random or recorded arrivals, drawn afresh at every rate.",
                metavar="poisson|gamma|diurnal|azure",
            ),
            num_prompts=flag(
                "--num-prompts", "Requests of every run. Default: 60 (simulator: 1000), or with --duration all."
            ),
        ),
    ],
    slo_scale: SloScale = DEFAULT_SLO_SCALE,
    max_batch_size: MaxBatchSize = 16,
    predictor: Annotated[
        Path | None,
        flag(
            "--predictor",
            "Step latencies, for the policy slack. Default: the workspace's.",
            metavar="FILE",
            dir_okay=False,
        ),
    ] = None,
    warmup_requests: Annotated[
        int, flag("--warmup-requests", "Served by each engine before anything counts.", min=1)
    ] = 32,
    combinations: Annotated[
        int, flag("--combinations", "Of the latency tables that --on both measures if it finds none.", min=6)
    ] = 60,
    latency: Annotated[
        Path | None,
        flag(
            "--latency",
            "Simulator: step latencies of the patch engine. Default: the workspace's table, else one in the box.",
            metavar="FILE",
            dir_okay=False,
        ),
    ] = None,
    plain_latency: Annotated[
        Path | None, flag("--plain-latency", "Simulator: those of the plain engine.", metavar="FILE", dir_okay=False)
    ] = None,
    calibration: CalibrationFile = None,
    stage_times: StageTimesRun = None,
    gpus: Gpus = 1,
    resume: Annotated[
        Path | None,
        flag(
            "--resume",
            "Go on with this sweep: the same options, but for systems, rates and seeds.",
            metavar="DIR",
            file_okay=False,
        ),
    ] = None,
    output_file: OutputFile = None,
    patched: Annotated[EngineOptions, _PATCHED],
    target: Target,
    out: Output,
) -> None:
    """Serve the same traces under every system and request rate, and compare their SLO attainment.

    SLOs are multiples of the standalone latency on plain diffusers, the same for all systems. Every finished run is
    kept at once: Ctrl-C ends the sweep early, and the same command with --resume continues. Table, plots and HTML
    report go to the workspace.

    Examples:

        psctl bench slo --rates 1,2,3,4 --num-prompts 60
        psctl bench slo --cache patch --systems bucketed,patched-fcfs,patchedserve --rates 2,4,6 --num-seeds 3
        psctl bench slo --on both --systems bucketed,patched-fcfs,patchedserve --rates 1,2,3 --duration 20
        psctl bench slo --on both --systems patched-slack:slack,patched-slack:fair-fitting --rates 3,4
        psctl bench slo --on simulator --latency h200.csv --resolutions 512,768,1024 --rates 5,10,15,20 --gpus 4
        psctl bench slo --resume psctl-workspace/emoji-xl/cpu/runs/slo-20260131T094500Z --num-seeds 2
    """
    # Everything that can be wrong is looked at before torch is imported and the model loaded.
    from ...profiling.report.table import to_rich
    from ...profiling.sweep.runner import WarmUp, examples_of, sweep
    from ...profiling.sweep.settings import RUN_KIND, SweepSettings, check_resumed

    _check_side(context, on)
    if trace.trace == "shape":
        raise UsageError("--trace shape has rates of its own, but bench slo asks for --rates: give another trace")
    is_simulated = on == "simulator"
    num_prompts = trace.num_prompts
    if num_prompts is None and trace.duration_s is None and trace.trace != "azure":
        num_prompts = _DEFAULT_NUM_PROMPTS[on]
    serves: SweepEngine = "real" if on == "engine" else on
    settings = SweepSettings(
        systems=tuple(name.strip() for name in systems.split(",") if name.strip()),
        rates=tuple(numbers_of("--rates", rates)),
        seeds=tuple(range(seed, seed + num_seeds)),
        engine=serves,
        trace=replace(trace, num_prompts=num_prompts),
        slo_scale=slo_scale,
        max_batch_size=max_batch_size,
        num_gpus=gpus,
    )
    defaults = target.defaults()
    examples_of(settings, defaults)
    if resume is not None:
        check_resumed(resume, settings)
    require_places(target.workspace, file=output_file)

    side: SweepSide
    if is_simulated:
        from ...profiling.runs.step_latencies import table_for_simulation
        from ...profiling.sweep.simulator_side import SimulatorFiles, SimulatorSide

        if latency is None:
            sizes = [request.resolution for request in examples_of(settings, defaults)]
            latency = table_for_simulation(target.root, target.model, sizes, on_note=out.note)
        files = SimulatorFiles(latency, plain_latency, calibration, stage_times)
        has_schedule = any(system.cache == "schedule" for system in settings.presets)
        side = SimulatorSide(
            settings,
            files.engines(max_batch_size, out.warn),
            target.model,
            files.sources(),
            target.schedule() if has_schedule else None,
        )
        place = target.root.for_model(target.model, "simulated")
    else:
        from ...profiling.runs.outside_profile import warn_of_small_table
        from ...profiling.runs.simulate import load_step_file
        from ...serving.scheduling.policies import get_policy

        step_latency = None
        if predictor is not None:
            step_latency = load_step_file(predictor, on_warning=out.warn).steady
            warn_of_small_table(step_latency, predictor, max_batch_size, out.warn)
        patched = with_cache_of(list(settings.presets), patched, given_flags(context), target, out)
        served, place = target.load(out, patched)
        if step_latency is None and any(get_policy(each.policy).requires_predictor for each in settings.presets):
            from ...profiling.measure.latency import workspace_predictor
            from ...training.latency.predictor import PREDICTOR_FILE

            step_latency = workspace_predictor(served, place, on_warning=out.warn)
            predictor = place.find_predictor(PREDICTOR_FILE)
        from ...profiling.sweep.engine_side import EngineSide

        side = EngineSide(
            settings,
            served,
            place,
            predictor=step_latency,
            predictor_file=predictor,
            warm_up=WarmUp(warmup_requests, combinations),
            on_note=out.note,
        )
    from ...profiling.sweep.report import tables_of

    with out.phases() as start:
        # Runs on an engine last as long as their traces do.
        arrivals_s = [settings.trace.duration_s or (num_prompts or 0) / rate for rate in settings.rates]
        expected_s = sum(arrivals_s) * len(settings.systems) * num_seeds
        runs = cache(lambda: start("runs", settings.num_runs, expected_s=None if is_simulated else expected_s or None))
        outcome = sweep(
            settings,
            side,
            defaults,
            lambda: resume or place.new_run(RUN_KIND),
            on_run=lambda text: runs().show(text),
            on_done=lambda: runs()(),
        )
    out.data(outcome.result, table=lambda: to_rich(tables_of(outcome.result)), file=output_file)
    out.note(f"Report: {outcome.report}")
    if outcome.was_interrupted:
        out.note(f"The same command with --resume {outcome.run_dir} continues from here.")
        raise KeyboardInterrupt


def _check_side(context: typer.Context, on: str) -> None:
    """Raise UsageError if an option is given that has no effect there."""
    for sides, names in _ONLY_ON.items():
        misplaced = [name for name in given_flags(context) if name in names]
        if misplaced and on not in sides.split(" or "):
            raise UsageError(f"{misplaced[0]} belongs to --on {sides}, not {on}")
