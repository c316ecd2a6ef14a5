"""The two stages beside the denoise loop, prepare and postprocess, and the requests that all three share."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...data.errors import UsageError
from ...data.files import atomic_write
from ...data.requests import Request
from ..core.prepared import PreparedRequest, describe
from ..core.request_state import RequestRecord, RequestState, Status
from ..models.served import ServedModel
from ..scheduling.prepare_order import PrepareOrder
from .stages import StageThread

if TYPE_CHECKING:
    from PIL.Image import Image

ImagePath = Callable[[Request], Path | None]


@dataclass(slots=True)
class Entry:
    """A submitted request with its tensors; these are dropped as soon as they are of no more use."""

    state: RequestState
    prepared: PreparedRequest | None = None
    latents: torch.Tensor | None = None


class SideStages:
    """Prepares requests in one thread, and decodes and saves their images in another.

    A request that fails in either ends as "failed" with its reason, and the others go on.

    Args:
        model: the loaded model.
        now_s: the engine's clock.
        max_prepared_ahead: largest number of waiting requests that are prepared.
        image_path, keep_images, keep_latents, on_finish: of `Engine`.

    Attributes:
        changed: guards `entries`, `prepared_ids`, the order and state of preparing, and the closing of records; it is
            notified whenever the denoise loop may have something to do.
        entries: all requests, by id.
        prepared_ids: of requests whose preparing has ended, well or not, for the denoise loop to take.
        images, latents: of completed requests, by id, as far as they are kept.
        num_prepared, max_prepared: requests that hold encoded text and latents before decoding, now and at the most.
    """

    def __init__(
        self,
        model: ServedModel,
        now_s: Callable[[], float],
        *,
        max_prepared_ahead: int,
        image_path: ImagePath | None,
        keep_images: bool,
        keep_latents: bool,
        on_finish: Callable[[RequestRecord], None] | None,
    ) -> None:
        self.changed = threading.Condition()
        self.entries: dict[int, Entry] = {}
        self.prepared_ids: deque[int] = deque()
        self.images: dict[int, Image] = {}
        self.latents: dict[int, torch.Tensor] = {}
        self.num_prepared = self.max_prepared = 0
        self._model = model
        self._now_s = now_s
        self._image_path = image_path
        self._keep_images = keep_images
        self._keep_latents = keep_latents
        self._on_finish = on_finish
        self._order = PrepareOrder(max_prepared_ahead)
        self._is_preparing = self._is_stopping = False
        self._prepare = StageThread("psctl-prepare", self._prepare_one, device=model.device, on_error=self._wake)
        self._postprocess = StageThread(
            "psctl-postprocess", self._postprocess_one, device=model.device, on_error=self._wake
        )

    @property
    def error(self) -> BaseException | None:
        """What has ended one of the threads: a defect, or an error of a callback."""
        return self._prepare.error or self._postprocess.error

    def start(self) -> None:
        """Start both threads."""
        self._prepare.start()
        self._postprocess.start()

    def add(self, entry: Entry) -> None:
        """Take in a request, to be prepared when its turn comes; the lock is held.

        Raises:
            UsageError: its id was used before.
        """
        request_id = entry.state.request.request_id
        if request_id in self.entries:
            raise UsageError(f"request id {request_id} is used twice")
        self.entries[request_id] = entry
        self._order.add(request_id)
        self.prepare_next()

    def demand(self, request_id: int) -> Entry:
        """A request was admitted: it is prepared before those that wait. The lock is held; `prepare_next` follows."""
        self._order.demand(request_id)
        return self.entries[request_id]

    def forget(self, request_id: int) -> None:
        """A request need not be prepared any more. The lock is held; `prepare_next` follows."""
        self._order.forget(request_id)

    def prepare_next(self) -> None:
        """Give the prepare thread its next request, if it has none. The lock is held."""
        if self._is_preparing or self._is_stopping:
            return
        request_id = self._order.take()
        if request_id is not None:
            self._is_preparing = True
            self._prepare.put(self.entries[request_id])

    def postprocess(self, entry: Entry) -> None:
        """Queue a denoised request for its image."""
        assert entry.prepared is not None
        # All that decoding needs. The rest, mostly the encoded text, would wait with it.
        entry.latents = entry.prepared.latents
        self._release(entry)
        self._postprocess.put(entry)

    def end(self, entry: Entry, status: Status, reason: str | None = None) -> None:
        """Close the record of a request and let go of its tensors, unless it has ended before; any thread may."""
        with self.changed:
            if entry.state.record.status != "pending":
                return
            entry.state.record.close(status, self._now_s(), reason)
            self._release(entry)
            entry.latents = None
        if self._on_finish is not None:
            self._on_finish(entry.state.record)

    def stop(self) -> bool:
        """End both threads and close every open record. Returns whether Ctrl-C came meanwhile.

        Images whose denoising is done are still written, unless Ctrl-C comes.
        """
        with self.changed:
            self._is_stopping = True
        self._prepare.discard_queued()
        was_interrupted = False
        for stage in (self._prepare, self._postprocess):
            try:
                stage.finish()
            except KeyboardInterrupt:
                was_interrupted = True
                self._postprocess.discard_queued()
        with self.changed:
            open_entries = [entry for entry in self.entries.values() if entry.state.record.status == "pending"]
        for entry in open_entries:
            self.end(entry, "cancelled", "the run was stopped before it had finished")
        return was_interrupted

    def _prepare_one(self, entry: Entry) -> None:
        record = entry.state.record
        record.prepare_start_s = self._now_s()
        prepared = None
        try:
            prepared = self._model.prepare(entry.state.request)
        except Exception as error:  # noqa: BLE001  one failing request must not take down the others
            self.end(entry, "failed", describe("preparing", error))
        record.prepare_end_s = self._now_s()
        with self.changed:
            self._is_preparing = False
            if record.status == "pending":
                entry.prepared = prepared
                self.num_prepared += 1
                self.max_prepared = max(self.max_prepared, self.num_prepared)
            else:
                self._order.forget(record.request_id)
            self.prepared_ids.append(record.request_id)
            self.prepare_next()
            self.changed.notify_all()

    def _postprocess_one(self, entry: Entry) -> None:
        assert entry.latents is not None
        request, latents = entry.state.request, entry.latents
        try:
            image = self._model.decode(latents)
            path = None if self._image_path is None else self._image_path(request)
            if path is not None:
                with atomic_write(path) as temporary:
                    image.save(temporary)  # the format by the suffix
                entry.state.record.image_path = str(path)
        except Exception as error:  # noqa: BLE001  as above
            self.end(entry, "failed", describe("postprocessing", error))
            return
        if self._keep_images:
            self.images[request.request_id] = image
        if self._keep_latents:
            self.latents[request.request_id] = latents
        self.end(entry, "completed")

    def _release(self, entry: Entry) -> None:
        """Let go of the tensors of the prepare stage."""
        with self.changed:
            if entry.prepared is not None:
                entry.prepared = None
                self.num_prepared -= 1

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()
