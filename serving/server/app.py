"""Routes of the HTTP API. `guards`, `json_body` and `protocol` read and check the bodies. No torch."""

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from ...data.files import is_disk_full
from .backend import Health
from .batches.api import batch_routes
from .batches.store import Batches
from .edit_processes import EditProcesses
from .edits import EDITS, read_edit
from .errors import ApiError, cancelled
from .fields import MAX_IMAGES, check_model, generation_fields
from .front_end import FrontEnd
from .guards import Result, caller_of, disconnect, unless
from .images import base64_of
from .json_body import read_object
from .live import Live
from .metrics import CONTENT_TYPE, Metrics
from .openapi import body_of, edit_bodies, errors
from .page import page_response
from .protocol import GENERATIONS, Generation, parse_generation
from .sse import events_of, usage_of
from .start_up import StartUp
from .tickets import Ticket, facts_of, metrics_of
from .traces import trace_context_of

_CREATED = int(time.time())
_IMAGE_ERRORS = errors(400, 401, 403, 404, 408, 409, 413, 415, 429, 500, 503, 504)


def make_app(
    front_end: FrontEnd,
    metrics: Metrics,
    live: Live,
    batches: Batches,
    edits: EditProcesses,
    start_up: StartUp | None = None,
) -> FastAPI:
    """Return the application that serves a front end over HTTP; until it is ready, `/readyz` has `start_up`'s
    progress.
    """
    app = FastAPI(title="psctl", summary="OpenAI's images API over the patch engine", docs_url=None, redoc_url=None)

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.to_json(), error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        codes = {404: "unknown_url", 405: "method_not_allowed"}
        answer = ApiError(error.status_code, f"{error.detail}: {request.method} {request.url.path}", code="http_error")
        answer.code = codes.get(error.status_code, answer.code)
        return JSONResponse(answer.to_json(), error.status_code, error.headers)

    @app.exception_handler(OSError)
    async def on_disk_error(request: Request, error: OSError) -> Response:
        if not is_disk_full(error):
            raise error
        answer = ApiError(507, "the server's disk is full", code="disk_full")
        return JSONResponse(answer.to_json(), answer.status)

    @app.exception_handler(Exception)
    async def on_internal_error(request: Request, error: Exception) -> Response:
        answer = ApiError(500, "the server has made a mistake; its log says which", code="internal_error")
        return JSONResponse(answer.to_json(), 500)

    @app.post(
        GENERATIONS,
        openapi_extra=body_of(generation_fields(front_end.model, front_end.limits)),
        responses=_IMAGE_ERRORS,
    )
    async def generate(request: Request) -> Response:
        arrival_s = asyncio.get_running_loop().time()
        generation = parse_generation(
            await read_object(request),
            front_end.model,
            front_end.limits,
            header_slo=request.headers.get("x-slo-seconds"),
        )
        return await respond(request, generation, arrival_s)

    @app.post(
        EDITS,
        openapi_extra=edit_bodies(front_end.model, front_end.limits),
        responses=_IMAGE_ERRORS,
    )
    async def edit(request: Request) -> Response:
        arrival_s = asyncio.get_running_loop().time()
        parts = await read_edit(request, front_end.limits)
        generation = await _until_disconnect(request, edits.parse(parts, request.headers.get("x-slo-seconds")))
        if generation.edit is not None and generation.edit.template is not None:
            # Records of templates are kept by key: another key must not find out what this one has edited.
            template = replace(generation.edit.template, owner=caller_of(request.scope).key)
            generation = replace(generation, edit=replace(generation.edit, template=template))
        await caller_of(request.scope).release_room()
        return await respond(request, generation, arrival_s)

    async def respond(request: Request, generation: Generation, arrival_s: float) -> Response:
        caller = caller_of(request.scope)

        async def draw() -> Ticket:
            ticket = await front_end.generate(
                generation,
                key=caller.key,
                request_id=caller.request_id,
                arrival_s=arrival_s,
                streams=generation.stream,
                trace_context=trace_context_of(request.headers),
            )
            if not generation.stream:
                try:
                    await front_end.wait(ticket)
                except asyncio.CancelledError:
                    ticket.cancel("its client has left")
                    raise
            return ticket

        ticket = await _until_disconnect(request, draw())
        if generation.stream:
            return _Stream(front_end, ticket)
        return JSONResponse(_images_of(ticket, str(request.base_url)))

    @app.get(GENERATIONS + "/{ticket_id}", responses=errors(401, 403, 404))
    async def look(ticket_id: str, request: Request) -> dict[str, Any]:
        return _status_of(front_end.ticket(ticket_id, caller_of(request.scope).key), str(request.base_url))

    @app.delete(GENERATIONS + "/{ticket_id}", responses=errors(401, 403, 404))
    async def cancel(ticket_id: str, request: Request) -> dict[str, Any]:
        ticket = front_end.ticket(ticket_id, caller_of(request.scope).key)
        ticket.cancel("its client has cancelled it")
        return _status_of(ticket, str(request.base_url))

    @app.get("/v1/images/{name}/content", responses=errors(401, 403, 404))
    async def content(name: str) -> Response:
        found = front_end.image(name)
        if found is None:
            raise ApiError(404, "there is no such image, or it is too old", code="not_found")
        return Response(found.content, media_type=found.media_type, headers={"Cache-Control": "private, max-age=3600"})

    @app.post("/v1/images/variations", include_in_schema=False)
    async def variations() -> None:
        raise ApiError(404, "there are no variations of images here", code="unsupported_endpoint")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_card(name, front_end) for name in front_end.model.names]}

    @app.get("/v1/models/{name:path}", responses=errors(401, 403, 404))
    async def model(name: str) -> dict[str, Any]:
        check_model(name, front_end.model)
        return _model_card(name, front_end)

    @app.get("/livez")
    async def alive() -> Response:
        return JSONResponse({"status": "alive"})

    @app.get("/health")
    async def health() -> Response:
        is_healthy = front_end.backend.health.value in ("ready", "starting")
        return JSONResponse(probe_body(front_end.backend.health.value), 200 if is_healthy else 503)

    @app.get("/readyz")
    @app.get("/ready")
    async def ready() -> Response:
        state = "draining" if front_end.is_draining else front_end.backend.health.value
        if start_up is not None and state == Health.STARTING.value:
            return start_up.answer("/readyz")
        return JSONResponse(probe_body(state), 200 if front_end.is_ready else 503)

    def probe_body(status: str) -> dict[str, Any]:
        """Return a status with the reason for any trouble, and the number of ready replicas if there are several."""
        replicas, trouble = front_end.backend.replicas, front_end.backend.trouble
        num_ready = sum(each.health is Health.READY for each in replicas)
        body: dict[str, Any] = {"status": status}
        if trouble:
            body["reason"] = trouble
        if len(replicas) > 1:
            body["replicas"] = {"ready": num_ready, "all": len(replicas)}
        return body

    @app.get("/v1/state")
    async def state(request: Request) -> Response:
        return Response(live.state(caller_of(request.scope).key), media_type="application/json")

    @app.get("/v1/state/stream")
    async def state_stream(request: Request) -> Response:
        live.check_viewers()
        states = live.stream(caller_of(request.scope).key)
        return StreamingResponse(states, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return page_response()

    @app.get("/metrics")
    async def scrape(request: Request) -> Response:
        return Response(metrics.exposition(caller_of(request.scope).key), media_type=CONTENT_TYPE)

    app.include_router(batch_routes(batches))
    return app


async def _until_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`. If the client disconnects first, cancel it and raise ApiError."""
    return await unless(disconnect(request.receive), cancelled("its client has left"), work)


class _Stream(StreamingResponse):
    """Event stream of a ticket. Disconnecting cancels the ticket, even before the first event is sent."""

    def __init__(self, front_end: FrontEnd, ticket: Ticket) -> None:
        self._ticket = ticket
        super().__init__(
            events_of(ticket, front_end.limits.request_timeout_s),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Generation-Id": ticket.id},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ticket.cancel("its client has left")


def _images_of(ticket: Ticket, base_url: str) -> dict[str, Any]:
    generation = ticket.generation
    return {
        "created": int(ticket.created_s),
        "id": ticket.id,
        "data": [_image_of(ticket, index, base_url) for index in range(len(generation.seeds))],
        "seeds": list(generation.seeds),
        "size": str(generation.resolution),
        "quality": generation.quality,
        "background": "opaque",
        "output_format": generation.output_format,
        "usage": usage_of(generation, len(generation.seeds)),
        "metrics": metrics_of(ticket.records),
    }


def _image_of(ticket: Ticket, index: int, base_url: str) -> dict[str, Any]:
    drawn = ticket.drawn[index]
    if ticket.generation.response_format == "url":
        return {"url": f"{base_url}v1/images/{ticket.id}-{index}/content", **facts_of(drawn.record)}
    return {"b64_json": base64_of(drawn.content), **facts_of(drawn.record)}


def _status_of(ticket: Ticket, base_url: str) -> dict[str, Any]:
    generation, status = ticket.generation, ticket.status
    found: dict[str, Any] = {
        "id": ticket.id,
        "object": "image.generation",
        "status": status,
        "created": int(ticket.created_s),
        "seeds": list(generation.seeds),
        "num_inference_steps": generation.num_steps,
        "steps_done": [ticket.steps_done.get(index, 0) for index in range(len(generation.seeds))],
    }
    if status == "completed":
        found |= _images_of(ticket, base_url)
    if ticket.error is not None:
        found |= ticket.error.to_json()
    return found


def _model_card(name: str, front_end: FrontEnd) -> dict[str, Any]:
    model, limits = front_end.model, front_end.limits
    return {
        "id": name,
        "object": "model",
        "created": _CREATED,
        "owned_by": "psctl",
        "sizes": list(map(str, model.defaults.resolutions)),
        "size_multiple": model.size_multiple,
        "dtype": model.dtype,
        "defaults": {
            "size": str(model.defaults.default_resolution),
            "num_inference_steps": model.defaults.num_inference_steps,
            "guidance_scale": model.defaults.guidance_scale,
            "reuse": model.reuses_templates,
        },
        **({"adapters": list(model.adapters)} if model.adapters else {}),
        **({"cascade": list(model.cascade)} if model.cascade else {}),
        "limits": {
            "n": MAX_IMAGES,
            "max_pixels": limits.max_pixels,
            "num_inference_steps": limits.max_steps,
            "prompt_characters": limits.max_prompt,
            "references": 0 if model.references is None else model.references.most,
        },
    }
