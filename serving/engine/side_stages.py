"""The two stages beside the denoise loop, prepare and postprocess, and the thread of the collector."""

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
MOST_FAILED = 8
"""Tries of one stage in a row that fail before a service takes its engine for broken. An error that sticks, such as one
of CUDA, fails all of them, and each is an error for a client; that so many requests in a row fail for reasons of their
own is possible and rare.
"""
ImagePath = Callable[[Request], Path | None]
OnImage = Callable[[Request, "Image"], object]
Peek = Callable[[PreparedRequest], torch.Tensor | None]
"""`core.stepper.Stepper.peek`."""


class SideStages:
    """Prepares requests in one thread, decodes and saves their images in another, and tells the collector in a third.
    With the option `stages` at `inline`, it does the first two between steps, in the thread that denoises.

    A request that fails in the first two ends as "failed" with its reason, and the others continue. Arguments are those
    of `Engine`.

    The collector has a thread of its own because Ctrl-C may come anywhere in the one that denoises, and only there: so
    no request is told twice or forgotten.

    Attributes:
        changed: guards the scheduler, `open` and `prepared`; notified when the denoise loop may have something to do.
        open: requests of which the collector has not been told yet, by id.
        prepared: encoded text and latents by request id, from the end of preparing until the last step.
        watches: who is told how far a request has come, by its id; those of open requests.
        recorder: of templates that edits have missed, if they are recorded.
        callback_failures: errors of callbacks, which end nothing.
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
        on_image: OnImage | None,
        preview: Preview | None,
        records_templates: bool,
        most_failed: int | None,
    ) -> None:
        self.changed = threading.Condition()
        self.open: dict[int, RequestState] = {}
        self.prepared: dict[int, PreparedRequest] = {}
        self.watches: dict[int, Watch] = {}
        self.last_end_s: float | None = None
        self.callback_failures = Failures()
        self._most_failed = most_failed
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
        self._told: deque[Callable[[], None]] = deque()
        self._handed_over_s = 0.0
        self._collect = StageThread[bool](
            "psctl-collect", lambda told: self._tell_all(), device=torch.device("cpu"), on_error=self._wake
        )

    @property
    def error(self) -> BaseException | None:
        """What has ended one of the threads, a defect or an error of a callback; or that everything fails (`tried`)."""
        recording = None if self.recorder is None else self.recorder.error
        return self._prepare.error or self._postprocess.error or self._collect.error or recording or self._broken

    def tried(self, stage: str, failure: str | None) -> None:
        """Count what fails in a row in a stage, of which one thread at a time tells; a success, which has no failure,
        resets the count. After `most_failed` of them `error` is set.
        """
        self._failed_in_a_row[stage] = num_failed = 0 if failure is None else self._failed_in_a_row[stage] + 1
        if num_failed == self._most_failed:
            self._broken = RunError(f"{num_failed} tries in a row have failed, the last one with {failure}")
            self._wake()

    @property
    def is_stalled(self) -> bool:
        """Whether preparing or decoding one request, or a callback, stands still."""
        return any(stage.pulse.is_stalled for stage in (self._prepare, self._postprocess, self._collect))

    @property
    def is_due(self) -> bool:
        """Whether `serve` has something to do."""
        return any(stage.is_due for stage in self._inline)

    def serve(self) -> None:
        """Prepare and postprocess what is due, where that is the denoise loop's to do."""
        for stage in self._inline:
            stage.serve()

    def start(self) -> None:
        """Start the threads, and to prepare what was submitted before."""
        for stage in (self._prepare, self._postprocess, self._collect, self.recorder):
            if stage is not None:
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
        state.record.steps_reused = prepared.steps_reused
        # The latents are all that decoding needs; the rest, mostly the encoded text, would wait with them.
        self._postprocess.put(partial(self._postprocess_one, state, prepared.latents))

    def collect(self, tell: Callable[[], None], *, may_lag: bool = False) -> None:
        """Have something told in the collector's thread, in the order of the calls; what may lag, some time later."""
        self._told.append(tell)
        now_s = time.perf_counter()
        if not may_lag or now_s - self._handed_over_s > _LAG_S:
            self._handed_over_s = now_s
            self._collect.put(True)

    def _tell_all(self) -> None:
        while self._told:
            self._told.popleft()()

    def call(self, callback: Callable[[], None]) -> None:
        """Call what others have given, whose errors are counted, and warned of once."""
        try:
            callback()
        except Exception as error:  # noqa: BLE001  whoever looks on must not be able to end the run
            if not self.callback_failures.count:
                traceback.print_exc()
            self.callback_failures.note(describe("callback", error))

    def let_go(self, state: RequestState, image: "Image | None" = None, latents: torch.Tensor | None = None) -> None:
        """Release the tensors of a request that has ended, and tell the collector; any thread may."""
        with self.changed:
            self.prepared.pop(state.request.request_id, None)
        self.collect(partial(self._tell, state, image, latents))

    def forget(self, request_id: int) -> None:
        """Let go of a request that was given up, of which the collector is not told. The lock is held."""
        del self.open[request_id]
        self.prepared.pop(request_id, None)
        self.watches.pop(request_id, None)

    def show_progress(self, batch: Sequence[PreparedRequest], peek: Peek) -> None:
        """Tell those who watch requests of a batch that has taken a step, and have their partial images drawn."""
        for prepared in batch:
            watch = self.watches.get(prepared.request.request_id)
            if watch is None:
                continue
            steps_done = prepared.state.num_passed
            self.collect(partial(self.call, partial(watch.on_step, steps_done)), may_lag=watch.may_lag)
            if watch.is_due(steps_done, prepared.state.num_wanted) and (latents := peek(prepared)) is not None:
                watch.taken()
                # The thread that draws them works on another stream.
                finish_stream(latents.device)
                self._postprocess.put(
                    partial(self._draw_partial, self.open[prepared.request.request_id], watch, latents)
                )

    def stop(self, *, at_once: bool = False) -> bool:
        """End the threads and close every open record. Returns whether Ctrl-C came meanwhile.

        Images whose denoising is done are still written, unless Ctrl-C comes or it is to be `at_once`.
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
            self.let_go(state)
        self._collect.put(True)
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
            self.watches.pop(state.request.request_id, None)
        assert state.record.finish_s is not None
        self.last_end_s = max(self.last_end_s or 0.0, state.record.finish_s)
        self._collector.on_finish(state.record, image, latents)
        if self._on_finish is not None:
            self.call(partial(self._on_finish, state.record))

    def _prepare_one(self, request: Request) -> None:
        prepared = failure = share = None
        is_refused = False
        with self.changed:
            if (waiting := self.open.get(request.request_id)) is not None:
                # Between steps its turn comes some time after it was put here.
                waiting.record.prepare_start_s = self._now_s()
        try:
            prepared = self._model.prepare(request)
            if request.edit is not None:
                share = self._model.family.geometry.active_share(request.edit)
        except Exception as error:  # noqa: BLE001  one failing request must not take down the others
            failure, is_refused = describe("preparing", error), isinstance(error, UsageError)
        if not is_refused:
            self.tried("preparing", failure)
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
            self.let_go(state)

    def _draw_partial(self, state: RequestState, watch: Watch, latents: torch.Tensor) -> None:
        if state.record.status != "pending":  # cancelled meanwhile
            return
        try:
            image = None if self._preview is None else self._preview.draw(latents)
            if image is None:
                image = self._model.decode(latents)
            if state.request.edit is not None:
                image = pasted(image, state.request.edit)
        except Exception:  # noqa: BLE001  its last image is decoded alike, and tells what is wrong
            return
        self.collect(partial(self.call, partial(watch.show, image)))

    def _postprocess_one(self, state: RequestState, latents: torch.Tensor) -> None:
        if state.record.status != "pending":  # cancelled meanwhile
            return
        request, image, failure = state.request, None, None
        try:
            image = self._model.decode(latents)
            self.tried("postprocessing", None)
            if self._preview is not None:
                self.call(partial(self._preview.learn, latents, image))
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
                self.tried("postprocessing", failure)
            image = None
        status = "completed" if failure is None else "failed"
        with self.changed:
            # It may have been cancelled while it was decoded, and another request may have its id by now.
            is_open = state.record.status == "pending"
            if is_open:
                self._scheduler.end(request.request_id, status, self._now_s(), failure)
                # A policy may wait for the decoder.
                self.changed.notify_all()
        if is_open:
            self.let_go(state, image, latents if failure is None else None)
        if self.recorder is not None and state.record.reused is False:
            # Not before, or its own steps would wait for those of the record.
            self.recorder.want(request)

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()
