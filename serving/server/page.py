"""The live page: one HTML document with inline style and scripts, which only its own nonce allows to run. No torch."""

import secrets
from functools import cache
from importlib.resources import files

from starlette.responses import Response

_NONCE = "@NONCE@"


def page_response() -> Response:
    """Return the page with a fresh nonce."""
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
    page = _read("page.html")
    for mark, name in (("@STYLE@", "page.css"), ("@BRUSH@", "brush.js"), ("@SCRIPT@", "page.js")):
        page = page.replace(mark, _read(name))
    return page


def _read(name: str) -> str:
    return (files(__package__ or "") / name).read_text(encoding="utf-8")
