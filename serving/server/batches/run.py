"""Draws the lines of a batch with a front end, several at a time, and writes their outputs. No torch."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from ....data.errors import RunError
from ....data.files import is_disk_full
from ...core.processes import end_at_once
from ..backend import Health
from ..errors import ApiError
from ..front_end import FrontEnd
from ..images import base64_of
from ..protocol import Generation
from ..sse import usage_of
from ..tickets import Ticket
from .file import BatchLine, BatchOutput
from .places import FairPlaces

_RETRY_S, _LONGEST_RETRY_S = 1.0, 30.0
_FULL_RETRY_S = 2.0
_GOES_ON = "the same command goes on where it was"
_MOST_CRASHES = 5
"""Crashes of the engine while it draws one line after which the line itself fails. While no engine runs, lines wait."""


Result = TypeVar("Result")
OnFull = Callable[[OSError | None], bool]
"""Called with the error whenever the disk is full, and returns whether to wait for room; called with None after a
successful write.
"""


async def when_there_is_room(write: Callable[[], Result], on_full: OnFull, pool: Executor | None = None) -> Result:
    """Call `write` in a thread of `pool`, again while the disk is full, and return its result.

    Raises the errors of `write`; that of a full disk only if `on_full` returns False.
    """
    while True:
        try:
            found = await asyncio.shield(asyncio.get_running_loop().run_in_executor(pool, write))
        except OSError as error:
            if not is_disk_full(error) or not on_full(error):
                raise
        else:
            on_full(None)
            return found
        await asyncio.sleep(_FULL_RETRY_S)


class Gate(Protocol):
    """Coroutine function that returns when the next line may begin."""

    async def __call__(self) -> None: ...


@dataclass(eq=False)
class BatchRun:
    """Draws the remaining lines of a batch.

    Attributes:
        front_end: front end that draws them.
        lines: all lines of the batch.
        output: outputs of the batch; lines that have one are skipped.
        places: places in which lines are drawn.
        key: owner of the batch.
        wait_for_room: awaited before each line requests a place.
        wait_for_turn: awaited when the line has a place.
        writes_b64: whether output lines hold the images, as those of a server do, or only the names of their files.
        on_line: called after each line with whether it has its images.
        on_full: called when the disk is full and lines wait for room; None: a full disk ends the run.
        is_cancelled: whether the run was cancelled.
        is_expired: whether it was cancelled because the batch has expired.
    """

    front_end: FrontEnd
    lines: Sequence[BatchLine]
    output: BatchOutput
    places: FairPlaces
    key: str = ""
    wait_for_room: Gate | None = None
    wait_for_turn: Gate | None = None
    writes_b64: bool = False
    on_line: Callable[[bool], None] = lambda is_good: None
    on_full: OnFull | None = None
    is_cancelled: bool = False
    is_expired: bool = False
    _open: set[Ticket] = field(default_factory=set)
    _writer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="psctl-batch"))

    async def run(self) -> None:
        """Draw until every line has an answer, or the run is cancelled. A run is used once.

        Raises:
            OSError: an answer cannot be written.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._start_all(tasks)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self._writer.shutdown()

    async def run_alone(self) -> None:
        """Run without a server: start the backend, draw, and stop it.

        Raises:
            RunError: the backend cannot start, or has stopped for good. If it hangs, the process ends at once.
            OSError: as `run`.
        """
        backend, stopped = self.front_end.backend, list[str]()

        def on_stopped(reason: str) -> None:
            if backend.health is Health.STALLED:
                # Its threads hang, and cannot be ended.
                end_at_once(f"Error: {reason}; {_GOES_ON}", 1)
            stopped.append(reason)
            self.cancel()

        backend.on_stopped = on_stopped
        await backend.start()
        try:
            await self.run()
        finally:
            await self.front_end.drain(0)
        if stopped:
            raise RunError(f"{stopped[0]}; {_GOES_ON}")

    @property
    def counts(self) -> dict[str, int]:
        """Number of all lines, of those with images, and of those with an error."""
        completed, failed = self.output.counts
        return {"total": len(self.lines), "completed": completed, "failed": failed}

    @property
    def is_done(self) -> bool:
        """Whether every line has an answer."""
        return all(line.custom_id in self.output.done for line in self.lines)

    async def _start_all(self, tasks: asyncio.TaskGroup) -> None:
        for line in self.lines:
            if line.custom_id in self.output.done:
                continue
            parsed = self._parse(line)
            if self.wait_for_room is not None:
                await self.wait_for_room()
            if self.is_cancelled:
                return
            work = 0 if isinstance(parsed, ApiError) else parsed.pixel_steps
            await self.places.acquire(self.key, work, self.front_end.limits.of(self.key).weight)
            try:
                if self.wait_for_turn is not None:
                    await self.wait_for_turn()
                drawing = None if self.is_cancelled else tasks.create_task(self._draw(line, parsed))
            except BaseException:
                self.places.release()
                raise
            if drawing is None:
                self.places.release()
                return
            # Also if the task ends before it has begun.
            drawing.add_done_callback(lambda _: self.places.release())

    def _parse(self, line: BatchLine) -> Generation | ApiError:
        try:
            return line.generation(self.front_end.model, self.front_end.limits)
        except ApiError as error:
            return error

    def cancel(self) -> None:
        """Start no further line, and cancel the open ones, which then have no answer."""
        self.is_cancelled = True
        for ticket in list(self._open):
            ticket.cancel("the batch was cancelled")

    def expire(self) -> None:
        """Cancel the run because its batch has expired."""
        self.is_expired = not self.is_cancelled
        self.cancel()

    async def _draw(self, line: BatchLine, parsed: Generation | ApiError) -> None:
        answer = parsed if isinstance(parsed, ApiError) else await self._answer(parsed)
        if answer is None:
            return  # a later run draws it
        if isinstance(answer, ApiError):
            await self._write(self.output.write_failed, line, answer)
        else:
            await self._write(self._complete, line, answer)

    async def _answer(self, generation: Generation) -> Ticket | ApiError | None:
        """Return the answer to a line; None if the run ends before there is one."""
        crashes, wait_s = 0, _RETRY_S
        while not self.is_cancelled:
            try:
                return await self._draw_ticket(generation)
            except ApiError as error:
                crashes += error.code == "engine_error"
                if self.is_cancelled or error.code == "draining" or self.front_end.backend.health is Health.STOPPED:
                    return None
                if error.code != "not_ready" and (error.code != "engine_error" or crashes >= _MOST_CRASHES):
                    return error
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_RETRY_S)
        return None

    async def _write(self, write: Callable[[BatchLine, Any, str], None], line: BatchLine, answer: Any) -> None:
        """Write answers one after the other, outside the event loop, as this waits for the disk."""
        now = partial(write, line, answer, f"line-{line.number}")
        try:
            await when_there_is_room(now, self._on_full, self._writer)
        except OSError as error:
            if is_disk_full(error) and self.is_cancelled:
                return  # a later run draws it
            raise
        self.on_line(not isinstance(answer, ApiError))

    def _on_full(self, error: OSError | None) -> bool:
        return self.on_full is not None and self.on_full(error) and not self.is_cancelled

    async def _draw_ticket(self, generation: Generation) -> Ticket:
        front_end = self.front_end
        arrival_s = asyncio.get_running_loop().time()
        ticket = await front_end.generate(generation, key=self.key, arrival_s=arrival_s, is_batch=True)
        self._open.add(ticket)
        try:
            await front_end.wait(ticket)
        finally:
            self._open.discard(ticket)
        return ticket

    def _complete(self, line: BatchLine, ticket: Ticket, request_id: str) -> None:
        generation, data = ticket.generation, []
        for index in range(len(generation.seeds)):
            name = line.image_name(index, generation.output_format)
            content = ticket.drawn[index].content
            self.output.write_image(name, content)
            data.append({"file": name} | ({"b64_json": base64_of(content)} if self.writes_b64 else {}))
        body = {
            "created": int(ticket.created_s),
            "data": data,
            "seeds": list(generation.seeds),
            "size": str(generation.resolution),
            "usage": usage_of(generation, len(generation.seeds)),
        }
        self.output.write_completed(line, body, request_id)
