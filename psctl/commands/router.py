"""`psctl router`: one address for several servers of OpenAI's images API."""

import asyncio
import re
from collections.abc import Mapping
from typing import Annotated

import typer

from ...data.errors import MissingExtraError, UsageError
from ...serving.scheduling.routers import COUNTING_ROUTERS, DEFAULT_ROUTER
from ..flags import flag
from ..output import Output


def router(
    *,
    servers: Annotated[list[str], typer.Argument(help="Base URLs of the servers, such as http://gpu1:8000/v1.")],
    host: Annotated[str, flag("--host", "Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, flag("--port", "Port; 0 for any free port.", min=0, max=65535)] = 8080,
    name: Annotated[
        str, flag("--router", f"How a server is chosen: {', '.join(COUNTING_ROUTERS)}.", metavar="NAME")
    ] = DEFAULT_ROUTER,
    allowed_host: Annotated[
        list[str] | None, flag("--allowed-host", "Accepted host name of requests; may be repeated.")
    ] = None,
    request_timeout: Annotated[
        float,
        flag("--request-timeout", "Time within which a server must begin to answer.", min=0.001, metavar="SECONDS"),
    ] = 600.0,
    drain_timeout: Annotated[
        float, flag("--drain-timeout", "Time for open requests after a signal.", min=0.0, metavar="SECONDS")
    ] = 30.0,
    out: Output,
) -> None:
    """Send requests for images to the server with the least pending work.

    Work is pixels times steps, not the number of requests, so that a server that draws large images gets fewer of them.
    The servers may be ours, vllm-omni, SGLang or any other with OpenAI's images API; they check the API keys. A request
    goes to another server if one cannot be reached, refuses it for lack of room, or is lost before it has answered.

    Examples:

        psctl router http://gpu1:8000/v1 http://gpu2:8000/v1
        psctl router http://gpu1:8000/v1 http://gpu2:8000/v1 --host 0.0.0.0 --port 80 --router least-requests
    """
    try:
        from ...serving.runs.http.proxy import serve_router
        from ...serving.server.address import Address
    except ImportError as error:
        raise MissingExtraError(error.name or "fastapi", "http") from error

    urls = [each.rstrip("/") for each in servers]
    if wrong := [each for each in urls if not re.fullmatch(r"https?://[^/?#]+(/[^?#]*)?/v1", each)]:
        raise UsageError(f"the server is {wrong[0]!r}, but it must be like http://gpu1:8000/v1")
    if twice := [each for each in urls if urls.count(each) > 1]:
        raise UsageError(f"the server {twice[0]} is given twice")

    def on_ready(url: str, problems: Mapping[str, str]) -> None:
        for server, problem in problems.items():
            out.warn(f"{server} is not up: {problem}")
        out.note(f"Routing at {url} to {len(urls)} servers")

    # The servers check the keys.
    address = Address(host, port, allowed_hosts=allowed_host or (), drain_timeout_s=drain_timeout, is_open=True)
    asyncio.run(
        serve_router(
            urls,
            name,
            address,
            timeout_s=request_timeout,
            on_ready=on_ready,
        )
    )
