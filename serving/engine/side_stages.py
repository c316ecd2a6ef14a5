"""The two stages beside the denoise loop: prepare and postprocess."""

import threading
from collections.abc import Callable
from pathlib import Path

import torch

from ...data.files import atomic_write
from ...data.requests import Request
from ..core.prepared import PreparedRequest, describe
from ..core.request_state import RequestRecord, RequestState
from ..models.served import ServedModel
from ..scheduling.scheduler import Scheduler
from .run_result import RunResult
from .stages import StageThread

ImagePath = Callable[[Request], Path | None]


class SideStages:
    """Prepares requests in one thread, and decodes and saves their images in another.

    A request that fails in either ends as "failed" with its reason, and the others continue. Arguments are those of
    `Engine`; `result` takes the images and latents that are kept.

    Attributes:
        changed: guards the scheduler and `prepared`; it is notified whenever the denoise loop may have something to do.
        prepared: encoded text and latents by request id, from the end of preparing until the last step.
    """

    def __init__(
        self,
        model: ServedModel,
        scheduler: Scheduler,
        result: RunResult,
        now_s: Callable[[], float],
        *,
        image_path: ImagePath | None,
        keep_images: bool,
        keep_latents: bool,
        on_finish: Callable[[RequestRecord], None] | None,
    ) -> None:
        self.changed = threading.Condition()
        self.prepared: dict[int, PreparedRequest] = {}
        self._model = model
        self._scheduler = scheduler
        self._result = result
        self._now_s = now_s
        self._image_path = image_path
        self._keep_images = keep_images
        self._keep_latents = keep_latents
        self._on_finish = on_finish
        self._is_running = False
        self._prepare = StageThread("psctl-prepare", self._prepare_one, device=model.device, on_error=self._wake)
        self._postprocess = StageThread(
            "psctl-postprocess", self._postprocess_one, device=model.device, on_error=self._wake
        )

    @property
    def error(self) -> BaseException | None:
        """What has ended one of the threads: a defect, or an error of a callback."""
        return self._prepare.error or self._postprocess.error

    def start(self) -> None:
        """Start both threads, and to prepare what was submitted before."""
        self._prepare.start()
        self._postprocess.start()
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

    def let_go(self, state: RequestState) -> None:
        """Release the tensors of a request that has ended, and report its record; any thread may."""
        with self.changed:
            self.prepared.pop(state.request.request_id, None)
        if self._on_finish is not None:
            self._on_finish(state.record)

    def stop(self) -> bool:
        """End both threads and close every open record. Returns whether Ctrl-C came meanwhile.

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
            reason = "the run was stopped before it had finished"
            cancelled = self._scheduler.end_all("cancelled", self._now_s(), reason)
        for state in cancelled:
            self.let_go(state)
        return was_interrupted

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
        request, failure = state.request, None
        try:
            image = self._model.decode(latents)
            path = None if self._image_path is None else self._image_path(request)
            if path is not None:
                with atomic_write(path) as temporary:
                    image.save(temporary)  # the format by the suffix
                state.record.image_path = str(path)
        except Exception as error:  # noqa: BLE001  as above
            failure = describe("postprocessing", error)
        else:
            if self._keep_images:
                self._result.images[request.request_id] = image
            if self._keep_latents:
                self._result.latents[request.request_id] = latents
        status = "completed" if failure is None else "failed"
        with self.changed:
            ended = self._scheduler.end(request.request_id, status, self._now_s(), failure)
        if ended is not None:  # a second Ctrl-C may have cancelled it meanwhile
            self.let_go(ended)

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()
