"""Routes of Files and Batches, as OpenAI's client calls them. No torch."""

import contextlib
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, Response
from starlette.datastructures import QueryParams, UploadFile

from ..body import shown
from ..errors import ApiError, invalid
from ..guards import caller_of
from ..json_body import read_object
from ..openapi import body_of, errors, form_of, query_of
from .fields import BATCH, EXPIRY, FILE, PAGE
from .store import Batches

FILES, BATCHES = "/v1/files", "/v1/batches"


def batch_routes(batches: Batches) -> APIRouter:
    """Return the routes over a folder of batches."""
    routes = APIRouter()

    @routes.post(FILES, openapi_extra=form_of(FILE, "file"), responses=errors(400, 401, 403, 408, 413, 507))
    async def upload(request: Request) -> dict[str, Any]:
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise invalid("a file is sent as multipart/form-data, with the fields file and purpose")
        async with request.form(max_files=1, max_fields=4) as form:
            file, fields = form.get("file"), FILE.read_texts(form)
            if not isinstance(file, UploadFile):
                raise invalid("the file is missing", "file", code="missing_required_parameter")
            if len(fields.model_fields_set.intersection(EXPIRY)) == 1:
                raise invalid("expires_after needs both anchor and seconds", "expires_after")
            name, key = file.filename or "batch.jsonl", caller_of(request.scope).key
            lifetime_s = getattr(fields, EXPIRY[1])
            return await run_in_threadpool(batches.files.add, name, file.file, fields.purpose, key, lifetime_s)

    @routes.get(FILES, openapi_extra=query_of(PAGE), responses=errors(400, 401, 403))
    async def files(request: Request) -> dict[str, Any]:
        caller = caller_of(request.scope)
        return await run_in_threadpool(_page, batches.files.page, batches.files.about, caller.key, request.query_params)

    @routes.get(FILES + "/{file_id}", responses=errors(400, 401, 403, 404))
    async def file(file_id: str, request: Request) -> dict[str, Any]:
        return batches.files.about(file_id, caller_of(request.scope).key)

    @routes.delete(FILES + "/{file_id}", responses=errors(400, 401, 403, 404))
    async def delete(file_id: str, request: Request) -> dict[str, Any]:
        return await run_in_threadpool(batches.files.delete, file_id, caller_of(request.scope).key)

    @routes.get(FILES + "/{file_id}/content", responses=errors(400, 401, 403, 404))
    async def content(file_id: str, request: Request) -> Response:
        return FileResponse(
            batches.files.content(file_id, caller_of(request.scope).key), media_type="application/jsonl"
        )

    @routes.post(BATCHES, openapi_extra=body_of(BATCH), responses=errors(400, 401, 403, 404, 415, 429, 507))
    async def create(request: Request) -> dict[str, Any]:
        return batches.create(await read_object(request), caller_of(request.scope).key)

    @routes.get(BATCHES, openapi_extra=query_of(PAGE), responses=errors(400, 401, 403))
    async def all_batches(request: Request) -> dict[str, Any]:
        caller = caller_of(request.scope)
        return await run_in_threadpool(_page, batches.batch_page, batches.batch, caller.key, request.query_params)

    @routes.get(BATCHES + "/{batch_id}", responses=errors(400, 401, 403, 404))
    async def batch(batch_id: str, request: Request) -> dict[str, Any]:
        return batches.batch(batch_id, caller_of(request.scope).key)

    @routes.post(BATCHES + "/{batch_id}/cancel", responses=errors(400, 401, 403, 404))
    async def cancel(batch_id: str, request: Request) -> dict[str, Any]:
        return batches.cancel(batch_id, caller_of(request.scope).key)

    return routes


def _page(
    page_of: Callable[[str, str | None, int], tuple[list[str], bool] | None],
    describe: Callable[[str, str], dict[str, Any]],
    key: str,
    query: QueryParams,
) -> dict[str, Any]:
    """Return a page of a list, for the query parameters `limit` and `after` (an id). It waits for the disk.

    Raises ApiError if a parameter is invalid.
    """
    fields = PAGE.read_texts(query)
    found = page_of(key, fields.after, fields.limit)
    if found is None:
        raise invalid(f"after is {shown(fields.after)}, but nothing listed has this id", "after")
    ids, has_more = found
    page = []
    for each in ids:
        with contextlib.suppress(ApiError):  # deleted meanwhile
            page.append(describe(each, key))
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": has_more,
    }
