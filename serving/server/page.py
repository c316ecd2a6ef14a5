"""The live page: one HTML with its style and script in it, which only its own nonce lets run. No torch."""

import secrets
from functools import cache
from importlib.resources import files

from starlette.responses import Response

_NONCE = "@NONCE@"


def page_response() -> Response:
    """The page, with a nonce of its own."""
    nonce = secrets.token_urlsafe(16)
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
    return Response(_page().replace(_NONCE, nonce), media_type="text/html; charset=utf-8", headers=headers)


@cache
def _page() -> str:
    parts = {name: _read(name) for name in ("page.html", "page.css", "page.js")}
    return parts["page.html"].replace("@STYLE@", parts["page.css"]).replace("@SCRIPT@", parts["page.js"])


def _read(name: str) -> str:
    return (files(__package__ or "") / name).read_text(encoding="utf-8")
