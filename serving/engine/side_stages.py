"""The two stages beside the denoise loop, prepare and postprocess, and the thread of the collector."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...data.files import atomic_write
from ...data.requests import Request
from ..core.prepared import PreparedRequest, describe
from ..core.request_state import RequestRecord, RequestState
from ..models.served import ServedModel
from ..scheduling.scheduler import Scheduler
from .collectors import Collector
from .stages import StageThread

if TYPE_CHECKING:
    from PIL.Image import Image

ImagePath = Callable[[Request], Path | None]


class SideStages:
    """Prepares requests in one thread, decodes and saves their images in another, and tells the collector in a third.

    A request that fails in the first two ends as "failed" with its reason, and the others continue. Arguments are those
    of `Engine`.

    The collector has a thread of its own because Ctrl-C may come anywhere in the one that denoises, and only there: so
    no request is told twice or forgotten.

    Attributes:
        changed: guards the scheduler, `open` and `prepared`; notified when the denoise loop may have something to do.
        open: requests of which the collector has not been told yet, by id.
        prepared: encoded text and latents by request id, from the end of preparing until the last step.
        last_end_s: when the last of those requests ended of which the collector has been told; None if there is none.
    """

    def __init__(
        self,
        model: ServedModel,
        scheduler: Scheduler,
        collector: Collector,
        now_s: Callable[[], float],
        *,
        image_path: ImagePath | None,
        on_finish: Callable[[RequestRecord], None] | None,
    ) -> None:
        self.changed = threading.Condition()
        self.open: dict[int, RequestState] = {}
        self.prepared: dict[int, PreparedRequest] = {}
        self.last_end_s: float | None = None
        self._model = model
        self._scheduler = scheduler
        self._collector = collector
        self._now_s = now_s
        self._image_path = image_path
        self._on_finish = on_finish
        self._is_running = False
        self._prepare = StageThread("psctl-prepare", self._prepare_one, device=model.device, on_error=self._wake)
        self._postprocess = StageThread(
            "psctl-postprocess", self._postprocess_one, device=model.device, on_error=self._wake
        )
        self._collect = StageThread[Callable[[], None]](
            "psctl-collect", lambda tell: tell(), device=torch.device("cpu"), on_error=self._wake
        )

    @property
    def error(self) -> BaseException | None:
        """What has ended one of the threads: a defect, or an error of a callback."""
        return self._prepare.error or self._postprocess.error or self._collect.error

    def start(self) -> None:
        """Start the threads, and to prepare what was submitted before."""
        for stage in (self._prepare, self._postprocess, self._collect):
            stage.start()
        with self.changed:
            self._is_running = True
            self.prepare_next()

    def prepare_next(self) -> None:
        """Give the prepare thread its next request, if one is due. The lock is held."""
        state = self._scheduler.next_to_prepare(self._now_s()) if self._is_running else None
        if state is not None:
            self._prepare.put(state.request)

    def postprocess(self, state: RequestState) -> None:
        """Queue a denoised request for its image."""
        with self.changed:
            prepared = self.prepared.pop(state.request.request_id)
        assert prepared.state.is_finished, "the stepper and the scheduler count steps differently"
        # The latents are all that decoding needs; the rest, mostly the encoded text, would wait with them.
        self._postprocess.put((state, prepared.latents))

    def collect(self, tell: Callable[[], None]) -> None:
        """Have something told in the collector's thread, in the order of the calls."""
        self._collect.put(tell)

    def let_go(self, state: RequestState, image: "Image | None" = None, latents: torch.Tensor | None = None) -> None:
        """Release the tensors of a request that has ended, and tell the collector; any thread may."""
        with self.changed:
            self.prepared.pop(state.request.request_id, None)
        self.collect(partial(self._tell, state, image, latents))

    def stop(self) -> bool:
        """End the threads and close every open record. Returns whether Ctrl-C came meanwhile.

        Images whose denoising is done are still written, unless Ctrl-C comes.
        """
        with self.changed:
            self._is_running = False
        self._prepare.discard_queued()
        was_interrupted = False
        for stage in (self._prepare, self._postprocess):
            try:
                stage.finish()
            except KeyboardInterrupt:
                was_interrupted = True
                self._postprocess.discard_queued()
        with self.changed:
            now_s, reason = self._now_s(), "the run was stopped before it had finished"
            self._scheduler.end_all("cancelled", now_s, reason)
            left = list(self.open.values())
        for state in left:
            if state.record.status == "pending":  # Ctrl-C came when the scheduler was about to close it
                state.record.close("cancelled", now_s, reason)
            self.let_go(state)
        try:
            self._collect.finish()
        except KeyboardInterrupt:
            was_interrupted = True
            self._collect.finish()
        return was_interrupted

    def _tell(self, state: RequestState, image: "Image | None", latents: torch.Tensor | None) -> None:
        with self.changed:
            # Where Ctrl-C came right after it was handed over, `stop` has done so again.
            if self.open.get(state.request.request_id) is not state:
                return
            del self.open[state.request.request_id]
        assert state.record.finish_s is not None
        self.last_end_s = max(self.last_end_s or 0.0, state.record.finish_s)
        self._collector.on_finish(state.record, image, latents)
        if self._on_finish is not None:
            self._on_finish(state.record)

    def _prepare_one(self, request: Request) -> None:
        prepared = failure = None
        try:
            prepared = self._model.prepare(request)
        except Exception as error:  # noqa: BLE001  one failing request must not take down the others
            failure = describe("preparing", error)
        with self.changed:
            if not self._is_running:  # it is about to be cancelled
                return
            assert prepared is not None or failure is not None, "the model has prepared nothing"
            num_iterations = None if prepared is None else prepared.state.num_steps
            state = self._scheduler.prepared(
                request.request_id, self._now_s(), num_iterations=num_iterations, failure=failure
            )
            if state is not None and prepared is not None:
                self.prepared[request.request_id] = prepared
            self.prepare_next()
            self.changed.notify_all()
        if state is not None and prepared is None:
            self.let_go(state)

    def _postprocess_one(self, item: tuple[RequestState, torch.Tensor]) -> None:
        state, latents = item
        request, image, failure = state.request, None, None
        try:
            image = self._model.decode(latents)
            path = None if self._image_path is None else self._image_path(request)
            if path is not None:
                with atomic_write(path) as temporary:
                    image.save(temporary)  # the format by the suffix
                state.record.image_path = str(path)
        except Exception as error:  # noqa: BLE001  as above
            image, failure = None, describe("postprocessing", error)
        status = "completed" if failure is None else "failed"
        with self.changed:
            ended = self._scheduler.end(request.request_id, status, self._now_s(), failure)
        if ended is not None:  # a second Ctrl-C may have cancelled it meanwhile
            self.let_go(ended, image, latents if failure is None else None)

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()
