"""Choice of a cache predictor's threshold and confidence by its images (`train-predictor cache --target-ssim`).

A forest learns about one block at one step. The effect of many such decisions on an image is measured: requests that
it was not trained on are drawn without a cache, and again with each candidate cut.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...data.errors import RunError, UsageError
from ...data.prompts.captions import load_prompts
from ...data.requests import Request
from ...data.tables.block_facts import BlockFacts
from ...data.workspace import ModelWorkspace
from ...serving.cache.options import CacheOptions
from ...serving.cache.rules import Predicted
from ...serving.models.served import ServedModel
from ...training.cache.fitting import FitSettings, fit_cache_predictor
from ...training.cache.predictor import CachePredictor
from ...training.cache.samples import BlockSamples
from ..metrics.bootstrap import bootstrap_mean
from .quality import similarity
from .sides import CacheBenchSide, CacheSetting, make_side

FIRST_SEED = 1 << 30
"""Seed of the first request, beyond those of profiles, which count up from the user's seed."""

_SHARES = (0.5, 0.65, 0.8)
"""Shares of a profile's whole-model rows that stay within the default thresholds."""
_BATCH_SIZE = 12
_HALVINGS = 4


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """Requirements on the images.

    Attributes:
        ssim: mean SSIM to the same engine without a cache that must be reached.
        num_prompts: number of requests that are drawn for each cut.
        thresholds: thresholds of the output for which predictors are trained, ascending; empty for three derived from
            the profile.

    Raises:
        UsageError: a value is not allowed.
    """

    ssim: float
    num_prompts: int = 24
    thresholds: Sequence[float] = ()

    def __post_init__(self) -> None:
        if not 0 < self.ssim < 1:
            raise UsageError(f"target-ssim is {self.ssim:g}, but it must be between 0 and 1")
        if self.num_prompts < 2:
            raise UsageError(f"target-prompts is {self.num_prompts}, but it must be 2 or more")

    @property
    def max_draws(self) -> int:
        """Maximum number of times that the requests are drawn."""
        return 1 + _HALVINGS * (len(self.thresholds) or len(_SHARES))


def train_to_target(
    model: ServedModel,
    samples: BlockSamples,
    facts: BlockFacts,
    fit: FitSettings,
    cache: CacheOptions,
    workspace: ModelWorkspace,
    target: TargetSettings,
    *,
    on_draw: Callable[[str], None] = lambda label: None,
) -> CachePredictor:
    """Train a predictor with the threshold and confidence that save most computation while images reach the target.

    For each threshold, bisection finds the lowest confidence that reaches the target, because the mean SSIM grows with
    the confidence. A threshold is abandoned once all its remaining candidates save less than the best so far.

    Args:
        model: the loaded model, whose steps, guidance scale and resolutions the requests use.
        samples, facts: rows of a profile of this model, and its facts.
        fit: training settings of predictors, except threshold and confidence.
        cache: options with the warm-up steps.
        workspace: workspace for strategies of convolutions.
        target: requirements on the images.
        on_draw: called with a description of the cut before the requests are drawn.

    Returns:
        The predictor. Its report also has `images`: the target, the mean SSIM with its interval, the saved share, the
        numbers of patches computed because the predictor refused reuse, or because the limit of reuses in a row had
        expired, and all cuts that were tried.

    Raises:
        RunError: no cut reaches the target, or a request failed.
        UsageError: the cache does not suit model or predictors.
    """
    requests = _requests(model, target.num_prompts)
    sizes = sorted({request.resolution for request in requests})

    def draw(setting: CacheSetting) -> CacheBenchSide:
        on_draw(setting.label)
        side = make_side(model, setting, workspace, sizes)
        for first in range(0, len(requests), _BATCH_SIZE):
            batch = requests[first : first + _BATCH_SIZE]
            side.serve(batch, [0] * len(batch))
        return side

    plain = draw(CacheSetting("without cache", "off", CacheOptions())).images
    tried: list[dict[str, Any]] = []
    best: dict[str, Any] | None = None
    of_model = samples.output_mse[samples.is_whole(facts)]
    usual = [float(f"{value:.2g}") for value in np.quantile(of_model, _SHARES)]
    for threshold in target.thresholds or usual:
        predictor = fit_cache_predictor(samples, facts, replace(fit, threshold=threshold))
        options = replace(cache, mode="patch", threshold=threshold, patch_size=facts.patch_size)
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            cut = replace(predictor, min_confidence=(low + high) / 2)
            label = f"threshold {threshold:g}, confidence {cut.min_confidence:g}"
            side = draw(CacheSetting(label, "patch", options, Predicted(cut)))
            row = _figures(cut, side, similarity(side.images, plain, None)["ssim"])
            tried.append(row)
            is_better = best is None or row["saved_computation"] > best["saved_computation"]
            if row["ssim"] >= target.ssim:
                high = cut.min_confidence
                best = row if is_better else best
            elif is_better:
                low = cut.min_confidence
            else:
                break
    if best is None:
        closest = max(tried, key=lambda row: row["ssim"])
        # Rounded down, so that a value just below the target does not appear to reach it.
        reached = math.floor(1e4 * closest["ssim"]) / 1e4
        raise RunError(
            f"no cut reaches SSIM {target.ssim:g}; the closest is {reached:.4f} with threshold "
            f"{closest['threshold']:g} and confidence {closest['min_confidence']:g}; give a lower --threshold"
        )
    chosen = {name: best[name] for name in ("threshold", "min_confidence")}
    trained = fit_cache_predictor(samples, facts, replace(fit, **chosen))
    measured = {
        "target_ssim": target.ssim,
        **best,
        "requests": len(requests),
        "num_inference_steps": requests[0].num_inference_steps,
        "max_reuse": trained.max_lag,
        "warmup_steps": cache.warmup_steps,
        "tried": tried,
    }
    return replace(trained, report={**trained.report, "images": measured})


def _figures(cut: CachePredictor, side: CacheBenchSide, ssim: np.ndarray) -> dict[str, Any]:
    assert side.cache is not None
    mean, stats = bootstrap_mean(ssim), side.cache.stats
    return {
        "threshold": cut.threshold,
        "min_confidence": cut.min_confidence,
        "ssim": mean.value,
        "ssim_interval": None if mean.interval is None else list(mean.interval),
        "saved_computation": stats.saved_share,
        "patches_refused": stats.refused,
        "patches_expired": stats.expired,
    }


def _requests(model: ServedModel, count: int) -> list[Request]:
    prompts, defaults = load_prompts(), model.defaults
    return [
        Request(
            number,
            prompts[number * len(prompts) // count % len(prompts)],
            defaults.resolutions[number % len(defaults.resolutions)],
            num_inference_steps=defaults.num_inference_steps,
            guidance_scale=defaults.guidance_scale,
            seed=FIRST_SEED + number,
        )
        for number in range(count)
    ]
