"""Quality against time of the patch cache and of its baselines, all in one run (`psctl bench cache`).

Every side serves the same batches of requests from first to last step; sides take turns, batch by batch. Images are
compared with those of the same engine without the cache, and with what they should show.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image

from ..data.block_facts import BlockFacts
from ..data.errors import RunError, UsageError
from ..data.prompts import load_prompts
from ..data.requests import Request
from ..data.workspace import ModelWorkspace
from ..profiling.combinations import Combination
from ..profiling.step_bench import synchronize
from ..serving.cache.options import CacheOptions
from ..serving.cache.patch_cache import CacheStats, PatchCache
from ..serving.cache.rules import Predicted, ReuseRule, facts_of
from ..serving.model import ServedModel
from ..serving.patched.stepper import PatchedStepper
from ..serving.stepper import build_stepper
from .bootstrap import mean_interval
from .clip import Clip
from .images import batches
from .lpips import Lpips
from .psnr import MAX_PSNR_DB, psnr
from .ssim import ssim


@dataclass(frozen=True, slots=True)
class Setting:
    """One way of caching.

    Attributes:
        label: shown in table and plot.
        kind: what belongs to one line of the plot.
        options: of the cache.
        rule: in the place of what the options would load; None to load it.
    """

    label: str
    kind: str
    options: CacheOptions
    rule: ReuseRule | None = None


@dataclass(frozen=True, slots=True)
class CacheBenchSettings:
    """How much is measured.

    Attributes:
        rounds: batches that every side serves; each has prompts and seeds of its own.
        num_inference_steps: of every request.
        seed: of the first request; the others count up.
    """

    rounds: int = 4
    num_inference_steps: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.num_inference_steps < 2:
            raise UsageError(
                f"{self.rounds} rounds of {self.num_inference_steps} steps were asked for, but 1 of 2 is the least"
            )


@dataclass(slots=True)
class Side:
    """One setting with what was measured of it."""

    setting: Setting
    stepper: PatchedStepper
    seconds: list[float] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)

    @property
    def cache(self) -> PatchCache | None:
        return self.stepper.model.cache


def trained_settings(
    table: Path, thresholds: Sequence[float], base: CacheOptions, facts: BlockFacts, *, seed: int, max_rows: int
) -> Iterator[tuple[float, Setting]]:
    """A setting with a predictor of its own for every threshold, trained on a block profile now.

    Raises:
        UsageError: there is no profile, it is damaged or of another model, or a threshold leaves one class without
            rows.
    """
    from ..training.cache_samples import load_samples
    from ..training.cache_training import FitSettings, fit_cache_predictor

    found, samples = load_samples(table, max_rows=max_rows, seed=seed)
    found.check_fits(facts, source=str(table))
    for threshold in thresholds:
        predictor = fit_cache_predictor(samples, found, FitSettings(threshold=threshold, seed=seed))
        # The threshold in the options is not looked at: the rule is given.
        options = replace(base, mode="patch", threshold=threshold)
        yield threshold, Setting(f"patch {threshold:g}", "patch", options, Predicted(predictor, base.max_reuse))


def baseline_settings(intervals: Sequence[int], sums: Sequence[float], base: CacheOptions) -> Iterator[Setting]:
    """Fixed intervals and accumulated changes; they may reuse as long as their own rule says."""
    free = replace(base, max_reuse=1_000)
    for interval in intervals:
        yield Setting(f"interval {interval}", "interval", replace(free, mode="interval", interval=interval))
    for total in sums:
        yield Setting(f"accumulated {total:g}", "accumulated", replace(free, mode="accumulated", threshold=total))


def run_cache_bench(
    model: ServedModel,
    combination: Combination,
    cached: Sequence[Setting],
    workspace: ModelWorkspace,
    settings: CacheBenchSettings,
    *,
    clip: Clip | None,
    lpips: Lpips | None,
    on_batch: Callable[[str], None] = lambda label: None,
) -> tuple[dict[str, Any], dict[str, list[Image]]]:
    """Measure all settings beside the engine without a cache.

    Args:
        model: the loaded model; its engine options hold for all sides.
        combination: the batch.
        cached: the sides.
        workspace: where strategies of convolutions are kept.
        settings: how much.
        clip: judges how well images fit their prompts; None to leave it out.
        lpips: measures how far images look apart; None to leave it out.
        on_batch: called before each batch of each side.

    Returns:
        The result, and the images of every side by its label.

    Raises:
        RunError: a request failed.
    """
    off = Setting("off", "off", CacheOptions())
    sides = [_side(model, setting, workspace, combination) for setting in (off, *cached)]
    prompts = load_prompts()
    texts: list[str] = []
    for number in range(-1, settings.rounds):
        requests = _requests(model, combination, prompts, settings, max(number, 0))
        texts += [request.prompt for request in requests] if number >= 0 else []
        # The first round warms up. Then each round begins with another side.
        for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
            on_batch(side.setting.label)
            seconds, images = _serve(model, side.stepper, requests, num_steps=3 if number < 0 else None)
            if number < 0:
                _forget(side)
                continue
            side.seconds.append(seconds)
            side.images += images
    rows = [_row(side, sides[0], combination.num_requests, texts, clip, lpips) for side in sides]
    return {"rows": rows, "settings": asdict(settings)}, {side.setting.label: side.images for side in sides}


def _side(model: ServedModel, setting: Setting, workspace: ModelWorkspace, combination: Combination) -> Side:
    options = replace(model.options, cache=CacheOptions() if setting.rule is not None else setting.options)
    stepper = build_stepper(model, options)
    assert isinstance(stepper, PatchedStepper)
    if setting.rule is not None:
        stepper.model.use_cache(setting.options, setting.rule)
    sizes = [model.family.latent_size(resolution) for resolution in combination.resolutions]
    stepper.tune(sizes, workspace.tables, fingerprint=model.fingerprint)
    return Side(setting, stepper)


def _forget(side: Side) -> None:
    if side.cache is not None:
        side.cache.forget()
        side.cache.stats = CacheStats()


def _requests(
    model: ServedModel, combination: Combination, prompts: Sequence[str], settings: CacheBenchSettings, number: int
) -> list[Request]:
    sizes = [
        resolution
        for resolution, count in zip(combination.resolutions, combination.counts, strict=True)
        for _ in range(count)
    ]
    first = number * len(sizes)
    return [
        Request(
            index,
            prompts[(first + index) % len(prompts)],
            resolution,
            num_inference_steps=settings.num_inference_steps,
            guidance_scale=model.defaults.guidance_scale,
            seed=settings.seed + first + index,
        )
        for index, resolution in enumerate(sizes)
    ]


def _serve(
    model: ServedModel, stepper: PatchedStepper, requests: Sequence[Request], *, num_steps: int | None
) -> tuple[float, list[Image]]:
    """Seconds of all denoising steps of a batch, and its images (none if it is not served to its end)."""
    active = [model.prepare(request) for request in requests]
    for prepared in active:
        stepper.prepare(prepared)
    synchronize(model.device)
    started = time.perf_counter()
    for _ in range(requests[0].num_inference_steps if num_steps is None else num_steps):
        failures = stepper.step(active)
        if failures or stepper.batch_failures:
            raise RunError((stepper.batch_failures or list(failures.values()))[0])
    synchronize(model.device)
    seconds = time.perf_counter() - started
    return seconds, [] if num_steps else [model.decode(prepared.latents) for prepared in active]


def _row(
    side: Side, off: Side, batch_size: int, texts: list[str], clip: Clip | None, lpips: Lpips | None
) -> dict[str, Any]:
    """Figures of a side; those of images are means over all."""
    ratios = [plain / own for plain, own in zip(off.seconds, side.seconds, strict=True)]
    row: dict[str, Any] = {
        "label": side.setting.label,
        "kind": side.setting.kind,
        "image_ms": float(np.median(side.seconds)) / batch_size * 1e3,
        "speedup": float(np.median(ratios)),
        "speedup_min": min(ratios),
        "speedup_max": max(ratios),
        "num_images": len(side.images),
    }
    stats = side.cache.stats if side.cache is not None else None
    if stats is not None:
        saved = stats.saved_share
        row |= stats.to_json() | {
            "efficiency": (1 - 1 / row["speedup"]) / saved if saved else None,
            "cache_overhead_share": stats.overhead_s / sum(side.seconds),
        }
        pairs = list(zip(side.images, off.images, strict=True))
        similar = [float(ssim(*(next(iter(batches([image], 1))) for image in pair))[0]) for pair in pairs]
        row |= {
            "psnr_db": float(np.mean([min(psnr(one, other), MAX_PSNR_DB) for one, other in pairs])),
            "ssim": float(np.mean(similar)),
            "ssim_min": min(similar),
        }
        if lpips is not None:
            apart = [float(lpips(*(next(iter(batches([image], 1))) for image in pair))[0]) for pair in pairs]
            row["lpips"] = float(np.mean(apart))
    if clip is not None:
        scores, plain = (_clip_scores(clip, images, texts) for images in (side.images, off.images))
        row["clip"] = float(scores.mean())
        interval = mean_interval(scores - plain, seed=0)
        low, high = (None, None) if interval is None else interval
        row["clip_change"] = {"mean": float((scores - plain).mean()), "low": low, "high": high}
    return row


def _clip_scores(clip: Clip, images: Sequence[Image], texts: Sequence[str]) -> np.ndarray:
    """100 max(cosine, 0) of every image and its prompt."""
    with torch.inference_mode():
        cosines = (clip.embed_images(images) * clip.embed_texts(texts)).sum(1)
    return 100 * cosines.clamp(min=0).double().cpu().numpy()


def settings_of(
    model: ServedModel,
    table: Path,
    base: CacheOptions,
    *,
    thresholds: Sequence[float],
    image_thresholds: Sequence[float],
    intervals: Sequence[int],
    sums: Sequence[float],
    seed: int,
    max_rows: int = 300_000,
) -> list[Setting]:
    """All sides of a run: trained predictors patch by patch and for whole batches, and the baselines.

    Raises:
        UsageError: as `trained_settings`.
    """
    facts, found = facts_of(model, base.patch_size), []
    wanted = sorted({*thresholds, *image_thresholds})
    for threshold, setting in trained_settings(table, wanted, base, facts, seed=seed, max_rows=max_rows):
        if threshold in thresholds:
            found.append(setting)
        if threshold in image_thresholds:
            options = replace(setting.options, mode="image")
            found.append(Setting(f"image {threshold:g}", "image", options, setting.rule))
    return [*found, *baseline_settings(intervals, sums, base)]
