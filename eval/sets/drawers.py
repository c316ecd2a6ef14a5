"""Who draws the images of a set: the engine of this process, or replicas, each with a GPU of its own."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ...data.errors import RunError
from ...data.files import atomic_write
from ...data.requests import Request
from ...data.resolution import Resolution
from ...serving.core.request_state import RequestRecord
from ...serving.models.identity import ModelIdentity
from ...serving.server.errors import ApiError
from .cache_use import CacheMeter

if TYPE_CHECKING:
    from PIL.Image import Image

    from ...profiling.http.engine import EngineRecipe
    from ...serving.cluster.deployment import ReplicaPlan
    from ...serving.models.served import ServedModel

_CHUNK = 256
"""Requests handed to the engine at a time: each holds its text embeddings until it is drawn (1.3 MB with SDXL)."""
OnStep = Callable[[int], None]
"""Called with the number of denoising steps that were just taken."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """What has become of some of the requests; after an interrupted one nothing follows."""

    records: Sequence[RequestRecord]
    was_interrupted: bool = False


class Drawer(Protocol):
    """Draws requests, each saved whole as soon as it is drawn.

    Attributes:
        identity: of the model that draws.
    """

    identity: ModelIdentity

    def prepare(self, sizes: Sequence[Resolution], tables: Path) -> None:
        """Measure what these sizes need, unless the folder of tables says it."""

    def check(self, request: Request) -> None:
        """Raise UsageError if the model cannot draw a request."""

    def meter(self, folder: Path) -> CacheMeter:
        """Counts what a cache saves for the set in this folder."""
        ...

    def draw(
        self, requests: Mapping[Path, Request], policy: str, max_batch_size: int, on_step: OnStep | None
    ) -> Iterator[Drawing]:
        """Draw the requests into their files, some after the others. Ids of requests differ."""
        ...


class EngineDrawer:
    """The engine of this process.

    Args:
        model: loaded.
        prepared: what a request becomes right before it is drawn, as the image that it starts from need not be in
            memory before.
    """

    def __init__(self, model: "ServedModel", prepared: Callable[[Request], Request] = lambda request: request) -> None:
        self._model, self._prepared = model, prepared
        self.identity = model.identity

    def prepare(self, sizes: Sequence[Resolution], tables: Path) -> None:
        """See `Drawer`."""
        self._model.tune(sizes, tables)

    def check(self, request: Request) -> None:
        """See `Drawer`."""
        self._model.check_request(request)

    def meter(self, folder: Path) -> CacheMeter:
        """See `Drawer`."""
        return CacheMeter(self._model, folder)

    def draw(
        self, requests: Mapping[Path, Request], policy: str, max_batch_size: int, on_step: OnStep | None
    ) -> Iterator[Drawing]:
        """See `Drawer`."""
        from ...serving.engine.engine import Engine
        from ...serving.scheduling.policies import get_policy

        files = {request.request_id: path for path, request in requests.items()}
        waiting = list(requests.values())
        for first in range(0, len(waiting), _CHUNK):
            engine = Engine(
                self._model,
                get_policy(policy),
                max_batch_size=max_batch_size,
                image_path=lambda request: files[request.request_id],
                on_step=None if on_step is None else lambda row: on_step(row.active),
            )
            for request in waiting[first : first + _CHUNK]:
                engine.submit(self._prepared(request))
            engine.close()
            result = engine.run()
            yield Drawing(result.records, result.was_interrupted)
            if result.was_interrupted:
                return


class ReplicaDrawer:
    """Replicas on Ray Serve, which are started at once and end with `draw`. What a cache saves there is not counted.

    Args:
        recipe: of each engine.
        plan: how many.

    Raises:
        MissingExtraError, UsageError, RunError: as `ClusterBackend.deploy`.
    """

    def __init__(self, recipe: "EngineRecipe", plan: "ReplicaPlan") -> None:
        from ...profiling.http.engine import build_for_replica
        from ...serving.cluster.backend import ClusterBackend

        self._backend = ClusterBackend(plan, partial(build_for_replica, recipe))
        self._at_once = plan.most * plan.max_ongoing
        self.identity: ModelIdentity = self._backend.deploy().identity

    def prepare(self, sizes: Sequence[Resolution], tables: Path) -> None:
        """Replicas have measured already."""

    def check(self, request: Request) -> None:
        """A replica refuses what its model cannot draw."""

    def meter(self, folder: Path) -> CacheMeter:
        """See `Drawer`; nothing is counted."""
        return CacheMeter(None, folder)

    def draw(
        self, requests: Mapping[Path, Request], policy: str, max_batch_size: int, on_step: OnStep | None
    ) -> Iterator[Drawing]:
        """See `Drawer`. Policy and batch size are those of the recipe."""
        yield Drawing(asyncio.run(self._draw_all(requests, on_step)))

    async def _draw_all(self, requests: Mapping[Path, Request], on_step: OnStep | None) -> list[RequestRecord]:
        places = asyncio.Semaphore(self._at_once)

        async def one(path: Path, request: Request) -> RequestRecord:
            async with places:
                saved = _ImageSaver(request, path, on_step)
                try:
                    await self._backend.submit(saved.request, saved)
                except ApiError as error:
                    raise RunError(f"the replicas do not draw: {error.message}") from error
                return await saved.record

        await self._backend.start()
        try:
            return list(await asyncio.gather(*(one(path, request) for path, request in requests.items())))
        finally:
            await self._backend.stop()


class _ImageSaver:
    """Saves the image of a request that a replica draws."""

    def __init__(self, request: Request, path: Path, on_step: OnStep | None) -> None:
        loop = asyncio.get_running_loop()
        self.request = replace(request, arrival_s=loop.time())
        self.record: asyncio.Future[RequestRecord] = loop.create_future()
        self._path, self._on_step, self._steps_done = path, on_step, 0

    def on_step(self, request_id: int, steps_done: int) -> None:
        """See `Follower`."""
        if self._on_step is not None:
            self._on_step(steps_done - self._steps_done)
        self._steps_done = steps_done

    def on_partial(self, request_id: int, index: int, image: "Image") -> None:
        """None are asked for."""

    def on_end(self, record: RequestRecord, image: "Image | None") -> None:
        """See `Follower`."""
        try:
            if image is not None:
                self.on_step(record.request_id, record.num_inference_steps)
                with atomic_write(self._path) as temporary:
                    image.save(temporary)  # the format by the suffix
        except OSError as error:
            self.record.set_exception(error)
            return
        self.record.set_result(record)
