"""Sides of `psctl bench cache`: ways of caching that serve the same batches in turn."""

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
from ...serving.cache.patch_cache import PatchCache
from ...serving.cache.rules import Predicted, ReuseRule
from ...serving.cache.stats import CacheStats
from ...serving.core.prepared import PreparedRequest
from ...serving.core.timing import synchronize
from ...serving.models.build import as_plain, with_engine
from ...serving.models.served import ServedModel
from ...serving.options import EngineName
from ...serving.patched.stepper import PatchedStepper


@dataclass(frozen=True, slots=True)
class CacheSetting:
    """One way of caching.

    Attributes:
        label: label in table and plot.
        kind: line of the plot to which the setting belongs.
        options: options of the cache.
        rule: reuse rule in place of the one that the options would load; None loads that one.
        engine: engine that serves; `plain` is same-resolution batches of diffusers, without a patch cache.
    """

    label: str
    kind: str
    options: CacheOptions
    rule: ReuseRule | None = None
    engine: EngineName = "patched"


@dataclass(slots=True)
class CacheBenchSide:
    """One setting, the model that serves it, and its measurements.

    Attributes:
        setting, model: the setting, and the model that serves it.
        seconds: seconds of all steps, by round.
        saved: share of the computation that the cache saved, by round; 0 without a cache.
        overhead_s: seconds that the cache took to decide and to store, by round.
        images: images of all rounds.
    """

    setting: CacheSetting
    model: ServedModel
    seconds: list[float] = field(default_factory=list)
    saved: list[float] = field(default_factory=list)
    overhead_s: list[float] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)

    @property
    def cache(self) -> PatchCache | None:
        stepper = self.model.stepper
        return stepper.model.cache if isinstance(stepper, PatchedStepper) else None

    def reset(self) -> None:
        """Discard all measurements and the content of the cache."""
        self.seconds, self.saved, self.overhead_s, self.images = [], [], [], []
        self.model.clear_cache()

    def keep_rounds(self, count: int, num_requests: int) -> None:
        """Discard the measurements after the first `count` rounds of `num_requests` requests."""
        for measured in (self.seconds, self.saved, self.overhead_s):
            del measured[count:]
        del self.images[count * num_requests :]

    def step(self, active: Sequence[PreparedRequest]) -> list[str]:
        """Take one step of all requests. Returns the reasons of failures, also if smaller batches then succeeded."""
        stepper = self.model.stepper
        failures = list(stepper.step(active).values())
        first = stepper.batch_failures.first if isinstance(stepper, PatchedStepper) else None
        return failures if first is None else [first, *failures]

    def serve(
        self, requests: Sequence[Request], joins: Sequence[int], *, num_steps: int | None = None
    ) -> list[PreparedRequest]:
        """Serve requests from first to last step, record the time of all steps, the cache's savings and the images, and
        return the prepared requests.

        Args:
            requests: requests in the order in which they join.
            joins: step before which each request joins the batch, ascending.
            num_steps: number of steps of a warm-up, which records nothing; None for all steps.

        Raises:
            RunError: a request failed.
        """
        model, before = self.model, self._cache_use()
        served = [model.prepare(request) for request in requests]
        active, waiting = [], list(zip(joins, served, strict=True))
        step, seconds = 0, 0.0
        while (active or waiting) and step != num_steps:
            while waiting and waiting[0][0] <= step:
                active.append(waiting.pop(0)[1])
            synchronize(model.device)
            started = time.perf_counter()
            failures = self.step(active)
            synchronize(model.device)
            seconds += time.perf_counter() - started
            if failures:
                raise RunError(failures[0])
            active = [prepared for prepared in active if not prepared.state.is_finished]
            step += 1
        if num_steps is None:
            patches, skipped, overhead_s = (after - own for own, after in zip(before, self._cache_use(), strict=True))
            self.images += [model.decode(prepared.latents) for prepared in served]
            self.saved.append(skipped / patches if patches else 0.0)
            self.overhead_s.append(overhead_s)
            # Last: a round that has its seconds is complete.
            self.seconds.append(seconds)
        return served

    def _cache_use(self) -> tuple[float, float, float]:
        """Return the numbers of patches and of reused patches, and seconds of overhead, since the cache was cleared."""
        stats = self.model.cache_stats or CacheStats()
        return stats.patches, stats.skipped, stats.overhead_s


def make_side(
    model: ServedModel, setting: CacheSetting, workspace: ModelWorkspace, resolutions: Sequence[Resolution]
) -> CacheBenchSide:
    """Return a side with its own engine, tuned for the resolutions.

    Raises:
        UsageError: the options do not suit the model.
    """
    if setting.engine == "plain":
        own = as_plain(model)
    else:
        cache = CacheOptions() if setting.rule is not None else setting.options
        own = with_engine(model, replace(model.options, cache=cache))
    if setting.rule is not None:
        assert isinstance(own.stepper, PatchedStepper), "only the patch engine has a cache that goes by a rule"
        own.stepper.model.use_cache(setting.options, setting.rule)
    own.tune(resolutions, workspace.tables)
    return CacheBenchSide(setting, own)


def settings_of(
    model: ServedModel,
    table: Path,
    base: CacheOptions,
    *,
    thresholds: Sequence[float],
    image_thresholds: Sequence[float],
    intervals: Sequence[int],
    sums: Sequence[float],
    schedules: Sequence[Path] = (),
    max_reuses: Sequence[int | None] = (None,),
    seed: int,
    max_rows: int = 300_000,
) -> list[CacheSetting]:
    """Return the settings of all sides of a run but the one without a cache.

    Args:
        model: the loaded model.
        table: block profile, on which a predictor is trained for each threshold.
        base: options that all sides share.
        thresholds, image_thresholds: thresholds of predictors that decide for each patch, and for whole batches.
        intervals: intervals of the fixed-interval sides.
        sums: thresholds of accumulated input changes.
        schedules: files of lists of computed steps.
        max_reuses: maximum reuses in a row of predictors, with a side for each; None for the predictor's own limit.
        seed: seed of the training.
        max_rows: number of rows of the profile to train on.

    Raises:
        UsageError: there is no profile, it is damaged or of another model, or a threshold leaves one class without
            rows.
    """
    base = replace(base, patch_size=model.block_facts(base.patch_size).patch_size)
    found = []
    if wanted := sorted({*thresholds, *image_thresholds}):
        from ...training.cache.fitting import FitSettings, fit_cache_predictor
        from ...training.cache.samples import load_samples

        facts, samples = load_samples(table, max_rows=max_rows, seed=seed)
        facts.check_fits(model.block_facts(base.patch_size), source=str(table))
        for threshold in wanted:
            predictor = fit_cache_predictor(samples, facts, FitSettings(threshold=threshold, seed=seed))
            for mode, given in (("patch", thresholds), ("image", image_thresholds)):
                for max_reuse in max_reuses if threshold in given else ():
                    # The rule is given, so the threshold in the options only labels the side.
                    options = replace(base, mode=mode, threshold=threshold, max_reuse=max_reuse)
                    label = f"{mode} {threshold:g}" + (f", {max_reuse} in a row" if len(max_reuses) > 1 else "")
                    found.append(CacheSetting(label, mode, options, Predicted(predictor, max_reuse)))
    # Only their own rule limits the reuses of the baselines.
    free = replace(base, max_reuse=1_000)
    for interval in intervals:
        options = replace(free, mode="interval", interval=interval, threshold=None)
        found.append(CacheSetting(f"interval {interval}", "interval", options))
    for total in sums:
        options = replace(free, mode="accumulated", threshold=total)
        found.append(CacheSetting(f"accumulated {total:g}", "accumulated", options))
    return [
        *found,
        *(CacheSetting(file.stem, "schedule", CacheOptions("schedule", schedule=file)) for file in schedules),
    ]
