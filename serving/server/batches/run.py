"""Draws the lines of a batch with a front end, some at a time, and writes down what becomes of them. No torch."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ....data.files import atomic_write
from ..errors import ApiError
from ..front_end import FrontEnd
from ..images import base64_of
from ..sse import usage_of
from ..tickets import Ticket
from .file import BatchLine, BatchOutput

_RETRY_S = 1.0
_RETRIED = frozenset({"not_ready", "engine_error"})
"""Codes of errors that are not the line's own fault."""
_MOST_TRIES = 5


class May(Protocol):
    """Says when the next line may begin."""

    async def __call__(self) -> None: ...


@dataclass(eq=False)
class BatchRun:
    """Draws what is left of a batch.

    Attributes:
        front_end: draws.
        lines: of the batch.
        output: where it goes; lines that are done there are left out.
        at_once: lines that are drawn together.
        may_begin: waited for before every line.
        writes_b64: whether output lines hold the images, as a server's do, or only the names of their files.
        on_line: told after each line whether it has its images.
    """

    front_end: FrontEnd
    lines: Sequence[BatchLine]
    output: BatchOutput
    at_once: int = 16
    may_begin: May | None = None
    writes_b64: bool = False
    on_line: Callable[[bool], None] = lambda is_good: None
    is_cancelled: bool = False
    _open: set[Ticket] = field(default_factory=set)

    async def run(self) -> None:
        """Draw; returns when every line has its answer, or the run was cancelled."""
        places = asyncio.Semaphore(self.at_once)
        async with asyncio.TaskGroup() as tasks:
            for line in self.lines:
                if line.custom_id in self.output.done:
                    continue
                await places.acquire()
                if self.may_begin is not None and not self.is_cancelled:
                    await self.may_begin()
                if self.is_cancelled:
                    places.release()
                    return
                tasks.create_task(self._draw(line, places))

    def cancel(self) -> None:
        """Begin no further line, and give up those that are open; they have no answer then."""
        self.is_cancelled = True
        for ticket in list(self._open):
            ticket.cancel("the batch was cancelled")

    async def _draw(self, line: BatchLine, places: asyncio.Semaphore) -> None:
        try:
            request_id = f"line-{line.number}"
            for tried in range(_MOST_TRIES):
                try:
                    body = await self._body(line)
                except ApiError as error:
                    if self.is_cancelled or error.code == "draining":
                        return  # a later run draws it
                    if error.code in _RETRIED and tried < _MOST_TRIES - 1:
                        await asyncio.sleep(_RETRY_S * 2**tried)
                        continue
                    self.output.failed(line, error, request_id)
                    self.on_line(False)
                    return
                self.output.completed(line, body, request_id)
                self.on_line(True)
                return
        finally:
            places.release()

    async def _body(self, line: BatchLine) -> dict[str, Any]:
        front_end = self.front_end
        wanted = line.generation(front_end.model, front_end.limits)
        arrival_s = asyncio.get_running_loop().time()
        ticket = await front_end.generate(wanted, arrival_s=arrival_s, is_batch=True)
        self._open.add(ticket)
        try:
            await front_end.wait(ticket)
        finally:
            self._open.discard(ticket)
        data = []
        for index in range(len(wanted.seeds)):
            name = line.image_name(index, wanted.output_format)
            content = ticket.drawn[index].content
            with atomic_write(self.output.folder / "images" / name) as temporary:
                temporary.write_bytes(content)
            data.append({"file": name} | ({"b64_json": base64_of(content)} if self.writes_b64 else {}))
        return {
            "created": int(ticket.created_s),
            "data": data,
            "seeds": list(wanted.seeds),
            "size": str(wanted.resolution),
            "usage": usage_of(wanted, len(wanted.seeds)),
        }
