"""Quality against time of the patch cache and of its baselines, all in one run (`psctl bench cache`).

Every side serves the same requests from first to last step; sides take turns, batch by batch. Images are compared with
those of the same engine without the cache, and with their prompts.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Any, Literal

from PIL.Image import Image

from ...data.errors import UsageError
from ...data.files import atomic_write, write_bytes
from ...data.prompts.captions import load_prompts
from ...data.requests import Request
from ...data.workspace import ModelWorkspace
from ...profiling.report.grid import image_grid
from ...profiling.steps.combinations import Combination
from ...profiling.steps.rows import BenchOutcome, measure_rows, name_of
from ...serving.cache.options import CacheOptions
from ...serving.models.served import ServedModel
from ...serving.runs.machine import run_facts
from ..metrics.judges import Judges
from .plots import plot_quality, plot_saved
from .quality import QualityOptions, compare_sides, real_features
from .sides import CacheBenchSide, CacheSetting, make_side

RESULT_FILE, QUALITY_PLOT, SAVED_PLOT, IMAGES_FILE = "cache.json", "cache.png", "cache-saved.png", "cache-images.png"
_WARMUP_STEPS = 3
Arrivals = Literal["together", "staggered"]


@dataclass(frozen=True, slots=True)
class CacheBenchSettings:
    """Extent of a cache benchmark.

    Attributes:
        rounds: number of batches that every side serves; each has its own prompts and seeds.
        num_inference_steps: number of steps of every request.
        arrivals: `together` if a batch begins and ends as one; `staggered` if requests join and leave one by one at
            equal distances, as in serving, followed by as many again, so that the batch is full for half of the time.
        seed: seed of the first request; the others count up.
    """

    rounds: int = 4
    num_inference_steps: int = 50
    arrivals: Arrivals = "together"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.num_inference_steps < 2:
            raise UsageError(
                f"{self.rounds} rounds of {self.num_inference_steps} steps were asked for, but must be at least 1 of 2"
            )

    def join_steps(self, batch_size: int) -> list[int]:
        """Return the step before which each request of a round joins, ascending, for batches of `batch_size`."""
        if self.arrivals == "together":
            return [0] * batch_size
        return [place * self.num_inference_steps // batch_size for place in range(2 * batch_size)]


def run_cache_bench(
    model: ServedModel,
    combinations: Sequence[Combination],
    cached: Sequence[CacheSetting],
    workspace: ModelWorkspace,
    settings: CacheBenchSettings,
    quality: QualityOptions,
    judges: Judges,
    *,
    on_batch: Callable[[str], None] = lambda label: None,
) -> BenchOutcome:
    """Measure all settings beside the engine without a cache. Writes result, plots and images to a new run.

    Args:
        model: the loaded model; its engine options apply to all sides.
        combinations: the batches, measured one after the other.
        cached: settings of the sides with a cache.
        workspace: workspace for strategies of convolutions and for the run.
        settings: extent of the benchmark.
        quality: metrics of the images.
        judges: networks that judge the images.
        on_batch: called with a description of each batch of each side before it.

    Returns:
        The result: a row for each combination, with a row for each side in it. After Ctrl-C it holds the rounds that
        all sides had finished.

    Raises:
        RunError: a request failed.
        UsageError: a setting does not suit the model, or the real images are not available.
        KeyboardInterrupt: on Ctrl-C before the first round is finished.
    """
    resolutions = sorted({size for each in combinations for size in each.resolutions})
    sides = [
        make_side(model, setting, workspace, resolutions)
        for setting in (CacheSetting("off", "off", CacheOptions()), *cached)
    ]
    real = real_features(judges, quality, resolutions, workspace.root.parent.parent)
    run_dir = workspace.new_run("bench")
    drawn: list[tuple[Image, str]] = []
    was_cut = False

    def measure(combination: Combination) -> dict[str, Any]:
        nonlocal was_cut
        rounds, was_cut, texts = _serve_rounds(model, combination, sides, settings, on_batch)
        if not drawn:
            drawn.extend(
                (image, side.setting.label) for side in sides for image in side.images[: combination.num_requests]
            )
        compared = compare_sides(sides, len(texts) // rounds, texts, judges, quality, real)
        return name_of(combination) | {"rounds": rounds, "sides": compared}

    def stop_if_cut() -> None:
        if was_cut:
            raise KeyboardInterrupt

    head = run_facts(model).to_json() | {
        "settings": asdict(settings),
        "quality": asdict(quality),
        "clip_judge": judges.clip_name if quality.clip else None,
        "run_dir": str(run_dir),
    }
    result = measure_rows(
        combinations, measure, run_dir / RESULT_FILE, lambda rows: head, on_start=None, on_row=stop_if_cut
    )
    write_bytes(run_dir / QUALITY_PLOT, plot_quality(result))
    write_bytes(run_dir / SAVED_PLOT, plot_saved(result))
    sheet = image_grid(*map(list, zip(*drawn, strict=True)), columns=combinations[0].num_requests, cell_px=128)
    with atomic_write(run_dir / IMAGES_FILE) as temporary:
        sheet.save(temporary, "png")
    return BenchOutcome(result, run_dir)


def _serve_rounds(
    model: ServedModel,
    combination: Combination,
    sides: Sequence[CacheBenchSide],
    settings: CacheBenchSettings,
    on_batch: Callable[[str], None],
) -> tuple[int, bool, list[str]]:
    """Serve all batches of a combination. Returns the number of rounds that all sides have finished, whether Ctrl-C
    ended them, and the prompts.
    """
    prompts, texts, rounds = load_prompts(), [], 0
    joins = settings.join_steps(combination.num_requests)
    for side in sides:
        side.reset()
    try:
        for number in range(-1, settings.rounds):
            requests = _requests(model, combination, prompts, settings, max(number, 0), len(joins))
            # The first round warms up. Then each round begins with another side.
            first = number % len(sides)
            for side in (*sides[first:], *sides[:first]):
                on_batch(f"{combination.label}, {side.setting.label}")
                side.serve(requests, joins, num_steps=_WARMUP_STEPS if number < 0 else None)
                if number < 0:
                    side.reset()
            if number >= 0:
                texts += [request.prompt for request in requests]
                rounds += 1
    except KeyboardInterrupt:
        if not rounds:
            raise
        for side in sides:
            side.keep_rounds(rounds, len(joins))
        return rounds, True, texts
    return rounds, False, texts


def _requests(
    model: ServedModel,
    combination: Combination,
    prompts: Sequence[str],
    settings: CacheBenchSettings,
    number: int,
    count: int,
) -> list[Request]:
    """Return `count` requests of a round: those of the combination, repeated as needed, with resolutions in turn."""
    counts = list(zip(combination.resolutions, combination.counts, strict=True))
    sizes = [resolution for turn in range(max(combination.counts)) for resolution, of_it in counts if turn < of_it]
    first = number * count
    return [
        Request(
            index,
            prompts[(first + index) % len(prompts)],
            resolution,
            num_inference_steps=settings.num_inference_steps,
            guidance_scale=model.defaults.guidance_scale,
            seed=settings.seed + first + index,
        )
        for index, resolution in zip(range(count), cycle(sizes))
    ]
