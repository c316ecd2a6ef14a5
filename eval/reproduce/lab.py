"""Laboratory for the exhibits of a paper: the loaded model, with the profiles and predictors that exhibits need."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from ...data.files import write_json
from ...data.prompts.captions import load_prompts
from ...data.requests import Request
from ...data.resolution import Resolution
from ...data.run_facts import describe
from ...data.workspace import ModelWorkspace
from ...profiling.measure.blocks import TABLE_FILE, BlockProfileSettings, run_block_profile
from ...profiling.measure.latency import LatencySettings, profile_latency, workspace_predictor
from ...serving.cache.options import CACHE_PREDICTOR_FILE, CacheOptions
from ...serving.models.build import with_engine
from ...serving.models.loading import resolve_model
from ...serving.models.served import ServedModel
from ...serving.options import EngineOptions
from ...serving.runs.machine import run_facts
from ...serving.runs.standalone import standalone_latencies
from ...training.cache.fitting import FitSettings, fit_cache_predictor
from ...training.cache.samples import load_samples
from ...training.latency.fitting import fit_latency_predictor
from ...training.latency.predictor import PREDICTOR_FILE, LatencyPredictor
from ..cache.schedule import ScheduleSettings, search_schedule
from ..metrics.judges import Judges
from .scale import Scale

_TRAIN_ROWS = 300_000
_BOTH_CLASSES = 0.005
"""Minimum share of a profile on each side of a threshold for a predictor to learn from it."""


@dataclass(frozen=True, slots=True)
class Lab:
    """Model, workspace and callbacks of measurements.

    Attributes:
        model: model on the patch engine, without a cache.
        place: the model's part of the workspace. Missing predictors and tables are measured and kept there.
        root: root of the workspace, for samples of data sets and features.
        work: folder of unfinished exhibits, which continue from there.
        sizes: resolutions of the requests.
        seed: seed of all random choices.
        scale: extent of the profiles.
        judges: networks that judge images.
        start: called with the name and number of units of a phase; returns the function to call with units done.
        on_note, on_warning: called with notes on progress, and with warnings of possible inaccuracies.
    """

    model: ServedModel
    place: ModelWorkspace
    root: Path
    work: Path
    sizes: tuple[Resolution, ...]
    seed: int
    scale: Scale
    judges: Judges
    start: Callable[[str, int], Callable[[int], None]]
    on_note: Callable[[str], None]
    on_warning: Callable[[str], None]

    def circumstances(self) -> dict[str, Any]:
        """Return the circumstances of the results, as JSON."""
        facts = run_facts(self.model).to_json()
        return {**facts, "described": f"{describe(facts)}, {facts['date']}"}

    def folder(self, name: str, *decisive: Any) -> Path:
        """Return the folder that is kept for measurements with these settings, which are JSON."""
        settings = [self.model.name, self.model.fingerprint, list(map(str, self.sizes)), self.seed, *decisive]
        digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]
        path = self.work / f"{name}-{digest}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def block_profile(self) -> Path:
        """Return the block profile's table, which is measured if it is missing. Raises RunError."""
        folder = self.folder("blocks", asdict(self.scale))
        if (folder / TABLE_FILE).is_file():
            return folder / TABLE_FILE
        scale, recording = self.scale, CacheOptions("patch", threshold=0.0)
        settings = BlockProfileSettings(num_prompts=scale.profile_prompts, seed=self.seed)
        batches = -(-settings.num_prompts // settings.batch_size)
        done = self.start("steps of the block profile", batches * scale.num_steps)
        return run_block_profile(
            self._with(recording),
            load_prompts(),
            self.sizes,
            folder,
            settings,
            num_inference_steps=scale.num_steps,
            guidance_scale=self.model.defaults.guidance_scale,
            on_step=lambda: done(1),
        )

    def typical_change(self) -> float:
        """Return the median relative change of a block's output in a sample of the block profile."""
        facts, samples = load_samples(self.block_profile(), max_rows=_TRAIN_ROWS, seed=self.seed)
        return float(np.median(samples.output_mse[~samples.is_whole(facts)]))

    def cache(self) -> CacheOptions:
        """Return the options of the patch cache with the predictor of the workspace, or else of the model.

        If there is neither, a predictor is trained in the workspace. Its threshold is the default or, if nearly all
        samples are on one side of the default, the median change of the samples.
        """
        file = self.place.predictors / CACHE_PREDICTOR_FILE
        found = CacheOptions("patch").with_file_of(self.place.predictors, resolve_model(self.model.name))
        if found.predictor is not None and found.predictor.is_file():
            return found
        if not file.is_file():
            facts, samples = load_samples(self.block_profile(), max_rows=_TRAIN_ROWS, seed=self.seed)
            settings = FitSettings(seed=self.seed)
            within = float((samples.output_mse <= settings.threshold).mean())
            if not _BOTH_CLASSES < within < 1 - _BOTH_CLASSES:
                settings = FitSettings(threshold=float(np.median(samples.output_mse)), seed=self.seed)
            self.on_note(f"Training the cache predictor, threshold {settings.threshold:.3g}: {file}")
            fit_cache_predictor(samples, facts, settings).save(file)
        return CacheOptions("patch", predictor=file)

    def cached_model(self) -> ServedModel:
        """Return the same model with the patch cache."""
        return self._with(self.cache())

    def plain_model(self) -> ServedModel:
        """Return the same model on plain diffusers."""
        return with_engine(self.model, EngineOptions("plain"))

    def _with(self, cache: CacheOptions) -> ServedModel:
        model = with_engine(self.model, EngineOptions(cache=cache))
        model.tune(self.sizes, self.place.tables)
        return model

    def latency_predictor(self, max_batch_size: int) -> LatencyPredictor:
        """Return the workspace's predictor of step latencies; if there is none, one is profiled and trained.

        Raises:
            UsageError: the workspace's predictor is of another machine, model or engine.
            KeyboardInterrupt: on Ctrl-C; the next call continues the profile.
        """
        if self.place.find_predictor(PREDICTOR_FILE) is None:
            phases: list[Callable[[int], None]] = []

            def on_start(num_all: int, num_done: int) -> None:
                phases.append(self.start("visits of the latency profile", num_all - num_done))

            scale = self.scale
            settings = LatencySettings(self.sizes, scale.combinations, max_batch_size, scale.repeats, self.seed)
            outcome = profile_latency(
                self.model, settings, self.place, on_start=on_start, on_visit=lambda: phases[0](1)
            )
            finish(outcome.was_interrupted)
            facts = outcome.table.circumstances
            fitted = fit_latency_predictor(outcome.table.rows, seed=self.seed, circumstances=facts)
            fitted.save(self.place.predictors / PREDICTOR_FILE)
        return workspace_predictor(self.model, self.place, on_warning=self.on_warning)

    def require_schedule(self, num_steps: int) -> None:
        """Search the schedule of the cache for this number of steps, if neither workspace nor model has one.

        Raises RunError if no schedule is close enough to plain diffusers.
        """
        file = CacheOptions("schedule").with_file_of(self.place.predictors, resolve_model(self.model.name)).schedule
        assert file is not None
        if file.is_file():
            return
        settings = ScheduleSettings(num_steps=(num_steps,), num_prompts=self.scale.profile_prompts, seed=self.seed)
        on_draw = self.start("images at most, for the schedule of the cache", settings.num_draws)
        search_schedule(self.model, settings, on_draw=on_draw).save(file)

    def rates(
        self, lowest_load: float, highest_load: float, num_rates: int, max_batch_size: int, num_steps: int
    ) -> list[float]:
        """Return request rates in requests per second, in geometric progression. Chosen rates are kept, so that
        measurements can be continued.

        Args:
            lowest_load: lowest rate, as a share of the throughput of plain diffusers one by one, as DistriFusion
                serves: the paper's slowest baseline, so that all systems can hold the lowest rate.
            highest_load: highest rate, as a share of the throughput of denoising alone in full batches of all sizes on
                the patch engine, without the cache.
            num_rates: number of rates, 2 or more.
            max_batch_size: number of requests in a full batch.
            num_steps: number of steps of every request.
        """
        folder = self.folder("rates", lowest_load, highest_load, num_rates, max_batch_size, num_steps)
        file = folder / "rates.json"
        if not file.is_file():
            guidance_scale = self.model.defaults.guidance_scale
            alone = [
                Request(place, "", size, num_inference_steps=num_steps, guidance_scale=guidance_scale)
                for place, size in enumerate(self.sizes)
            ]
            plain = self.plain_model()
            plain.tune(self.sizes, self.place.tables)
            alone_s = standalone_latencies(plain, alone, self.place.tables, on_doubt=self.on_warning)
            batch = [self.sizes[index % len(self.sizes)] for index in range(max_batch_size)]
            step_s = self.latency_predictor(max_batch_size).step_latency_s(batch)
            lowest = lowest_load / fmean(alone_s.values())
            highest = highest_load * max_batch_size / (num_steps * step_s)
            write_json(file, [float(f"{rate:.2g}") for rate in np.geomspace(lowest, highest, num_rates)])
        return json.loads(file.read_text(encoding="utf-8"))


def finish(was_interrupted: bool) -> None:
    """Raise KeyboardInterrupt if Ctrl-C ended a benchmark, which keeps its results: its exhibit is not finished."""
    if was_interrupted:
        raise KeyboardInterrupt
