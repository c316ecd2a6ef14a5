"""The sides of `psctl bench cache`: ways of caching that serve the same batches in turn."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from PIL.Image import Image

from ...data.errors import RunError
from ...data.requests import Request
from ...data.resolution import Resolution
from ...data.workspace import ModelWorkspace
from ...serving.cache.options import CacheOptions
from ...serving.cache.patch_cache import CacheStats, PatchCache
from ...serving.cache.rules import Predicted, ReuseRule
from ...serving.core.timing import synchronize
from ...serving.models.build import build_stepper
from ...serving.models.served import ServedModel
from ...serving.patched.stepper import PatchedStepper


@dataclass(frozen=True, slots=True)
class Setting:
    """One way of caching.

    Attributes:
        label: shown in table and plot.
        kind: what belongs to one line of the plot.
        options: of the cache.
        rule: decides instead of the one that the options would load; None to load that.
    """

    label: str
    kind: str
    options: CacheOptions
    rule: ReuseRule | None = None


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

    def forget(self) -> None:
        """Begin anew: nothing measured, nothing in the cache."""
        self.seconds, self.images = [], []
        if self.cache is not None:
            self.cache.forget()
            self.cache.stats = CacheStats()

    def keep_rounds(self, count: int, batch_size: int) -> None:
        """Forget what was measured after so many rounds."""
        del self.seconds[count:]
        del self.images[count * batch_size :]

    def serve(self, model: ServedModel, requests: Sequence[Request], *, num_steps: int | None = None) -> None:
        """Serve a batch from first to last step, and note the time of its steps and its images.

        Args:
            model: the loaded model.
            requests: the batch; all have as many steps.
            num_steps: only so many, without images, for warming up; None for all.

        Raises:
            RunError: a request failed.
        """
        active = [model.prepare(request) for request in requests]
        for prepared in active:
            self.stepper.prepare(prepared)
        synchronize(model.device)
        started = time.perf_counter()
        for _ in range(requests[0].num_inference_steps if num_steps is None else num_steps):
            failures = self.stepper.step(active)
            if failures or self.stepper.batch_failures:
                raise RunError((self.stepper.batch_failures or list(failures.values()))[0])
        synchronize(model.device)
        seconds = time.perf_counter() - started
        if num_steps is None:
            images = [model.decode(prepared.latents) for prepared in active]
            self.seconds.append(seconds)
            self.images += images


def make_side(
    model: ServedModel, setting: Setting, workspace: ModelWorkspace, resolutions: Sequence[Resolution]
) -> Side:
    """A stepper of its own for a setting, tuned for the resolutions.

    Raises:
        UsageError: the options do not suit the model.
    """
    options = replace(model.options, cache=CacheOptions() if setting.rule is not None else setting.options)
    stepper = build_stepper(model.pipe, model.family, options, model.block_facts)
    assert isinstance(stepper, PatchedStepper)
    if setting.rule is not None:
        stepper.model.use_cache(setting.options, setting.rule)
    stepper.tune(model.tuning(resolutions, workspace.tables))
    return Side(setting, stepper)


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
    """All sides of a run, beside the one without a cache.

    Args:
        model: the loaded model.
        table: block profile that predictors are trained on now, one for each threshold.
        base: options that all sides share.
        thresholds, image_thresholds: of predictors that decide patch by patch, and for whole batches.
        intervals: of reuse at fixed intervals.
        sums: of accumulated input changes.
        seed: of the training.
        max_rows: of the profile that are trained on.

    Raises:
        UsageError: there is no profile, it is damaged or of another model, or a threshold leaves one class without
            rows.
    """
    found = []
    if wanted := sorted({*thresholds, *image_thresholds}):
        from ...training.cache.fitting import FitSettings, fit_cache_predictor
        from ...training.cache.samples import load_samples

        facts, samples = load_samples(table, max_rows=max_rows, seed=seed)
        facts.check_fits(model.block_facts(base.patch_size), source=str(table))
        for threshold in wanted:
            predictor = fit_cache_predictor(samples, facts, FitSettings(threshold=threshold, seed=seed))
            rule = Predicted(predictor, base.max_reuse)
            for mode, given in (("patch", thresholds), ("image", image_thresholds)):
                if threshold in given:
                    # The rule is given, so the threshold in the options only labels the side.
                    options = replace(base, mode=mode, threshold=threshold)
                    found.append(Setting(f"{mode} {threshold:g}", mode, options, rule))
    # The baselines may reuse for as long as their own rule says.
    free = replace(base, max_reuse=1_000)
    for interval in intervals:
        options = replace(free, mode="interval", interval=interval, threshold=None)
        found.append(Setting(f"interval {interval}", "interval", options))
    for total in sums:
        options = replace(free, mode="accumulated", threshold=total)
        found.append(Setting(f"accumulated {total:g}", "accumulated", options))
    return found
