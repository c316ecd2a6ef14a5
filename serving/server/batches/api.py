"""The routes of Files and Batches, as the client of OpenAI asks for them. No torch."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.datastructures import UploadFile

from ..errors import invalid
from ..json_body import parse_object
from ..openapi import batch_body, errors, file_body
from .store import Batches

FILES, BATCHES = "/v1/files", "/v1/batches"
_MAX_LISTED = 100


def batch_routes(batches: Batches) -> APIRouter:
    """The routes over a folder of batches."""
    routes = APIRouter()

    @routes.post(FILES, openapi_extra=file_body(), responses=errors(400, 401, 403, 408, 413))
    async def upload(request: Request) -> dict[str, Any]:
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise invalid("a file is sent as multipart/form-data, with the fields file and purpose")
        async with request.form(max_files=1, max_fields=4) as form:
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile) or not isinstance(purpose, str):
                raise invalid("the fields file and purpose are needed", "file", code="missing_required_parameter")
            return batches.add_file(file.filename or "batch.jsonl", await file.read(), purpose)

    @routes.get(FILES)
    async def files() -> dict[str, Any]:
        return _listed(batches.files())

    @routes.get(FILES + "/{file_id}", responses=errors(400, 401, 403, 404))
    async def file(file_id: str) -> dict[str, Any]:
        return batches.file(file_id)

    @routes.delete(FILES + "/{file_id}", responses=errors(400, 401, 403, 404))
    async def delete(file_id: str) -> dict[str, Any]:
        return batches.delete_file(file_id)

    @routes.get(FILES + "/{file_id}/content", responses=errors(400, 401, 403, 404))
    async def content(file_id: str) -> Response:
        return Response(batches.content(file_id), media_type="application/jsonl")

    @routes.post(BATCHES, openapi_extra=batch_body(), responses=errors(400, 401, 403, 404))
    async def create(request: Request) -> dict[str, Any]:
        return batches.create(parse_object(await request.body()))

    @routes.get(BATCHES)
    async def all_batches() -> dict[str, Any]:
        return _listed(batches.batches())

    @routes.get(BATCHES + "/{batch_id}", responses=errors(400, 401, 403, 404))
    async def batch(batch_id: str) -> dict[str, Any]:
        return batches.batch(batch_id)

    @routes.post(BATCHES + "/{batch_id}/cancel", responses=errors(400, 401, 403, 404))
    async def cancel(batch_id: str) -> dict[str, Any]:
        return batches.cancel(batch_id)

    return routes


def _listed(found: list[dict[str, Any]]) -> dict[str, Any]:
    shown = found[:_MAX_LISTED]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(found) > len(shown),
    }
