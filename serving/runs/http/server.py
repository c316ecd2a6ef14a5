"""Assembly of the batch server: the backend that draws, and the front end around it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ....data.errors import MissingExtraError
from ....data.requests import Request
from ....data.resolution import Resolution
from ...core.progress import OnProgress, no_progress
from ...core.step_row import StepRow
from ...server.limits import Limits
from ..notes import Notify, ignore
from ..step_latencies import MeasureLatencies
from .engine import BuiltEngine, EngineRecipe, build_engine, build_for_replica

if TYPE_CHECKING:
    from ...fleet.book import LoadBook
    from ...fleet.deployment import ReplicaPlan
    from ...models.served import ServedModel
    from ...server.backend import Backend
    from ...server.front_end import FrontEnd
    from ...server.live import Live
    from ...server.metrics import Metrics
    from ...server.protocol import ModelFacts
    from ...server.request_log import RequestLog
    from ...server.traces import Traces


@dataclass(frozen=True, slots=True)
class ServerParts:
    """Parts of a server that has not begun to serve.

    Attributes:
        front_end: front end that answers requests.
        metrics, live: watchers of the front end.
        engine: engine in this process; None if replicas draw.
    """

    front_end: "FrontEnd"
    metrics: "Metrics"
    live: "Live"
    engine: BuiltEngine | None


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Settings of a server.

    Attributes:
        slo_scale: SLO of a request that names none, as a multiple of its standalone latency; None for no SLO.
        limits: limits beyond which requests are refused.
        aliases: other names of the model.
        log: log of requests; None if the server has no log, metrics or live view, as when it draws files of requests.
        traces: exports traces; None for none.
        fixed_s: returns the SLO in seconds of a resolution, which replaces the multiple; None where there is none.
    """

    slo_scale: float | None = None
    limits: Limits = field(default_factory=Limits)
    aliases: Sequence[str] = ()
    log: "RequestLog | None" = None
    traces: "Traces | None" = None
    fixed_s: Callable[[Resolution], float | None] = lambda _: None


def require_http() -> None:
    """Raise MissingExtraError if a package of the extra `http` is missing."""
    if find_spec("prometheus_client") is None:
        raise MissingExtraError("prometheus-client", "http")


def make_server(
    recipe: EngineRecipe,
    settings: HttpSettings,
    measure: MeasureLatencies,
    *,
    plan: "ReplicaPlan | None" = None,
    book: "LoadBook | None" = None,
    load: "Callable[[], ServedModel] | None" = None,
    on_progress: OnProgress = no_progress,
    on_note: Notify = ignore,
    on_warning: Notify = ignore,
) -> ServerParts:
    """Assemble a server. Nothing is served yet; replicas are warm.

    Args:
        recipe: recipe of the engine, or of each replica's engine.
        settings: settings of the server.
        measure: measures step latencies, as in `build_engine`; a function of a module if there are replicas.
        plan: plan of the replicas; None for an engine in this process.
        book: load book that chooses the replica of each request; None for the default router.
        load: loads the model of an engine in this process, in the thread that will draw.
        on_progress: called with the progress of each phase of the start.
        on_note: called with a line about each slow operation.
        on_warning: called with a line about possible inaccuracies.

    Raises:
        MissingExtraError: a package of the extra `http` or `ray` is missing.
        UsageError: the model cannot serve a size, or there is no room for the replicas.
        RunError: loading or a measurement fails.
    """
    require_http()
    backend: Backend
    engine = None
    if plan is None:
        from ...server.local import LocalBackend, engine_thread

        def build() -> BuiltEngine:
            on_progress("loading", 0, 0)
            model = load and load()
            return build_engine(
                recipe, measure, model=model, on_progress=on_progress, on_note=on_note, on_warning=on_warning
            )

        thread = engine_thread()
        engine = thread.submit(build).result()
        backend, facts = LocalBackend(engine.setup, thread=thread), engine.facts
    else:
        from ...fleet.backend import ReplicaBackend

        on_progress("starting replicas", 0, 0)
        on_note(f"Starting {plan.least} replicas ...")
        backend = ReplicaBackend(plan, partial(build_for_replica, recipe, measure), book=book)
        facts = backend.deploy()
    return assemble(facts.model, facts.alone.latency_s, backend, settings, engine)


def assemble(
    model: "ModelFacts",
    standalone_s: Callable[[Request], float | None],
    backend: "Backend",
    settings: HttpSettings,
    engine: BuiltEngine | None = None,
) -> ServerParts:
    """Assemble the front end around a backend.

    Args:
        model: facts of the model, which requests are checked against.
        standalone_s: returns the standalone latency of a request, for its SLO.
        backend: backend that draws.
        settings: settings of the server.
        engine: the backend's engine, if it is in this process.
    """
    from ...server.front_end import FrontEnd, Pricing
    from ...server.live import Live
    from ...server.metrics import Metrics

    pricing = Pricing(settings.slo_scale, standalone_s, settings.fixed_s)
    front_end = FrontEnd(replace(model, aliases=tuple(settings.aliases)), settings.limits, backend, pricing)
    metrics, live = Metrics(model.defaults.resolutions, backend), Live(front_end)
    if settings.log is not None:
        traces = settings.traces
        front_end.watchers += [metrics, live, settings.log, *([] if traces is None else [traces])]

        def on_row(row: StepRow) -> None:
            metrics.on_row(row)
            live.on_row(row)
            if traces is not None:
                traces.on_row(row)

        backend.on_row = on_row
        if traces is not None:
            traces.has_batches = lambda: len(backend.replicas) == 1
    if engine is not None:
        _follow(engine, metrics)
    return ServerParts(front_end, metrics, live, engine)


def _follow(engine: BuiltEngine, metrics: "Metrics") -> None:
    """Connect the gauges that read the engine itself."""
    metrics.batch_failures.set_function(lambda: engine.model.stepper.batch_failures.count)
    if (correction := engine.correction) is not None:
        metrics.predictor_scale.set_function(lambda: correction.scale)
    if (templates := engine.model.reuse.store) is not None:
        metrics.templates_recorded.set_function(lambda: templates.num_added)
    if (stats := engine.model.cache_stats) is not None:
        # The engine keeps the same object as long as it serves.
        metrics.cache_reused_share.set_function(lambda: stats.saved_share)
