"""`psctl bench cache`: time that the patch cache saves, and its cost in quality."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from ...data.errors import UsageError
from ...data.files import require_places
from ...data.resolution import parse_list
from ...serving.cache.options import CacheOptions
from ...serving.options import EngineOptions
from ..flags import flag
from ..options.common import OutputFile, Resolutions, Seed, numbers_of
from ..options.groups import CACHE, ENGINE
from ..options.target import Target
from ..output import Output


def bench_cache(
    *,
    resolutions: Resolutions = None,
    combinations: Annotated[
        str | None,
        flag(
            "--combinations",
            "Batches: number of requests of each resolution. Default: 2 of each.",
            metavar="N,N,...;...",
        ),
    ] = None,
    thresholds: Annotated[
        str, flag("--thresholds", "Thresholds of predictors that decide for each request.", metavar="X,...")
    ] = "0.003,0.01,0.03,0.1,0.3",
    image_thresholds: Annotated[
        str, flag("--image-thresholds", "Thresholds of predictors with --cache image.", metavar="X,...")
    ] = "0.03,0.1,0.3",
    trained: Annotated[
        bool,
        flag(
            "--trained",
            "Also measure the predictor and the schedule that serving uses: the workspace's or the model's.",
        ),
    ] = False,
    intervals: Annotated[
        str, flag("--intervals", "Intervals of the fixed-interval baseline.", metavar="N,...")
    ] = "2,3,4",
    sums: Annotated[
        str, flag("--sums", "Limits of the sum of input changes, for the accumulated baseline.", metavar="X,...")
    ] = "0.1,0.2,0.3,0.4",
    schedules: Annotated[
        str,
        flag(
            "--schedules",
            "Schedules by psctl train-predictor schedule. With --trained: also the one that serving uses.",
            metavar="FILE,...",
        ),
    ] = "",
    max_reuse: Annotated[
        str | None,
        flag(
            "--max-reuse",
            "Maximum number of consecutive steps for which predictors may reuse a block. Default: --max-lag of the "
            "profile.",
            is_shared=True,
            metavar="N,...",
        ),
    ] = None,
    num_inference_steps: Annotated[
        int, flag("--num-inference-steps", "Number of denoising steps of every request.", min=2)
    ] = 50,
    arrivals: Annotated[
        Literal["together", "staggered"],
        flag(
            "--arrivals", "Batches whose requests start and end together, or requests that join and leave one by one."
        ),
    ] = "together",
    rounds: Annotated[int, flag("--rounds", "Number of batches that each side serves.", min=1)] = 4,
    table: Annotated[
        Path | None, flag("--table", "Block profile to train on. Default: the workspace's.", dir_okay=False)
    ] = None,
    clip: Annotated[str, flag("--clip", "CLIP model that scores the images; none skips the score.")] = "emoji-clip",
    with_lpips: Annotated[bool, flag("--lpips", "Also measure LPIPS; its weights must be installed.")] = False,
    fid: Annotated[
        str | None,
        flag(
            "--fid", "Also measure FID against this data set, given as for --dataset of psctl eval.", metavar="DATASET"
        ),
    ] = None,
    num_real: Annotated[int, flag("--num-real", "Number of real images for FID.", min=2)] = 256,
    output_file: OutputFile = None,
    cache: Annotated[CacheOptions, CACHE.only("patch_size", "warmup_steps").fixing(mode="patch", threshold=0.0)],
    seed: Seed = 0,
    engine: Annotated[EngineOptions, ENGINE.only("order")],
    target: Target,
    out: Output,
) -> None:
    """Compare the patch cache, cache schedules and three baselines in image quality and time.

    One predictor per threshold is trained on the workspace's block profile. All sides serve the same batches, and their
    images are compared with those of the same engine without a cache. A table, plots and an image grid are written to
    the workspace. Ctrl-C keeps the rounds that all sides have finished.

    Examples:

        psctl profile blocks && psctl bench cache
        psctl bench cache --combinations "2,2,2;6,0,0;0,6,0;0,0,6" --intervals "" --sums ""
        psctl bench cache --arrivals staggered --combinations 4,4,4
        psctl bench cache --thresholds 0.1 --max-reuse 4,6,8 --image-thresholds "" --intervals "" --sums ""
        psctl bench cache --trained --thresholds "" --image-thresholds "" --intervals 2,3 --sums ""
        psctl bench cache --schedules fast.json,near.json --thresholds "" --image-thresholds "" --num-inference-steps 30
        psctl bench cache --model emoji-3 --rounds 8 --lpips --fid emoji --json --output-file cache.json
    """

    from ...profiling.steps.combinations import Combination, parse_combinations

    sizes = target.defaults().resolutions if resolutions is None else parse_list(resolutions)
    batches: tuple[Combination, ...] = (Combination(sizes, (2,) * len(sizes)),)
    if combinations is not None:
        batches = parse_combinations(combinations, sizes)
    patch_limits = numbers_of("--thresholds", thresholds)
    image_limits = numbers_of("--image-thresholds", image_thresholds)
    steps_between = [int(number) for number in numbers_of("--intervals", intervals)]
    sum_limits = numbers_of("--sums", sums)
    in_a_row = [int(number) for number in numbers_of("--max-reuse", max_reuse or "")]
    if max_reuse is not None and (not in_a_row or min(in_a_row) < 1):
        raise UsageError(f"--max-reuse is {max_reuse!r}, but it must be numbers from 1 with commas between")
    files = [Path(name.strip()) for name in schedules.split(",") if name.strip()]
    if not (patch_limits or image_limits or steps_between or sum_limits or files or trained):
        raise UsageError(
            "there is nothing to measure: give --thresholds, --image-thresholds, --intervals, --sums, --schedules or "
            "--trained"
        )
    require_places(target.workspace, file=output_file)
    served, place = target.load(out, engine)
    from ...eval.cache.bench import CacheBenchSettings, cache_experiment
    from ...eval.cache.quality import QualityOptions
    from ...eval.cache.sides import CacheSetting, settings_of
    from ...eval.metrics.clip import DEFAULT_CLIP
    from ...eval.metrics.judges import Judges

    settings = CacheBenchSettings(rounds, num_inference_steps, arrivals, seed)
    quality = QualityOptions(clip != "none", with_lpips, fid, num_real, seed)
    judges = Judges(DEFAULT_CLIP if clip == "none" else clip, device=served.device)
    quality.check(judges)
    profile = place.root / "tables" / "blocks.parquet" if table is None else table
    with out.status("Training predictors ..."):
        cached = settings_of(
            served,
            profile,
            cache,
            thresholds=patch_limits,
            image_thresholds=image_limits,
            intervals=steps_between,
            sums=sum_limits,
            schedules=files,
            max_reuses=in_a_row or [None],
            seed=seed,
        )
    if trained:
        options = target.with_cache_file(replace(cache, mode="patch", threshold=None))
        of_each = [
            CacheSetting(
                f"trained, {most} in a row" if in_a_row else "trained", "patch", replace(options, max_reuse=most)
            )
            for most in in_a_row or [None]
        ]
        scheduled = target.with_cache_file(CacheOptions("schedule"))
        if scheduled.schedule is not None and scheduled.schedule.is_file():
            of_each.append(CacheSetting("schedule", "schedule", scheduled))
        cached = [*of_each, *cached]
    with out.phases() as start:
        advance = start("batches", len(batches) * (len(cached) + 1) * (rounds + 1))

        def on_batch(label: str) -> None:
            advance.show(label)
            advance()

        done = cache_experiment(served, batches, cached, place, settings, quality, judges, on_batch=on_batch).run(place)
    out.outcome(done, output_file)
