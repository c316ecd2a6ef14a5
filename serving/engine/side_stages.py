"""The stages beside the denoise loop, prepare and postprocess, and the thread of the collector."""

import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...data.errors import RunError, UsageError
from ...data.files import atomic_write
from ...data.requests import Request
from ..core.failures import Failures
from ..core.prepared import PreparedRequest, describe
from ..core.request_state import RequestRecord, RequestState
from ..core.timing import finish_stream
from ..editing.paste import pasted
from ..models.served import ServedModel
from ..scheduling.scheduler import Scheduler
from .collectors import Collector
from .preview import Preview
from .recorder import TemplateRecorder
from .stages import InlineStage, Stage, StageThread
from .watch import Watch

if TYPE_CHECKING:
    from PIL.Image import Image

_LAG_S = 0.05
MAX_FAILURES = 8
"""Number of consecutive failures of one stage after which a service considers its engine broken. A persistent error,
such as one of CUDA, fails every try, and each failure is an error for a client. That this many requests in a row fail
for reasons of their own is possible but rare.
"""
ImagePath = Callable[[Request], Path | None]
OnImage = Callable[[Request, "Image"], object]
Peek = Callable[[PreparedRequest], torch.Tensor | None]
"""Signature of `core.stepper.Stepper.peek`."""


class SideStages:
    """Prepares requests in one thread, decodes and saves their images in another, and calls the collector in a third.

    With the option `stages` set to `inline`, the first two run between steps, in the thread that denoises. A request
    that fails in one of them ends as "failed" with its reason, and the others continue. The arguments are those of
    `Engine`.

    The collector has a thread of its own because Ctrl-C can interrupt the thread that denoises at any point, and only
    that thread: no request is reported twice or lost.

    Attributes:
        changed: condition that guards the scheduler, `open` and `prepared`; notified when the denoise loop may have
            something to do, and when nothing is open any more.
        open: requests that have not been reported to the collector yet, by id.
        prepared: encoded text and latents by request id, from the end of preparing until the last step.
        watches: watches of open requests, by request id.
        recorder: records missing templates; None when recording is off.
        callback_failures: errors of callbacks, which do not end the run.
        last_end_s: time at which the last of the requests reported to the collector ended; None if there is none.
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
        on_image: OnImage | None,
        preview: Preview | None,
        records_templates: bool,
        max_failures: int | None,
    ) -> None:
        self.changed = threading.Condition()
        self.open: dict[int, RequestState] = {}
        self.prepared: dict[int, PreparedRequest] = {}
        self.watches: dict[int, Watch] = {}
        self.last_end_s: float | None = None
        self.callback_failures = Failures()
        self._max_failures = max_failures
        self._failed_in_a_row: Counter[str] = Counter()
        self._broken: RunError | None = None
        self._model = model
        self._scheduler = scheduler
        self._collector = collector
        self._now_s = now_s
        self._image_path = image_path
        self._on_finish = on_finish
        self._on_image = on_image
        self._preview = preview
        self._is_running = False
        self._prepare: Stage[Request]
        self._postprocess: Stage[Callable[[], None]]
        self._inline: tuple[InlineStage[Any], ...] = ()
        if model.options.stages == "inline":
            self._prepare, self._postprocess = self._inline = (
                InlineStage(self._prepare_one),
                InlineStage(lambda work: work()),
            )
        else:
            self._prepare = StageThread("psctl-prepare", self._prepare_one, device=model.device, on_error=self._wake)
            self._postprocess = StageThread(
                "psctl-postprocess", lambda work: work(), device=model.device, on_error=self._wake
            )
        self.recorder = TemplateRecorder(model, self.changed, self._wake) if records_templates else None
        self._pending_calls: deque[Callable[[], None]] = deque()
        self._handed_over_s = 0.0
        self._collect = StageThread[bool](
            "psctl-collect", lambda _: self._run_pending_calls(), device=torch.device("cpu"), on_error=self._wake
        )

    @property
    def error(self) -> BaseException | None:
        """Error that has ended one of the threads, or the RunError of a stage in which everything fails
        (`count_attempt`).
        """
        recording = None if self.recorder is None else self.recorder.error
        return self._prepare.error or self._postprocess.error or self._collect.error or recording or self._broken

    def count_attempt(self, stage: str, failure: str | None) -> None:
        """Record a try of a stage, and count consecutive failures; a success, with `failure` None, resets the count.

        After `max_failures` failures in a row, `error` is set. Only one thread at a time may call this for a stage.
        """
        self._failed_in_a_row[stage] = num_failed = 0 if failure is None else self._failed_in_a_row[stage] + 1
        if num_failed == self._max_failures:
            self._broken = RunError(f"{num_failed} tries in a row have failed, the last one with {failure}")
            self._wake()

    @property
    def is_stalled(self) -> bool:
        """Whether preparing or decoding one request, or a callback, is stalled."""
        return any(stage.pulse.is_stalled for stage in (self._prepare, self._postprocess, self._collect))

    @property
    def is_due(self) -> bool:
        """Whether `serve` has something to do."""
        return any(stage.is_due for stage in self._inline)

    def serve(self) -> None:
        """Run the queued work of stages that run inline, between steps of the denoise loop."""
        for stage in self._inline:
            stage.serve()

    def start(self) -> None:
        """Start the threads, and begin to prepare requests that are already submitted."""
        for stage in (self._prepare, self._postprocess, self._collect, self.recorder):
            if stage is not None:
                stage.start()
        with self.changed:
            self._is_running = True
            self.prepare_next()

    def prepare_next(self) -> None:
        """Queue the next request to prepare, if there is one. The caller holds the lock."""
        state = self._scheduler.next_to_prepare(self._now_s()) if self._is_running else None
        if state is not None:
            self._prepare.put(state.request)

    def postprocess(self, state: RequestState) -> None:
        """Queue a denoised request for decoding."""
        with self.changed:
            prepared = self.prepared.pop(state.request.request_id)
        assert prepared.state.is_finished, "the stepper and the scheduler count steps differently"
        state.record.steps_reused = prepared.steps_reused
        # Decoding needs only the latents; anything else, mostly the encoded text, would stay in memory meanwhile.
        self._postprocess.put(partial(self._postprocess_one, state, prepared.latents))

    def queue_call(self, call: Callable[[], None], *, may_lag: bool = False) -> None:
        """Queue a call for the collector's thread, in order. With `may_lag` it may be made some time later."""
        self._pending_calls.append(call)
        now_s = time.perf_counter()
        if not may_lag or now_s - self._handed_over_s > _LAG_S:
            self._handed_over_s = now_s
            self._collect.put(True)

    def _run_pending_calls(self) -> None:
        while self._pending_calls:
            self._pending_calls.popleft()()

    def call_safely(self, callback: Callable[[], None]) -> None:
        """Call a user's callback. Its errors are counted, and the first one is printed."""
        try:
            callback()
        except Exception as error:  # noqa: BLE001  an observer must not be able to end the run
            if not self.callback_failures.count:
                traceback.print_exc()
            self.callback_failures.note(describe("callback", error))

    def release_and_report(
        self, state: RequestState, image: "Image | None" = None, latents: torch.Tensor | None = None
    ) -> None:
        """Release the tensors of a request that has ended, and report it to the collector. Thread-safe."""
        with self.changed:
            self.prepared.pop(state.request.request_id, None)
        self.queue_call(partial(self._report, state, image, latents))

    def discard(self, request_id: int) -> None:
        """Discard a withdrawn request without reporting it to the collector. The caller holds the lock."""
        del self.open[request_id]
        self.prepared.pop(request_id, None)
        self.watches.pop(request_id, None)

    def show_progress(self, batch: Sequence[PreparedRequest], peek: Peek) -> None:
        """Notify the watches of a batch that has taken a step, and queue their partial images."""
        for prepared in batch:
            watch = self.watches.get(prepared.request.request_id)
            if watch is None:
                continue
            steps_done = prepared.state.num_passed
            self.queue_call(partial(self.call_safely, partial(watch.on_step, steps_done)), may_lag=watch.may_lag)
            if watch.is_due(steps_done, prepared.state.num_requested) and (latents := peek(prepared)) is not None:
                watch.count_partial()
                # The thread that decodes them works on another stream.
                finish_stream(latents.device)
                self._postprocess.put(
                    partial(self._draw_partial, self.open[prepared.request.request_id], watch, latents)
                )

    def stop(self, *, at_once: bool = False) -> bool:
        """End the threads and close every open record. Return whether Ctrl-C was pressed meanwhile.

        Images whose denoising is done are still written, unless Ctrl-C is pressed or `at_once` is set.
        """
        with self.changed:
            self._is_running = False
        self._prepare.discard_queued()
        if at_once:
            self._postprocess.discard_queued()
        was_interrupted = False
        for stage in (self.recorder, self._prepare, self._postprocess):
            try:
                if stage is not None:
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
            self.release_and_report(state)
        self._collect.put(True)
        try:
            self._collect.finish()
        except KeyboardInterrupt:
            was_interrupted = True
            self._collect.finish()
        return was_interrupted

    def _report(self, state: RequestState, image: "Image | None", latents: torch.Tensor | None) -> None:
        with self.changed:
            # If Ctrl-C came right after the request was queued here, `stop` has queued it again.
            if self.open.get(state.request.request_id) is not state:
                return
            del self.open[state.request.request_id]
            self.watches.pop(state.request.request_id, None)
        assert state.record.finish_s is not None
        self.last_end_s = max(self.last_end_s or 0.0, state.record.finish_s)
        self._collector.on_finish(state.record, image, latents)
        if self._on_finish is not None:
            self.call_safely(partial(self._on_finish, state.record))
        if not self.open:
            self._wake()

    def _prepare_one(self, request: Request) -> None:
        prepared = failure = share = None
        is_refused = False
        with self.changed:
            if (waiting := self.open.get(request.request_id)) is not None:
                # An inline stage prepares it some time after it was queued.
                waiting.record.prepare_start_s = self._now_s()
        try:
            prepared = self._model.prepare(request)
            if request.edit is not None:
                share = self._model.family.geometry.active_share(request.edit)
        except Exception as error:  # noqa: BLE001  one failing request must not take down the others
            failure, is_refused = describe("preparing", error), isinstance(error, UsageError)
        if not is_refused:
            self.count_attempt("preparing", failure)
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
                if share is not None:
                    state.record.active_share, state.record.reused = share, prepared.template is not None
            self.prepare_next()
            self.changed.notify_all()
        if state is not None and prepared is None:
            self.release_and_report(state)

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
        self.queue_call(partial(self.call_safely, partial(watch.show, image)))

    def _postprocess_one(self, state: RequestState, latents: torch.Tensor) -> None:
        if state.record.status != "pending":  # cancelled meanwhile
            return
        request, image, failure = state.request, None, None
        try:
            image = self._model.decode(latents)
            self.count_attempt("postprocessing", None)
            if self._preview is not None:
                self.call_safely(partial(self._preview.learn, latents, image))
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
                self.count_attempt("postprocessing", failure)
            image = None
        status = "completed" if failure is None else "failed"
        with self.changed:
            # The request may have been cancelled during decoding, and another request may have its id by now.
            is_open = state.record.status == "pending"
            if is_open:
                self._scheduler.end(request.request_id, status, self._now_s(), failure)
                # A policy may wait for the decoder.
                self.changed.notify_all()
        if is_open:
            self.release_and_report(state, image, latents if failure is None else None)
        if self.recorder is not None and state.record.reused is False:
            # Not earlier, or the edit's own steps would wait for the passes of the record.
            self.recorder.request_recording(request)

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()
