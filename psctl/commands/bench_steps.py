"""`psctl bench steps`: times a denoising step, and breaks the time down by part."""

from dataclasses import replace
from typing import Annotated

from ...data.errors import UsageError
from ...data.files import require_places
from ...data.models.published import PUBLISHED
from ...data.resolution import parse_list
from ...profiling.steps.cards import CARDS, card_of
from ...serving.conflicts import refuse_conflicts
from ..flags import flag
from ..options.common import OutputFile, Resolutions, Seed
from ..options.groups import PatchFlags
from ..options.target import Target
from ..output import Output


def bench_steps(
    *,
    resolutions: Resolutions = None,
    combinations: Annotated[
        str | None,
        flag(
            "--combinations",
            'Combinations: number of requests of each resolution, such as "1,1,1;2,2,2". Default: about 20 of all '
            "kinds.",
            metavar="N,N,...;...",
        ),
    ] = None,
    random: Annotated[
        int | None, flag("--random", "Measure this number of random combinations of up to 16 requests.", min=1)
    ] = None,
    breakdown: Annotated[
        bool, flag("--breakdown", "Break the time of a step down by part. Default: only for two requests of each size.")
    ] = False,
    predict: Annotated[
        str | None,
        flag(
            "--predict",
            "Predict the times on this GPU in 16 bits instead of measuring them; needs neither the GPU nor weights. "
            f"One of {', '.join(CARDS)}.",
            metavar="GPU",
        ),
    ] = None,
    repeats: Annotated[
        int, flag("--repeats", "Number of measurements per side; the result is their median.", min=1)
    ] = 15,
    warmup: Annotated[int, flag("--warmup", "Number of warm-up rounds.", min=1)] = 3,
    seed: Seed = 0,
    output_file: OutputFile = None,
    patched: PatchFlags,
    target: Target,
    out: Output,
) -> None:
    """Time one denoising step of mixed batches, on the patch engine and on plain diffusers.

    Plain diffusers serves the same requests one by one, and in batches of one resolution. Each side runs eagerly; on a
    GPU also with CUDA graphs, and with --compile also with compiled blocks. The fastest patched side is compared with
    the fastest plain one. The sides take turns; guidance and sampler are included. A result file and a plot are written
    to the workspace. Ctrl-C ends the run early and keeps finished measurements.

    With --predict, --model may also be sdxl or sd3-medium, whose published configurations are known. Times are
    predicted for U-Nets and Stable Diffusion 3; predictions for other GPUs than an H200 have not been compared with
    measurements.

    Examples:

        psctl bench steps
        psctl bench steps --resolutions 128,256 --combinations "1,1;4,4;8,1" --repeats 30
        psctl bench steps --model emoji-3 --compile --combinations "1,1,1;4,4,4"
        psctl bench steps --model stabilityai/stable-diffusion-xl-base-1.0 --device cuda --random 50 --json
        psctl bench steps --breakdown --combinations "1,1,1;4,4,4"
        psctl bench steps --predict h100 --model sdxl --resolutions 512,768,1024 --combinations "1,1,1;4,4,4"
    """
    # Everything that can be wrong is looked at before torch is imported and the model loaded.
    from ...profiling.steps.combinations import (
        Combination,
        default_combinations,
        parse_combinations,
        random_combinations,
    )
    from ...profiling.steps.model_config import read_config

    if predict is not None and breakdown:
        raise UsageError("--predict does not work with --breakdown: it predicts whole steps")
    if predict is not None and target.base in PUBLISHED and resolutions is None:
        raise UsageError(f"--predict with --model {target.base} needs --resolutions, such as 512,768,1024")
    if breakdown:
        refuse_conflicts(patched.features | {"--breakdown": "--breakdown"})
    sizes = target.defaults().resolutions if resolutions is None else parse_list(resolutions)
    if combinations is not None and random is not None:
        raise UsageError("--combinations and --random both say what to measure; give one of them")
    if combinations is not None:
        chosen = parse_combinations(combinations, sizes)
    elif random is not None:
        chosen = random_combinations(sizes, random, seed)
    else:
        chosen = (Combination(sizes, (2,) * len(sizes)),) if breakdown else default_combinations(sizes)
    if predict is not None:
        require_places(file=output_file)
        card, config = card_of(predict), read_config(target.base, "--model")
        from ...profiling.steps.predict import predicted, prediction_table

        with out.phases() as start:
            found = predicted(target.base, config, card, chosen, start("combinations", len(chosen)))
        out.data(found, table=lambda: prediction_table(found).to_rich(), file=output_file)
        return
    require_places(target.workspace, file=output_file)

    served, place = target.load(out, replace(patched, compile=False, cuda_graphs=False))
    from ...profiling.steps.bench import STEPS, step_experiment
    from ...profiling.steps.breakdown import BREAKDOWN
    from ...profiling.steps.lanes import BenchSettings
    from ...profiling.steps.sides import EAGER, efforts_of

    is_recorded = served.device.type == "cuda" if patched.cuda_graphs is None else patched.cuda_graphs
    efforts = (EAGER,) if breakdown else efforts_of(compiled=patched.compile, recorded=is_recorded)
    kind, settings = BREAKDOWN if breakdown else STEPS, BenchSettings(repeats, warmup, seed)
    out.experiment(step_experiment(kind, served, chosen, place, settings, efforts=efforts), place, output_file)
