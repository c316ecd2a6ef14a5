"""The server of `psctl serve --http`, and the drawing of `psctl batch run`, with the options that both share."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...data.errors import MissingExtraError
from ...data.files import require_places
from ...data.resolution import Resolution, parse, parse_list
from ...data.workspace import ModelWorkspace
from ...serving.core.progress import OnProgress, no_progress
from ..options.cascade import CascadePlan
from ..options.http import HttpFlags
from ..options.replicas import ReplicaFlags, RouterFlags
from ..options.target import Target
from ..output import Output
from .serve_cascade import find_cascade_launch

_DURATIONS_FILE = "start.json"
SloOf = Callable[[Resolution], float | None]
"""SLO in seconds of requests that set none, by resolution; None for resolutions without an `--slo`."""

if TYPE_CHECKING:
    from ...serving.fleet.book import LoadBook
    from ...serving.options import EngineOptions, TemplateOptions
    from ...serving.runs.http.engine import EngineRecipe
    from ...serving.runs.http.server import HttpSettings, ServerParts
    from ...serving.scheduling.systems import System
    from ...serving.server.start_up import StartUp


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """Plan of a server with one model.

    Attributes:
        system: system that serves, with the user's choice of engine and policy.
        sizes: sizes that are warmed up.
        slo_scale, fixed_s: SLOs of requests that name none, as in `HttpSettings`.
        max_batch_size: maximum number of requests in a batch of one engine.
        engine: options of the engine.
        templates: how edits record and read templates; None if they read none.
        web, replicas, routing: options of the server, of its replicas, and of the router that sends requests to them.
    """

    system: "System"
    sizes: Sequence[Resolution]
    slo_scale: float
    fixed_s: SloOf
    max_batch_size: int
    engine: "EngineOptions"
    templates: "TemplateOptions | None"
    web: HttpFlags
    replicas: ReplicaFlags
    routing: RouterFlags


def serve_http(plan: ServerPlan, target: Target, out: Output) -> None:
    """Serve until a signal arrives. Options are checked before the model is loaded.

    Raises:
        MissingExtraError: a package of the extra `http` or `ray` is missing.
        UsageError, RunError: as `make_server` and `serve_forever`.
    """
    replicas, book = plan.replicas, None
    if replicas.is_any:
        from ...serving.runs.http.routing import load_book

        book = load_book(_recipe(plan, target), plan.routing.router, plan.routing.edit_profile, on_note=out.note)

    def make(settings: "HttpSettings", start_up: "StartUp") -> "tuple[ServerParts, Path]":
        recipe, limits = _recipe(plan, target), settings.limits
        folder = recipe.workspace.root
        start_up.remember_in(folder / _DURATIONS_FILE)
        max_open = limits.max_queue + plan.max_batch_size
        parts = make_parts(
            recipe,
            settings,
            replicas,
            max_open,
            limits.request_timeout_s,
            target,
            out,
            book=book,
            on_progress=start_up,
        )
        if parts.engine is not None:
            out.note("Warming up ...")
        return parts, folder

    most = plan.max_batch_size * replicas.most
    slos = plan.slo_scale, plan.fixed_s
    parts, folder = _serve(make, plan.web, plan.sizes, slos, most, target, out)
    if parts.engine is not None:
        parts.engine.keep_correction(ModelWorkspace(folder), on_note=out.note)


def _recipe(plan: ServerPlan, target: Target) -> "EngineRecipe":
    recipe = recipe_of(plan.system, plan.sizes, plan.max_batch_size, plan.engine, target, templates=plan.templates)
    return replace(recipe, calibrate=plan.web.calibrate, calibrate_s=plan.web.calibrate_time)


def serve_cascade_http(plan: CascadePlan, web: HttpFlags, target: Target, out: Output) -> None:
    """Serve with a light and a heavy model until a signal arrives. Raises what `serve_http` raises."""
    from ...serving.runs.trace_settings import check_slo_scale, parse_slo

    check_slo_scale(plan.slo_scale)
    slos = plan.slo_scale, parse_slo(plan.trace.slo)
    served = find_cascade_launch(plan.cascade, plan.options, target)
    deployment = served.images.deployment(plan.options, plan.system, plan.num_workers, plan.slo_scale, plan.trace.seed)
    profiled = served.images.profile.legs
    if plan.trace.resolutions is None:
        sizes = [parse(name) for name in profiled["heavy"].sizes if name in profiled["light"].sizes]
    else:
        sizes = parse_list(plan.trace.resolutions)
        for leg in profiled.values():
            leg.require(list(map(str, sizes)))

    def make(settings: "HttpSettings", start_up: "StartUp") -> "tuple[ServerParts, Path]":
        from ...serving.runs.http.cascade import make_cascade_server

        parts = make_cascade_server(
            deployment,
            served.files,
            served.images.defaults,
            settings,
            sizes,
            on_note=out.note,
        )
        start_up.remember_in(served.place.root / _DURATIONS_FILE)
        out.note(f"Starting {plan.num_workers} workers with both models ...")
        return parts, served.place.root

    most = max(deployment.profile.legs["light"].batch_sizes) * plan.num_workers
    _serve(make, web, sizes, slos, most, target, out)


def _serve(
    make: "Callable[[HttpSettings, StartUp], tuple[ServerParts, Path]]",
    web: HttpFlags,
    sizes: Sequence[Resolution],
    slos: tuple[float, SloOf],
    max_at_once: int,
    target: Target,
    out: Output,
) -> "tuple[ServerParts, Path]":
    """Build the server's parts while its port answers, and serve.

    Returns the parts and the folder of the workspace. Raises what `serve_http` raises.
    """
    from ...serving.runs.http.server import HttpSettings

    try:
        from ...serving.server.batches.store import Batches
        from ...serving.server.run import Served, serve_forever
        from ...serving.server.start_up import StartUp
    except ImportError as error:
        raise MissingExtraError(error.name or "uvicorn", "http") from error

    address, traces = web.address(), web.traces()
    require_places(target.workspace)
    listening = address.listen()
    try:
        limits = web.limits(max(size.pixels for size in sizes), address.keys)
        names = tuple(web.served_model_name or ())
        slo_scale, fixed_s = slos
        settings = HttpSettings(slo_scale, limits, names, web.log(), traces, fixed_s=fixed_s)
        start_up = StartUp()
        made: list[tuple[ServerParts, Path]] = []

        def make_served() -> Served:
            parts, folder = make(settings, start_up)
            made.append((parts, folder))
            batches = Batches(folder / "batches", parts.front_end, max_at_once, address.keys)
            return Served(parts.front_end, parts.metrics, parts.live, batches)

        serving = serve_forever(
            make_served,
            limits,
            address,
            listening,
            start_up,
            on_ready=lambda url: out.note(f"Serving at {url}"),
        )
        asyncio.run(serving)
        return made[0]
    finally:
        listening.close()
        if traces is not None:
            traces.close()


def recipe_of(
    system: "System",
    sizes: Sequence[Resolution],
    max_batch_size: int,
    engine: "EngineOptions",
    target: Target,
    *,
    needs_standalone: bool = True,
    templates: "TemplateOptions | None" = None,
) -> "EngineRecipe":
    """Return the settings from which engines are built. Raises UsageError: there is no such model or device."""
    from ...serving.models.placement import resolve_device
    from ...serving.runs.http.engine import EngineRecipe

    cache = target.with_cache_file(engine.cache).from_anywhere()
    place = target.root.for_model(target.model, str(resolve_device(target.device)))
    # A replica may have another working folder, as for adapters.
    model = str(Path(target.model).absolute()) if Path(target.model).is_dir() else target.model
    return EngineRecipe(
        target.model,
        model,
        target.device,
        target.dtype,
        replace(engine, cache=cache, model=engine.model.from_anywhere()),
        type(place)(place.root.absolute()),
        system,
        tuple(sizes),
        max_batch_size,
        needs_standalone,
        templates,
    )


def make_parts(
    recipe: "EngineRecipe",
    settings: "HttpSettings",
    replicas: ReplicaFlags,
    max_open: int,
    drain_s: float,
    target: Target,
    out: Output,
    *,
    book: "LoadBook | None" = None,
    on_progress: OnProgress = no_progress,
) -> "ServerParts":
    """Return the server's parts: an engine in this process, or replicas. Raises what `make_server` raises."""
    from ...profiling.measure.for_serving import measure_latencies
    from ...serving.models.placement import resolve_device
    from ...serving.runs.http.server import make_server

    takes_gpu = resolve_device(recipe.device).type == "cuda"
    plan = replicas.plan(takes_gpu=takes_gpu, max_ongoing=max_open, drain_s=drain_s)
    if plan is None:
        return make_server(
            recipe,
            settings,
            measure_latencies,
            load=lambda: target.load(out, recipe.options)[0],
            on_progress=on_progress,
            on_note=out.note,
            on_warning=out.warn,
        )
    if not takes_gpu:
        recipe = replace(recipe, threads=1)
    return make_server(
        recipe,
        settings,
        measure_latencies,
        plan=plan,
        book=book,
        on_progress=on_progress,
        on_note=out.note,
        on_warning=out.warn,
    )
