"""`psctl bench slo`: SLO attainment of systems over the request rate, on the engine or in the simulator."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ...data.errors import UsageError
from ...data.files import require_places
from ...serving.options import EngineOptions
from ...serving.runs.trace_settings import DEFAULT_SLO_SCALE, TraceSettings
from ...serving.scheduling.systems import COMPARED_SYSTEMS, SYSTEMS
from ..flags import flag, given_flags
from ..options.common import CalibrationFile, Gpus, MaxBatchSize, OutputFile, Seed, SloScale, StageTimesRun, numbers_of
from ..options.groups import EDITS, ENGINE, TRACE
from ..options.system import with_cache_of
from ..options.target import Target
from ..output import Output

if TYPE_CHECKING:
    from ...data.workspace import ModelWorkspace
    from ...serving.models.served import ServedModel

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
        flag("--on", "Where to serve: on the engine, in the simulator, or on both, with the simulator's error."),
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
    num_seeds: Annotated[int, flag("--num-seeds", "Number of traces per rate, with seeds from --seed on.", min=1)] = 1,
    seed: Seed = 0,
    trace: Annotated[
        TraceSettings,
        TRACE.without("request_rate", "seed", "from_zero", "speed").using(
            edits=EDITS.without("strength"),
            trace=flag(
                "--trace",
                "Random arrivals, the mix of vllm-omni's Dataset C, or a recorded trace (azure, diffusiondb, gentd26, "
                "katz: --arrivals), anew for each rate.",
                metavar="poisson|gamma|diurnal|dataset-c|RECORDED",
            ),
            num_prompts=flag(
                "--num-prompts", "Number of requests per run. Default: 60 (simulator: 1000), or all with --duration."
            ),
        ),
    ],
    slo_scale: SloScale = DEFAULT_SLO_SCALE,
    max_batch_size: MaxBatchSize = 16,
    predictor: Annotated[
        Path | None,
        flag(
            "--predictor",
            "Predictor of step latencies, for policies that use slack. Default: the workspace's.",
            metavar="FILE",
            dir_okay=False,
        ),
    ] = None,
    warmup_requests: Annotated[int, flag("--warmup-requests", "Number of warm-up requests per engine.", min=1)] = 32,
    combinations: Annotated[
        int,
        flag(
            "--combinations",
            "Number of combinations in the latency tables that --on both measures if there are none.",
            min=6,
        ),
    ] = 60,
    latency: Annotated[
        Path | None,
        flag(
            "--latency",
            "Simulator: step latencies of the patch engine. Default: the workspace's table, else a bundled one.",
            metavar="FILE",
            dir_okay=False,
        ),
    ] = None,
    plain_latency: Annotated[
        Path | None,
        flag("--plain-latency", "Simulator: step latencies of the plain engine.", metavar="FILE", dir_okay=False),
    ] = None,
    calibration: CalibrationFile = None,
    stage_times: StageTimesRun = None,
    gpus: Gpus = 1,
    resume: Annotated[
        Path | None,
        flag(
            "--resume",
            "Continue this sweep. All options must be the same except for systems, rates and seeds.",
            metavar="DIR",
            file_okay=False,
        ),
    ] = None,
    output_file: OutputFile = None,
    patched: Annotated[EngineOptions, _PATCHED],
    target: Target,
    out: Output,
) -> None:
    """Compare the SLO attainment of systems on the same traces over a range of request rates.

    SLOs are multiples of the standalone latency on plain diffusers, and equal for all systems. Each run is saved as
    soon as it has finished: after Ctrl-C, the same command with --resume continues. A table, plots and an HTML report
    are written to the workspace.

    Examples:

        psctl bench slo --rates 1,2,3,4 --num-prompts 60
        psctl bench slo --cache patch --systems bucketed,patched-fcfs,patchedserve --rates 2,4,6 --num-seeds 3
        psctl bench slo --on both --systems bucketed,patched-fcfs,patchedserve --rates 1,2,3 --duration 20
        psctl bench slo --on both --systems patched-slack:slack,patched-slack:fair-fitting --rates 3,4
        psctl bench slo --on simulator --latency h200.csv --resolutions 512,768,1024 --rates 5,10,15,20 --gpus 4
        psctl bench slo --systems diffusers-fcfs,patched-slack --trace dataset-c --edits 0.3 --rates 1,2,3
        psctl bench slo --resume psctl-workspace/emoji-xl/cpu/runs/slo-20260131T094500Z --num-seeds 2
    """
    # Everything that can be wrong is looked at before torch is imported and the model loaded.
    from ...profiling.sweep.plan import SweepPlan
    from ...profiling.sweep.runner import WarmUp
    from ...profiling.sweep.settings import SweepSettings
    from ...profiling.sweep.simulator_side import SimulatorFiles
    from ...serving.models.loading import model_geometry

    _check_side(context, on)
    if trace.trace == "shape":
        raise UsageError("--trace shape has rates of its own, but bench slo asks for --rates: give another trace")
    trace = trace.with_length(_DEFAULT_NUM_PROMPTS[on])
    settings = SweepSettings(
        systems=tuple(name.strip() for name in systems.split(",") if name.strip()),
        rates=tuple(numbers_of("--rates", rates)),
        seeds=tuple(range(seed, seed + num_seeds)),
        engine="real" if on == "engine" else on,
        trace=trace,
        slo_scale=slo_scale,
        max_batch_size=max_batch_size,
        num_gpus=gpus,
        geometry=lambda: model_geometry(target.model),
    )
    warm_up = WarmUp(warmup_requests, combinations)
    files = SimulatorFiles(latency, plain_latency, calibration, stage_times)
    plan = SweepPlan(settings, target.model, target.root, files, predictor, warm_up, resume)
    defaults = plan.checked()
    require_places(target.workspace, file=output_file)
    if on == "simulator":
        schedule = target.schedule() if any(each.cache == "schedule" for each in settings.presets) else None
        sweep = plan.on_simulator(defaults, schedule, on_note=out.note, on_warning=out.warn)
    else:

        def load() -> "tuple[ServedModel, ModelWorkspace]":
            return target.load(out, with_cache_of(list(settings.presets), patched, given_flags(context), target, out))

        sweep = plan.on_engine(defaults, load, on_note=out.note, on_warning=out.warn)
    with out.phases() as start:
        runs = cache(lambda: start("runs", settings.num_runs))
        outcome = sweep.run(on_run=lambda text: runs().show(text), on_done=lambda: runs()())
    out.outcome(outcome, output_file)


def _check_side(context: typer.Context, on: str) -> None:
    """Raise UsageError if an option is given that has no effect there."""
    for sides, names in _ONLY_ON.items():
        misplaced = [name for name in given_flags(context) if name in names]
        if misplaced and on not in sides.split(" or "):
            raise UsageError(f"{misplaced[0]} belongs to --on {sides}, not {on}")
