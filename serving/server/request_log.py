"""Request log: one line on stderr for every request that has ended or was refused, as JSON or text. No torch."""

import hashlib
import json
import sys
import time
from typing import Any, Literal, get_args

from ...data.checks import writes_all_text
from .errors import ApiError
from .front_end import Watcher
from .tickets import Ticket, metrics_of

_REFUSED = frozenset({400, 401, 403, 404, 405, 408, 413, 415})
_SHOWN = 12
"""Number of characters shown of the SHA-256 digest of an id."""


LogLevel = Literal["info", "warning", "error"]
"""Least level of the lines: `error` for failed requests, `warning` also for refused ones, `info` for all."""
LogFormat = Literal["json", "text"]
_LEVELS = get_args(LogLevel)
_LEVEL_OF: dict[str, LogLevel] = {"failed": "error", "rejected": "warning", "refused": "warning"}


class RequestLog(Watcher):
    """Watcher that writes the lines.

    Args:
        with_prompts: whether they contain prompts.
        level: least level of the lines.
        form: `json`, or `text`: time, level and event, then the fields as `name=value`.
    """

    def __init__(self, *, with_prompts: bool = False, level: LogLevel = "info", form: LogFormat = "json") -> None:
        self._with_prompts, self._level, self._form = with_prompts, level, form

    def on_accepted(self, ticket: Ticket) -> None:
        """Do nothing: a request is logged when it ends."""

    def on_rejected(self, error: ApiError, request_id: str, key: str) -> None:
        """Log a request that the front end has rejected."""
        line = {"event": "rejected", "request_id": request_id, **_owner(key)}
        self._write(line | {"status": error.status, "code": error.code})

    def on_answer(self, route: str, status: int, request_id: str) -> None:
        """Log a request that was refused before it reached the front end, which logs all others."""
        if status in _REFUSED:
            self._write({"event": "refused", "request_id": request_id, "route": route, "status": status})

    def on_over(self, ticket: Ticket) -> None:
        """Log a request that has ended."""
        generation = ticket.generation
        line: dict[str, Any] = {
            "event": ticket.status,
            # The id itself would let any reader of the log fetch the images.
            "id": hashlib.sha256(ticket.id.encode()).hexdigest()[:_SHOWN],
            "request_id": ticket.request_id,
            **_owner(ticket.key),
            "n": len(generation.seeds),
            "size": str(generation.resolution),
            "num_inference_steps": generation.num_inference_steps,
        }
        if ticket.records:
            line |= {name: _short(value) for name, value in metrics_of(ticket.records).items()}
        if generation.edit is not None:
            line["reused"] = sum(record.reused is True for record in ticket.records)
        if ticket.error is not None:
            line |= {"code": ticket.error.code, "reason": ticket.error.message}
        if self._with_prompts:
            line["prompt"] = generation.prompt
        self._write(line)

    def _write(self, line: dict[str, Any]) -> None:
        level = _LEVEL_OF.get(line["event"], "info")
        if _LEVELS.index(level) < _LEVELS.index(self._level):
            return
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
        # The current stderr: while the server runs, it is that of `log_stream`, which does not block.
        is_ascii = not writes_all_text(sys.stderr)
        if self._form == "json":
            sys.stderr.write(json.dumps({"time": f"{at}Z", "level": level, **line}, ensure_ascii=is_ascii) + "\n")
            return
        event = line.pop("event")
        values = (f"{name}={json.dumps(value, ensure_ascii=is_ascii)}" for name, value in line.items())
        sys.stderr.write(" ".join([f"{at}Z", level.upper(), event, *values]) + "\n")


def _owner(key: str) -> dict[str, str]:
    return {"key": key} if key else {}


def _short(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value
