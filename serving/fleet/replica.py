"""A replica: an engine of its own, in a process that Ray places, starts and restarts."""

import asyncio
import itertools
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ...data.errors import UsageError
from ...data.requests import Request
from ..core.request_state import RequestRecord
from ..core.step_row import StepRow
from ..server.backend import FIRST_ID, Follower, Health, ReplicaState
from ..server.errors import ApiError
from .messages import Accepted, Ended, PartialImage, Refused, ReplicaMessage, ReplicaStatus, Stepped

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..server.local import LocalSetup

_MOST_ROWS = 2000
_ORPHANED_AFTER_S = 900.0


class Replica:
    """The actor that Ray Serve runs in a process of its own; its engine is a `LocalBackend`.

    Args:
        build: builds the engine's parts and their description for the front end; called in the replica's process.
    """

    async def __init__(self, build: "Callable[[], tuple[LocalSetup, object]]") -> None:  # type: ignore[misc]
        from ray import serve

        from ..server.local import LocalBackend, engine_thread

        _bind_to_loopback()
        self._name = serve.get_replica_context().replica_id.unique_id
        thread = engine_thread()
        setup, self._description = await asyncio.get_running_loop().run_in_executor(thread, build)
        self._rows: deque[StepRow] = deque(maxlen=_MOST_ROWS)
        self._backend = LocalBackend(setup, thread=thread, on_row=self._rows.append)
        self._numbers = itertools.count(FIRST_ID)
        self._num_drawn = 0
        await self._backend.start()
        self._last_poll_s = asyncio.get_running_loop().time()
        self._ending = asyncio.ensure_future(self._end_when_orphaned(serve.get_replica_context().app_name))

    async def describe(self) -> object:
        """Return `build`'s description of the engine."""
        return self._description

    async def draw(
        self, request: Request, waited_s: float, num_partials: int, follows_steps: bool
    ) -> AsyncIterator[ReplicaMessage]:
        """Draw a request and yield messages about it; closing the iterator cancels the request.

        Args:
            request: its `arrival_s` is ignored, as the clocks of machines differ.
            waited_s: seconds since it arrived.
            num_partials: number of partial images to send.
            follows_steps: whether every step is reported, instead of a few per second.
        """
        number, queue = next(self._numbers), _MessageQueue(request.request_id)
        arrival_s = asyncio.get_running_loop().time() - waited_s
        try:
            await self._backend.submit(
                replace(request, request_id=number, arrival_s=arrival_s),
                queue,
                num_partials=num_partials,
                follows_steps=follows_steps,
            )
        except (UsageError, ApiError) as error:
            yield Refused(str(error), is_busy=isinstance(error, ApiError))
            return
        try:
            yield Accepted()
            while not isinstance(message := await queue.messages.get(), Ended):
                yield message
            self._num_drawn += message.record.status == "completed"
            yield message
        finally:
            # Does nothing if the request has ended.
            self._backend.cancel(number, "its client has left")

    async def status(self) -> ReplicaStatus:
        """Return the state of the replica and its steps since the last call."""
        self._last_poll_s = asyncio.get_running_loop().time()
        rows = tuple(self._rows)
        self._rows.clear()
        backend = self._backend
        state = ReplicaState(self._name, os.getpid(), backend.health, backend.load, self._num_drawn)
        return ReplicaStatus(state, rows, backend.trouble)

    async def _end_when_orphaned(self, app_name: str) -> None:
        """End the application once its status has not been polled for 15 minutes: its front end was killed."""
        from ray import serve

        while asyncio.get_running_loop().time() - self._last_poll_s < _ORPHANED_AFTER_S:
            await asyncio.sleep(_ORPHANED_AFTER_S / 10)
        serve.delete(app_name, _blocking=False)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the figures that `autoscale.PixelStepsPolicy` reads."""
        load = self._backend.load
        return {"pixel_steps": float(load.pixel_steps), "rate": load.rate or 0.0}

    async def check_health(self) -> None:
        """Raise RuntimeError if the engine is stalled or stopped; Ray then replaces the replica."""
        health = self._backend.health
        if health in (Health.STALLED, Health.STOPPED):
            raise RuntimeError(f"the engine is {health.value}")


def _bind_to_loopback() -> None:
    """Where Ray runs on loopback only, open this replica's port there, too.

    Serve opens it on all addresses and lets the caller choose only the port.
    """
    import ray
    from ray._common.tls_utils import add_port_to_grpc_server
    from ray.serve._private import replica

    if (host := ray.util.get_node_ip_address()) == "127.0.0.1":
        replica.add_port_to_grpc_server = lambda server, address: add_port_to_grpc_server(server, f"{host}:0")


class _MessageQueue(Follower):
    """Queue of the messages about one request, under its id in the front end, until they are sent."""

    def __init__(self, request_id: int) -> None:
        self._request_id = request_id
        self.messages: asyncio.Queue[ReplicaMessage] = asyncio.Queue()

    def on_step(self, request_id: int, steps_done: int) -> None:
        self.messages.put_nowait(Stepped(self._request_id, steps_done))

    def on_partial(self, request_id: int, index: int, image: "Image") -> None:
        self.messages.put_nowait(PartialImage(self._request_id, index, image))

    def on_end(self, record: RequestRecord, image: "Image | None") -> None:
        record.request_id = self._request_id
        self.messages.put_nowait(Ended(record, image))
