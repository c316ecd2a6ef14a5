"""Quality against time of the patch cache and of its baselines, all in one run (`psctl bench cache`).

Every side serves the same requests from first to last step; sides take turns, batch by batch. Images are compared with
those of the same engine without the cache, and with their prompts.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Literal

from PIL.Image import Image

from ...data.errors import UsageError
from ...data.prompts.captions import load_prompts
from ...data.requests import Request
from ...data.run_facts import describe
from ...data.workspace import ModelWorkspace
from ...profiling.experiment.experiment import Experiment, PartialRow, Result
from ...profiling.experiment.rows import Row
from ...profiling.experiment.turns import turns
from ...profiling.report.grid import image_grid, to_png
from ...profiling.report.table import Table
from ...profiling.report.words import DASH, share
from ...profiling.steps.combinations import Combination
from ...serving.cache.options import CacheOptions
from ...serving.models.served import ServedModel
from ...serving.runs.machine import run_facts
from ..metrics.judges import Judges
from .plots import plot_quality, plot_saved
from .quality import QualityOptions, compare_sides, real_features
from .sides import CacheBenchSide, CacheSetting, make_side

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


def cache_experiment(
    model: ServedModel,
    combinations: Sequence[Combination],
    cached: Sequence[CacheSetting],
    workspace: ModelWorkspace,
    settings: CacheBenchSettings,
    quality: QualityOptions,
    judges: Judges,
    *,
    on_batch: Callable[[str], None] = lambda label: None,
) -> Experiment[Combination]:
    """Return the experiment that measures all settings beside the engine without a cache. Its cells are the batches;
    each row has a row for each side. Ctrl-C keeps the rounds that all sides have finished. Measurements raise RunError
    if a request failed.

    Args:
        model: the loaded model; its engine options apply to all sides.
        combinations: the batches, measured one after the other.
        cached: settings of the sides with a cache.
        workspace: workspace for strategies of convolutions.
        settings: extent of the benchmark.
        quality: metrics of the images.
        judges: networks that judge the images.
        on_batch: called with a description of each batch of each side before it.

    Raises:
        UsageError: a setting does not suit the model, or the real images are not available.
    """
    resolutions = sorted({size for each in combinations for size in each.resolutions})
    sides = [
        make_side(model, setting, workspace, resolutions)
        for setting in (CacheSetting("off", "off", CacheOptions()), *cached)
    ]
    real = real_features(judges, quality, resolutions, workspace.root.parent.parent)
    drawn: list[tuple[Image, str]] = []

    def measure(combination: Combination) -> Row:
        texts, was_cut = _serve_rounds(model, combination, sides, settings, on_batch)
        if not drawn:
            drawn.extend(
                (image, side.setting.label) for side in sides for image in side.images[: combination.num_requests]
            )
        rounds = len(sides[0].seconds)
        compared = compare_sides(sides, len(texts) // rounds, texts, judges, quality, real)
        row = combination.columns | {"rounds": rounds, "sides": compared}
        if was_cut:
            raise PartialRow(row)
        return row

    def sheet(result: Result) -> bytes:
        images = image_grid(*map(list, zip(*drawn, strict=True)), columns=combinations[0].num_requests, cell_px=128)
        return to_png(images, max(images.size))

    return Experiment(
        "bench",
        "cache",
        combinations,
        measure,
        run_facts(model).to_json()
        | {
            "settings": asdict(settings),
            "quality": asdict(quality),
            "clip_judge": judges.clip_name if quality.clip else None,
        },
        lambda result: [cache_table(result, row) for row in result["rows"]],
        {"cache": plot_quality, "cache-saved": plot_saved, "cache-images": sheet},
        products="Results, plots and images",
    )


def _serve_rounds(
    model: ServedModel,
    combination: Combination,
    sides: Sequence[CacheBenchSide],
    settings: CacheBenchSettings,
    on_batch: Callable[[str], None],
) -> tuple[list[str], bool]:
    """Serve all batches of a combination. Returns the prompts of the rounds that all sides have finished, and whether
    Ctrl-C ended them. Raises KeyboardInterrupt if there is no such round.
    """
    prompts, joins = load_prompts(), settings.join_steps(combination.num_requests)
    # Resolutions in turn, as often as the combination has them, and again for requests that follow.
    numbers = range(max(combination.counts))
    sizes = [size for number in numbers for size, count in combination.present.items() if number < count]
    requests = [
        [
            Request(
                index,
                prompts[(first + index) % len(prompts)],
                size,
                num_inference_steps=settings.num_inference_steps,
                guidance_scale=model.defaults.guidance_scale,
                seed=settings.seed + first + index,
            )
            for index, size in zip(range(len(joins)), cycle(sizes))
        ]
        for first in range(0, settings.rounds * len(joins), len(joins))
    ]
    for side in sides:
        side.reset()
    was_cut = False
    try:
        for number, side in turns(sides, settings.rounds):
            on_batch(f"{combination.label}, {side.setting.label}")
            side.serve(requests[max(number, 0)], joins, num_steps=_WARMUP_STEPS if number < 0 else None)
            if number < 0:
                side.reset()
    except KeyboardInterrupt:
        rounds = min(len(side.seconds) for side in sides)
        if not rounds:
            raise
        was_cut = True
        for side in sides:
            side.keep_rounds(rounds, len(joins))
    return [request.prompt for batch in requests[: len(sides[0].seconds)] for request in batch], was_cut


def cache_table(result: Result, row: Row) -> Table:
    """Return the sides of a row as a table for display."""
    qualities = {"SSIM": ("ssim", 3), "PSNR": ("psnr_db", 1), "LPIPS": ("lpips", 3), "CLIP": ("clip", 1)}
    qualities["FID"] = ("fid", 1)
    shown = {name: each for name, each in qualities.items() if any(each[0] in side for side in row["sides"])}

    def text(side: Row, key: str, digits: int) -> str:
        change = f" ({side['clip_change']['mean']:+.2f})" if key == "clip" else ""
        return DASH if side.get(key) is None else f"{side[key]:.{digits}f}{change}"

    return Table(
        f"{row['label']}, {result['settings']['num_inference_steps']} steps: {describe(result)}",
        ["cache", "per image", "speed-up", "saved", "efficiency", "overhead", *shown],
        [
            [
                side["label"],
                f"{side['image_ms']:.0f} ms",
                f"{side['speedup']:.2f}x",
                *(share(side.get(key), 0) for key in ("saved_computation", "efficiency", "cache_overhead_of_off")),
                *(text(side, *each) for each in shown.values()),
            ]
            for side in row["sides"]
        ],
        note="efficiency: time saved over computation saved; overhead: of a step without cache; quality against the "
        "same engine without cache",
    )
