"""One JSON line on stderr for every request that has ended or was not let in. No torch."""

import hashlib
import json
import sys
import time
from typing import Any

from ...data.checks import writes_all_text
from .errors import ApiError
from .front_end import Watcher
from .tickets import Ticket, metrics_of

_NEVER_LET_IN = frozenset({400, 401, 403, 404, 405, 408, 413, 415})
_SHOWN = 12
"""Characters of the SHA-256 of an id."""


class RequestLog(Watcher):
    """Writes the lines; with `with_prompts` also what was asked for, which else nobody finds in a log."""

    def __init__(self, *, with_prompts: bool = False) -> None:
        self._with_prompts = with_prompts

    def on_accepted(self, ticket: Ticket) -> None:
        """See `Watcher`."""

    def on_rejected(self, error: ApiError, request_id: str, key: str) -> None:
        """See `Watcher`."""
        line = {"event": "rejected", "request_id": request_id, **_owner(key)}
        self._write(line | {"status": error.status, "code": error.code})

    def on_answer(self, route: str, status: int, request_id: str) -> None:
        """See `Watcher`. What comes to a ticket or to its place has its own line."""
        if status in _NEVER_LET_IN:
            self._write({"event": "refused", "request_id": request_id, "route": route, "status": status})

    def on_over(self, ticket: Ticket) -> None:
        """See `Watcher`."""
        wanted = ticket.generation
        line: dict[str, Any] = {
            "event": ticket.status,
            # With its id anybody could fetch its images.
            "id": hashlib.sha256(ticket.id.encode()).hexdigest()[:_SHOWN],
            "request_id": ticket.request_id,
            **_owner(ticket.key),
            "n": len(wanted.seeds),
            "size": str(wanted.resolution),
            "num_inference_steps": wanted.num_inference_steps,
        }
        if ticket.records:
            line |= {name: _short(value) for name, value in metrics_of(ticket.records).items()}
        if wanted.edit is not None:
            line["reused"] = sum(record.reused is True for record in ticket.records)
        if ticket.error is not None:
            line |= {"code": ticket.error.code, "reason": ticket.error.message}
        if self._with_prompts:
            line["prompt"] = wanted.prompt
        self._write(line)

    def _write(self, line: dict[str, Any]) -> None:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
        # Of now: while the server runs it is a `log_stream`, which does not block.
        is_ascii = not writes_all_text(sys.stderr)
        sys.stderr.write(json.dumps({"time": f"{at}Z", **line}, ensure_ascii=is_ascii) + "\n")


def _owner(key: str) -> dict[str, str]:
    return {"key": key} if key else {}


def _short(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value
