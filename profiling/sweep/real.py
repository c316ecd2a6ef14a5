"""Runs of a sweep on the real engines: both share one set of weights, which are loaded once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...data.requests import Request
from ...data.tables.latency import TABLE_PATTERN, LatencyTable, read_latencies
from ...data.workspace import ModelWorkspace
from ...serving.cache.options import CacheOptions
from ...serving.cache.patch_cache import CacheStats
from ...serving.engine.engine import Engine
from ...serving.engine.replay import replay
from ...serving.engine.run_result import RunResult
from ...serving.engine.stepper import EngineName, EngineOptions
from ...serving.models.served import ServedModel
from ...serving.patched.stepper import PatchedStepper
from ...serving.scheduling.policies import get_policy, require_predictor
from ...serving.scheduling.systems import System, get_system
from ...training.latency.online_correction import OnlineCorrection
from ..measure.latency import LatencySettings, latency_circumstances, profile_latency
from ..runs.outside_profile import predictions_outside
from ..runs.serve import engine_figures, what_was_learnt
from .sweep import Served

_WARMUP_SYSTEM: Mapping[EngineName, str] = {"plain": "bucketed", "patched": "patched-fcfs"}


def with_engine(model: ServedModel, options: EngineOptions) -> ServedModel:
    """The same loaded model, sharing its weights, served by another engine."""
    return ServedModel(
        model.pipe, name=model.name, fingerprint=model.fingerprint, defaults=model.defaults, options=options
    )


class RealRunner:
    """Serves the runs of a sweep on the wall clock. What a predictor learns stays known from run to run.

    Args:
        models: by engine; every policy's must be there. All are tuned.
        max_batch_size: of `Engine`.
        predictor: step latencies of the patch engine, for policies that look ahead.
    """

    def __init__(
        self,
        models: Mapping[EngineName, ServedModel],
        *,
        max_batch_size: int = 16,
        predictor: OnlineCorrection | None = None,
    ) -> None:
        self._models = models
        self._max_batch_size = max_batch_size
        self._predictor = predictor

    def check(self, policies: Sequence[str]) -> None:
        """Raise UsageError if a policy needs a predictor and there is none."""
        for policy in (get_policy(get_system(name).policy) for name in policies):
            if policy.requires_predictor:
                require_predictor(policy, self._predictor)

    def run(self, policy: str, requests: Sequence[Request], standalone_s: Callable[[Request], float]) -> Served:
        """See `slo_sweep.Runner`. Raises UsageError: the model cannot serve a request."""
        system = get_system(policy)
        name, needs_predictor = system.engine, get_policy(system.policy).requires_predictor
        predictor = self._predictor if needs_predictor else None
        before = predictions_outside(predictor)
        result = self._replay(system, requests, standalone_s, predictor)
        figures = engine_figures(result) | what_was_learnt(self._models[name], predictor, before)
        return Served(result.records, result.duration_s, figures, result.was_interrupted)

    def warm_up(
        self, name: EngineName, requests: Sequence[Request], standalone_s: Callable[[Request], float]
    ) -> RunResult:
        """Serve a trace that is not counted, in full batches of all resolutions; the predictor learns from it.

        Raises:
            KeyboardInterrupt: on Ctrl-C.
        """
        predictor = self._predictor if name == "patched" else None
        result = self._replay(get_system(_WARMUP_SYSTEM[name]), requests, standalone_s, predictor)
        if result.was_interrupted:
            raise KeyboardInterrupt
        return result

    def _replay(
        self,
        system: System,
        requests: Sequence[Request],
        standalone_s: Callable[[Request], float],
        predictor: OnlineCorrection | None,
    ) -> RunResult:
        model = self._models[system.engine]
        _forget(model)
        engine = Engine(model, get_policy(system.policy), predictor=predictor, max_batch_size=self._max_batch_size)
        alone_s = {request.request_id: standalone_s(request) for request in requests}
        adapted = [system.adapt(request) for request in requests]
        return replay(engine, adapted, standalone_s=lambda request: alone_s[request.request_id])


def _forget(model: ServedModel) -> None:
    """Let the cache's figures and the failures be those of one run."""
    if isinstance(model.stepper, PatchedStepper):
        model.stepper.batch_failures.clear()
        cache = model.stepper.model.cache
        if cache is not None:
            cache.forget()
            cache.stats = CacheStats()


def latency_table(
    model: ServedModel,
    workspace: ModelWorkspace,
    settings: LatencySettings,
    folder: Path,
    *,
    on_start: Callable[[int, int], None] | None = None,
    on_visit: Callable[[], None] | None = None,
) -> tuple[LatencyTable, Path]:
    """The latency table of a model's engine: the workspace's newest that fits and is whole, else measured now.

    Steps are profiled without the patch cache, which saves what depends on the requests; `calibration` scales them.

    Args:
        model: the loaded model.
        workspace: of the model.
        settings: what is measured, if it must be; a table of the workspace fits if it has all resolutions and
            batches as large.
        folder: where a table that is measured now is kept.
        on_start, on_visit: of `profile_latency`.

    Raises:
        KeyboardInterrupt: on Ctrl-C.
        UsageError, RunError, OSError: as `profile_latency`.
    """
    about = latency_circumstances(model)
    found = sorted((workspace.root / "tables").glob(TABLE_PATTERN), key=lambda path: path.stat().st_mtime_ns)
    for path in (*sorted(folder.glob(TABLE_PATTERN)), *reversed(found)):
        table = read_latencies(path)
        fits = table.circumstances is not None and table.circumstances.difference(about) is None
        largest = (table.settings or {}).get("max_batch_size", 0)
        covers = set(settings.resolutions) <= set(table.resolutions) and settings.max_batch_size <= largest
        if fits and covers and table.share_done == 1:
            return table, path
    if model.options.cache.is_on:
        model = with_engine(model, replace(model.options, cache=CacheOptions()))
    outcome = profile_latency(model, settings, workspace, folder=folder, on_start=on_start, on_visit=on_visit)
    if outcome.was_interrupted:
        raise KeyboardInterrupt
    return outcome.table, outcome.table_file
