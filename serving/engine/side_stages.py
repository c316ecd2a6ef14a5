"""The stages beside the denoise loop: prepare and postprocess.

They have a thread each or, with the option `stages` set to `inline`, run between steps in the thread that denoises. A
request that fails in one of them ends as "failed" with its reason, and the others continue.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...data.errors import UsageError
from ...data.files import atomic_write
from ...data.requests import Request
from ..core.failures import FailureStreaks
from ..core.prepared import describe
from ..core.request_state import RequestState
from ..core.timing import finish_stream
from ..editing.paste import pasted
from ..models.served import ServedModel
from .open_requests import OpenRequest, OpenRequests
from .preview import Preview
from .recorder import TemplateRecorder
from .reports import Reports
from .stages import InlineStage, Item, StageThread
from .watch import Watch

if TYPE_CHECKING:
    from PIL.Image import Image

ImagePath = Callable[[Request], Path | None]
OnImage = Callable[[Request, "Image"], object]


class Preparing:
    """Encodes texts and draws first latents, one request at a time.

    Args:
        model: the model.
        open_requests: the open requests of the engine.
        reports: receives the requests that fail.
        failures: counts requests that fail in a row.

    Attributes:
        stage: the thread, or the stage between steps.
        is_running: whether requests are prepared: from the start of the engine until it stops.
    """

    def __init__(
        self, model: ServedModel, open_requests: OpenRequests, reports: Reports, failures: FailureStreaks
    ) -> None:
        self.is_running = False
        self._model, self._open, self._reports, self._failures = model, open_requests, reports, failures
        self.stage = _stage_of(model, "psctl-prepare", self._prepare, open_requests.wake)

    def put_next(self) -> None:
        """Queue the next request to prepare, if there is one. The caller holds the lock."""
        state = self._open.scheduler.next_to_prepare(self._open.now_s()) if self.is_running else None
        if state is not None:
            self.stage.put(state)

    def _prepare(self, state: RequestState) -> None:
        request, scheduler, now_s, changed = state.request, self._open.scheduler, self._open.now_s, self._open.changed
        prepared = failure = share = None
        is_refused = False
        with changed:
            if state.record.status == "pending":
                # An inline stage prepares it some time after it was queued.
                state.record.prepare_start_s = now_s()
        try:
            if request.edit is not None:
                share = self._model.family.geometry.active_share(request.edit)
            prepared = self._model.prepare(request)
        except Exception as error:  # noqa: BLE001  one failing request must not take down the others
            failure, is_refused = describe("preparing", error), isinstance(error, UsageError)
        if not is_refused:
            self._failures.count("preparing", failure)
        with changed:
            if not self.is_running:  # it is about to be cancelled
                return
            assert prepared is not None or failure is not None, "the model has prepared nothing"
            num_iterations = None if prepared is None else prepared.state.num_steps
            is_open = scheduler.prepared(request.request_id, now_s(), num_iterations=num_iterations, failure=failure)
            if is_open and prepared is not None:
                self._open.by_id[request.request_id].prepared = prepared
                if share is not None:
                    state.record.active_share, state.record.reused = share, prepared.template is not None
            self.put_next()
            changed.notify_all()
        if is_open and prepared is None:
            self._reports.report(state)


@dataclass(slots=True, eq=False)
class _Denoised:
    """A denoised request that waits for its image.

    Attributes:
        state: state of the request.
        latents: its final latents.
        image: its image, if it was decoded together with that of an earlier request.
        is_alone: whether its image is decoded alone, as one of those decoded together has failed.
    """

    state: RequestState
    latents: torch.Tensor
    image: "Image | None" = None
    is_alone: bool = False


class Postprocessing:
    """Decodes and saves images in the order in which requests were denoised, and partial images between them.

    When the turn of a request comes, later ones of the same size are decoded with it, as far as the model allows.

    Args:
        model, open_requests, reports, failures: as for `Preparing`.
        recorder: records templates that edits have missed; None when recording is off.
        image_path, on_image, preview: as for `Engine`.

    Attributes:
        stage: the thread, or the stage between steps.
    """

    def __init__(
        self,
        model: ServedModel,
        open_requests: OpenRequests,
        reports: Reports,
        failures: FailureStreaks,
        recorder: TemplateRecorder | None,
        *,
        image_path: ImagePath | None,
        on_image: OnImage | None,
        preview: Preview | None,
    ) -> None:
        self._model, self._open, self._reports, self._failures = model, open_requests, reports, failures
        self._recorder, self._image_path, self._on_image, self._preview = recorder, image_path, on_image, preview
        # Appended to by the denoise loop; only the stage removes.
        self._waiting: deque[_Denoised] = deque()
        self.stage = _stage_of(model, "psctl-postprocess", _call, open_requests.wake)

    def put(self, state: RequestState) -> None:
        """Queue a denoised request for decoding."""
        prepared = self._open.release(state)
        assert prepared is not None, "it has taken its last step"
        assert prepared.state.is_finished, "the stepper and the scheduler count steps differently"
        state.record.steps_reused = prepared.steps_reused
        # Decoding needs only the latents; anything else, mostly the encoded text, would stay in memory meanwhile.
        denoised = _Denoised(state, prepared.latents)
        self._waiting.append(denoised)
        self.stage.put(partial(self._postprocess, denoised))

    def show_progress(self, batch: Sequence[OpenRequest]) -> None:
        """Notify the watches of a batch that has taken a step, and queue their partial images."""
        for each in batch:
            watch, prepared = each.watch, each.prepared
            if watch is None or prepared is None:
                continue
            steps_done = prepared.state.num_passed
            self._reports.queue_callback(partial(watch.on_step, steps_done), may_lag=watch.may_lag)
            if not watch.is_due(steps_done, prepared.state.num_requested):
                continue
            if (latents := self._model.stepper.peek(prepared)) is not None:
                watch.count_partial()
                # The thread that decodes them works on another stream.
                finish_stream(latents.device)
                self.stage.put(partial(self._draw_partial, each.state, watch, latents))

    def _draw_partial(self, state: RequestState, watch: Watch, latents: torch.Tensor) -> None:
        if state.record.status != "pending":  # cancelled meanwhile
            return
        try:
            image = None if self._preview is None else self._preview.draw(latents)
            if image is None:
                image = self._model.decode(latents)
            if state.request.edit is not None:
                image = pasted(image, state.request.edit)
        except Exception:  # noqa: BLE001  decoding the final image reports the same error
            return
        self._reports.queue_callback(partial(watch.show, image))

    def _decode(self, first: _Denoised) -> "Image":
        """Return the image of the first waiting request; later ones of its size get theirs in the same pass."""
        if first.image is not None:
            return first.image
        latents, together = first.latents, [first]
        if not first.is_alone:
            most = self._model.num_decoded(first.state.request.resolution)
            others = (
                each
                for each in tuple(self._waiting)
                if each is not first
                and (each.latents.shape, each.latents.dtype) == (latents.shape, latents.dtype)
                and each.state.record.status == "pending"
                and each.image is None
                and not each.is_alone
            )
            together += islice(others, most - 1)
        if len(together) == 1:
            return self._model.decode(latents)
        try:
            images = self._model.decode_together([each.latents for each in together])
        except Exception:  # noqa: BLE001  alone, each gets its image or its own error
            for each in together:
                each.is_alone = True
            return self._model.decode(latents)
        for each, image in zip(together, images, strict=True):
            each.image = image
        return images[0]

    def _postprocess(self, denoised: _Denoised) -> None:
        self._decode_and_save(denoised)
        # Not earlier: after Ctrl-C, a stage between steps serves the request again.
        self._waiting.remove(denoised)

    def _decode_and_save(self, denoised: _Denoised) -> None:
        state, latents = denoised.state, denoised.latents
        if state.record.status != "pending":  # cancelled meanwhile
            return
        request, image, failure = state.request, None, None
        try:
            image = self._decode(denoised)
            self._failures.count("postprocessing", None)
            if self._preview is not None:
                self._reports.call_safely(partial(self._preview.learn, latents, image))
            if request.edit is not None:
                image = pasted(image, request.edit)
            if self._on_image is not None:
                self._on_image(request, image)
            path = None if self._image_path is None else self._image_path(request)
            if path is not None:
                with atomic_write(path) as temporary:
                    image.save(temporary)  # the format by the suffix
                state.record.image_path = str(path)
        except Exception as error:  # noqa: BLE001  as above
            failure = describe("postprocessing", error)
            if image is None:
                self._failures.count("postprocessing", failure)
            image = None
        status = "completed" if failure is None else "failed"
        with self._open.changed:
            # The request may have been cancelled during decoding, and another request may have its id by now.
            is_open = state.record.status == "pending"
            if is_open:
                self._open.scheduler.end(request.request_id, status, self._open.now_s(), failure)
                # A policy may wait for the decoder.
                self._open.changed.notify_all()
        if is_open:
            self._reports.report(state, image, latents if failure is None else None)
        if self._recorder is not None and state.record.reused is False:
            # Not earlier, or the edit's own steps would wait for the passes of the record.
            self._recorder.request_recording(request)


def _stage_of(
    model: ServedModel, name: str, work: Callable[[Item], None], on_error: Callable[[], None]
) -> InlineStage[Item] | StageThread[Item]:
    if model.options.stages == "inline":
        return InlineStage(work)
    return StageThread(name, work, device=model.device, on_error=on_error)


def _call(work: Callable[[], None]) -> None:
    work()
