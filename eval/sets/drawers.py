"""Drawers of image sets: the engine of this process, or replicas, each with a GPU of its own."""

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

    from ...serving.fleet.deployment import ReplicaPlan
    from ...serving.models.served import ServedModel
    from ...serving.runs.http.engine import EngineRecipe

_CHUNK = 256
"""Requests submitted to the engine at a time: each keeps its text embeddings until it is drawn (1.3 MB with SDXL)."""
OnStep = Callable[[int], None]
"""Called with the number of denoising steps that have just been taken."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """Records of some of the requests; no further ones follow after an interrupted drawing."""

    records: Sequence[RequestRecord]
    was_interrupted: bool = False


class Drawer(Protocol):
    """Draws requests, and saves each image atomically as soon as it is drawn.

    Attributes:
        identity: identity of the model.
    """

    identity: ModelIdentity

    def prepare(self, sizes: Sequence[Resolution], tables: Path) -> None:
        """Run the measurements that these sizes need, unless the folder of tables contains them."""

    def check(self, request: Request) -> None:
        """Raise UsageError if the model cannot draw a request."""

    def meter(self, folder: Path) -> CacheMeter:
        """Return a meter of the cache's savings for the set in this folder."""
        ...

    def draw(
        self, requests: Mapping[Path, Request], policy: str, max_batch_size: int, on_step: OnStep | None
    ) -> Iterator[Drawing]:
        """Draw the requests into their files, one group after another. The ids of the requests must differ."""
        ...


class EngineDrawer:
    """Draws with an engine in this process.

    Args:
        model: the loaded model.
        prepared: called with a request right before it is submitted, and returns the request to draw, so that its
            initial image need not be in memory earlier.
    """

    def __init__(self, model: "ServedModel", prepared: Callable[[Request], Request] = lambda request: request) -> None:
        self._model, self._prepared = model, prepared
        self.identity = model.identity

    def prepare(self, sizes: Sequence[Resolution], tables: Path) -> None:
        """Tune the model for these sizes."""
        self._model.tune(sizes, tables)

    def check(self, request: Request) -> None:
        """Raise UsageError if the model cannot draw a request."""
        self._model.check_request(request)

    def meter(self, folder: Path) -> CacheMeter:
        """Return a meter of the model's cache."""
        return CacheMeter(self._model, folder)

    def draw(
        self, requests: Mapping[Path, Request], policy: str, max_batch_size: int, on_step: OnStep | None
    ) -> Iterator[Drawing]:
        """Draw the requests in groups of 256."""
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
    """Draws with replicas on Ray Serve, which start with the constructor and end with `draw`.

    The savings of their caches are not counted.

    Args:
        recipe: recipe of each replica's engine.
        plan: number and size of the replicas.

    Raises:
        MissingExtraError, UsageError, RunError: as `ReplicaBackend.deploy`.
    """

    def __init__(self, recipe: "EngineRecipe", plan: "ReplicaPlan") -> None:
        from ...profiling.measure.for_serving import measure_latencies
        from ...serving.fleet.backend import ReplicaBackend
        from ...serving.runs.http.engine import build_for_replica

        self._backend = ReplicaBackend(plan, partial(build_for_replica, recipe, measure_latencies))
        self._max_open = plan.most * plan.max_ongoing
        self.identity: ModelIdentity = self._backend.deploy().identity

    def prepare(self, sizes: Sequence[Resolution], tables: Path) -> None:
        """Do nothing: replicas run their measurements when they start."""

    def check(self, request: Request) -> None:
        """Do nothing: a replica refuses requests that its model cannot draw."""

    def meter(self, folder: Path) -> CacheMeter:
        """Return a meter that counts nothing."""
        return CacheMeter(None, folder)

    def draw(
        self, requests: Mapping[Path, Request], policy: str, max_batch_size: int, on_step: OnStep | None
    ) -> Iterator[Drawing]:
        """Draw the requests in one group. Policy and batch size are those of the recipe."""
        yield Drawing(asyncio.run(self._draw_all(requests, on_step)))

    async def _draw_all(self, requests: Mapping[Path, Request], on_step: OnStep | None) -> list[RequestRecord]:
        places = asyncio.Semaphore(self._max_open)

        async def one(path: Path, request: Request) -> RequestRecord:
            async with places:
                saved = _SavingFollower(request, path, on_step)
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


class _SavingFollower:
    """Follower of a request that a replica draws; saves its image."""

    def __init__(self, request: Request, path: Path, on_step: OnStep | None) -> None:
        loop = asyncio.get_running_loop()
        self.request = replace(request, arrival_s=loop.time())
        self.record: asyncio.Future[RequestRecord] = loop.create_future()
        self._path, self._report_steps, self._steps_done = path, on_step, 0

    def on_step(self, request_id: int, steps_done: int) -> None:
        """Report the steps since the last call."""
        if self._report_steps is not None:
            self._report_steps(steps_done - self._steps_done)
        self._steps_done = steps_done

    def on_partial(self, request_id: int, index: int, image: "Image") -> None:
        """Do nothing: partial images are not requested."""

    def on_end(self, record: RequestRecord, image: "Image | None") -> None:
        """Save the image, if there is one, and set the record."""
        try:
            if image is not None:
                self.on_step(record.request_id, record.num_inference_steps)
                with atomic_write(self._path) as temporary:
                    image.save(temporary)  # the format by the suffix
        except OSError as error:
            self.record.set_exception(error)
            return
        self.record.set_result(record)
