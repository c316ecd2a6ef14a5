"""`psctl bench parallel`: times a denoising step on several ranks."""

from dataclasses import replace
from typing import Annotated

from ...data.files import require_places
from ...data.resolution import parse_list
from ...serving.options import EngineOptions
from ...serving.parallel.options import ParallelOptions
from ..flags import flag
from ..options.common import OutputFile, Resolutions, Seed
from ..options.groups import PARALLEL
from ..options.target import Target
from ..output import Output


def bench_parallel(
    *,
    num_ranks: Annotated[
        str,
        flag(
            "--parallel", "Number of ranks, in processes or virtual (whose times mean little).", metavar="N|virtual:N"
        ),
    ] = "2",
    ways: Annotated[
        str,
        flag(
            "--modes",
            "Modes to measure: cfg (half of the ranks for guidance), sync, displaced, naive.",
            metavar="NAME,...",
        ),
    ] = "cfg,sync,displaced",
    resolutions: Resolutions = None,
    batch_size: Annotated[
        int, flag("--batch-size", "Number of requests of one resolution in a batch.", min=1, max=64)
    ] = 1,
    repeats: Annotated[
        int, flag("--repeats", "Number of measurements per side; the result is their median.", min=1)
    ] = 15,
    warmup: Annotated[int, flag("--warmup", "Number of warm-up rounds.", min=1)] = 3,
    seed: Seed = 0,
    output_file: OutputFile = None,
    options: Annotated[ParallelOptions, PARALLEL.only("norms", "text")],
    target: Target,
    out: Output,
) -> None:
    """Time one denoising step on several ranks, on one rank, and in one process that has the whole machine.

    The sides take turns; guidance and sampler are included. Each rank has an equal share of the processors, also the
    single rank that speed-ups are relative to. "alone" is the computation of the first rank without communication. Each
    side is compared with plain diffusers in the same run. Results are written to the workspace. Ctrl-C keeps the sizes
    that are finished.

    Examples:

        psctl bench parallel --dtype float32 --resolutions 256,512
        psctl bench parallel --parallel 4 --modes sync,displaced --gn stale
        psctl bench parallel --model emoji-3 --parallel virtual:8 --repeats 3 --json
    """
    # Everything that can be wrong is looked at before torch is imported and the model loaded.
    from ...profiling.parallel.ways import parse_ways
    from ...profiling.steps.combinations import Combination

    sizes = target.defaults().resolutions if resolutions is None else parse_list(resolutions)
    options = replace(options, ranks=num_ranks)
    names = parse_ways(ways, options)
    require_places(target.workspace, file=output_file)

    served, place = target.load(out, EngineOptions("plain"))
    from ...profiling.parallel.bench import parallel_experiment
    from ...profiling.steps.lanes import BenchSettings

    chosen = [Combination(sizes, tuple(batch_size * (each == size) for each in sizes)) for size in sizes]
    with parallel_experiment(served, options, names, chosen, BenchSettings(repeats, warmup, seed)) as experiment:
        out.experiment(experiment, place, output_file)
