"""Routes of Files and Batches, as OpenAI's client calls them. No torch."""

import contextlib
import re
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, Response
from starlette.datastructures import FormData, QueryParams, UploadFile

from ..body import shown
from ..errors import ApiError, invalid
from ..guards import caller_of
from ..json_body import read_object
from ..openapi import LEAST_FILE_S, MAX_LISTED, MOST_FILE_S, batch_body, errors, file_body, page_query
from .store import Batches

FILES, BATCHES = "/v1/files", "/v1/batches"


def batch_routes(batches: Batches) -> APIRouter:
    """Return the routes over a folder of batches."""
    routes = APIRouter()

    @routes.post(FILES, openapi_extra=file_body(), responses=errors(400, 401, 403, 408, 413, 507))
    async def upload(request: Request) -> dict[str, Any]:
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise invalid("a file is sent as multipart/form-data, with the fields file and purpose")
        async with request.form(max_files=1, max_fields=4) as form:
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile) or not isinstance(purpose, str):
                raise invalid("the fields file and purpose are needed", "file", code="missing_required_parameter")
            name, key = file.filename or "batch.jsonl", caller_of(request.scope).key
            return await run_in_threadpool(batches.files.add, name, file.file, purpose, key, _lifetime_s(form))

    @routes.get(FILES, openapi_extra=page_query(), responses=errors(400, 401, 403))
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

    @routes.post(BATCHES, openapi_extra=batch_body(), responses=errors(400, 401, 403, 404, 415, 429, 507))
    async def create(request: Request) -> dict[str, Any]:
        return batches.create(await read_object(request), caller_of(request.scope).key)

    @routes.get(BATCHES, openapi_extra=page_query(), responses=errors(400, 401, 403))
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


def _lifetime_s(form: FormData) -> int:
    """Return the seconds for which a file is kept, from OpenAI's fields `expires_after[...]`. Raises ApiError."""
    anchor, seconds = (form.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return MOST_FILE_S
    if anchor != "created_at":
        raise invalid(f"expires_after[anchor] is {shown(anchor)}, but it must be created_at", "expires_after")
    is_whole = isinstance(seconds, str) and re.fullmatch(r"[0-9]{1,9}", seconds, re.ASCII)
    if not is_whole or not LEAST_FILE_S <= int(str(seconds)) <= MOST_FILE_S:
        what = f"a whole number from {LEAST_FILE_S} to {MOST_FILE_S}"
        raise invalid(f"expires_after[seconds] is {shown(seconds)}, but it must be {what}", "expires_after")
    return int(str(seconds))


def _page(
    page_of: Callable[[str, str | None, int], tuple[list[str], bool] | None],
    describe: Callable[[str, str], dict[str, Any]],
    key: str,
    query: QueryParams,
) -> dict[str, Any]:
    """Return a page of a list, for the query parameters `limit` and `after` (an id). It waits for the disk.

    Raises ApiError if a parameter is invalid.
    """
    limit, after = query.get("limit", str(MAX_LISTED)), query.get("after")
    if not re.fullmatch(r"[0-9]{1,3}", limit, re.ASCII) or not 1 <= int(limit) <= MAX_LISTED:
        raise invalid(f"limit is {shown(limit)}, but it must be a whole number from 1 to {MAX_LISTED}", "limit")
    found = page_of(key, after, int(limit))
    if found is None:
        raise invalid(f"after is {shown(after)}, but nothing listed has this id", "after")
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
