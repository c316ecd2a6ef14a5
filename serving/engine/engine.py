"""The engine: prepare, denoise and postprocess stages, scheduled at the level of single denoising steps.

    submit -> waiting -> (policy) -> joining -> active -> [postprocess thread] -> record
                 `-- [prepare thread] --^          `-- one step of all active requests, repeatedly

The thread that calls `Engine.run` denoises. Between any two steps the `Scheduler` asks the policy which requests join;
a request leaves as soon as its own last step is done (PatchedServe sections 6.1.1 and 7; ORCA's iteration level). The
policy runs between steps, not during one: on a CPU it would take cores from the step, and on a GPU the decision would
be about a batch that no longer exists when the step ends. `Collector.on_decision` receives its cost.

The engine keeps only the state of open requests. Ended requests go to a collector, so that a run may last for weeks.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

from ...data.errors import UsageError
from ...data.requests import Request
from ..core.checked_request import CheckedRequest
from ..core.failures import Failures, FailureStreaks
from ..core.request_state import RequestRecord, RequestState
from ..core.step_row import StepRow
from ..models.served import ServedModel
from ..scheduling.policies import Policy, StepLatencyPredictor
from ..scheduling.scheduler import Scheduler
from .collectors import Collector, InMemory
from .open_requests import OpenRequest, OpenRequests
from .preview import Preview
from .recorder import TemplateRecorder
from .reports import Reports
from .run_result import RunResult
from .side_stages import ImagePath, OnImage, Postprocessing, Preparing
from .stages import InlineStage, UsualDuration
from .watch import Watch

_CTRL_C_S = 0.5
"""Interval at which an idle engine wakes, as Ctrl-C wakes only the thread to which the system delivers it."""


class Engine:
    """Serves requests with one model under one policy. An engine runs once.

    Args:
        model: the loaded model.
        policy, predictor, max_batch_size, max_prepared_ahead: as for `Scheduler`.
        collector: receives the results of the run; None keeps records and steps in memory, for the result.
        image_path: returns the path for each image (written atomically; the suffix sets the format), or None for an
            image that is not saved; None saves no images.
        on_finish: called with each final record, from the collector's thread.
        on_step: called after each denoising iteration, from the same thread. Errors of `on_finish` and `on_step` are
            only counted (`callback_failures`), while an error of the collector ends the run: its data would be lost.
        on_image: called with each image before its record closes, in the thread that decodes; an error fails the
            request.
        preview: draws partial images for watches, as soon as it has learnt enough; None: they are decoded.
        records_templates: whether missing templates of edits are recorded, in free places of the batch.
        max_failures: number of failures in a row that end the run with a RunError: of steps that failed for all of
            their requests, or of requests that could not be prepared, or decoded; None: the run continues.

    Attributes:
        collector: collector of the run.

    Raises:
        UsageError: the arguments are not valid, as in `Scheduler`.
    """

    def __init__(
        self,
        model: ServedModel,
        policy: Policy,
        *,
        predictor: StepLatencyPredictor | None = None,
        max_batch_size: int = 16,
        max_prepared_ahead: int | None = None,
        collector: Collector | None = None,
        image_path: ImagePath | None = None,
        on_finish: Callable[[RequestRecord], None] | None = None,
        on_step: Callable[[StepRow], None] | None = None,
        on_image: OnImage | None = None,
        preview: Preview | None = None,
        records_templates: bool = False,
        max_failures: int | None = None,
    ) -> None:
        self._model = model
        self.collector = collector = collector or InMemory()
        self._on_step = on_step
        # Seconds that the policy has taken since the last step.
        self._decided_s = 0.0
        self._scheduler = scheduler = Scheduler(
            policy,
            predictor,
            max_batch_size=max_batch_size,
            max_prepared_ahead=max_prepared_ahead,
            on_decision=self._decided,
        )
        self._open = open_requests = OpenRequests(scheduler, self.now_s)
        self._reports = reports = Reports(open_requests, collector, on_finish)
        self._failures = failures = FailureStreaks(max_failures, open_requests.wake)
        self._preparing = Preparing(model, open_requests, reports, failures)
        self._recorder = None
        if records_templates:
            self._recorder = TemplateRecorder(model, open_requests.changed, open_requests.wake)
        self._postprocessing = Postprocessing(
            model,
            open_requests,
            reports,
            failures,
            self._recorder,
            image_path=image_path,
            on_image=on_image,
            preview=preview,
        )
        self._stages = self._preparing.stage, self._postprocessing.stage, reports.stage
        self._inline = [stage for stage in self._stages if isinstance(stage, InlineStage)]
        # Guards the fields below, too.
        self._changed = open_requests.changed
        self._is_closed = self._is_aborted = False
        self._cancelled: list[tuple[RequestState, str]] = []
        self._zero: float | None = None
        # Time at which the last step ended or the batch was last empty, and the seconds that steps take.
        self._progress_s, self._usual_step = time.monotonic(), UsualDuration()

    @property
    def callback_failures(self) -> Failures:
        """Number of failures of callbacks and watches, and the first reason, whose traceback went to stderr."""
        return self._reports.callback_failures

    @property
    def num_active(self) -> int:
        """Number of requests in the batch."""
        return len(self._scheduler.active)

    @property
    def num_waiting(self) -> int:
        """Number of requests that are not in the batch yet."""
        return self._scheduler.num_waiting

    @property
    def max_batch_size(self) -> int:
        """Largest number of requests in the batch. It may be changed at any time; requests in the batch stay."""
        return self._scheduler.max_batch_size

    @max_batch_size.setter
    def max_batch_size(self, size: int) -> None:
        with self._changed:
            self._scheduler.max_batch_size = size
            self._preparing.put_next()
            self._changed.notify_all()

    @property
    def pixel_steps(self) -> int:
        """Pixels times remaining steps, summed over all requests."""
        return self._scheduler.pixel_steps

    @property
    def is_stalled(self) -> bool:
        """Whether the current step of the batch, preparing or decoding one request, or a callback takes far longer than
        recent ones (`stages.STALLED_S`). Thread-safe.
        """
        is_stage_stalled = any(stage.pulse.is_stalled for stage in self._stages)
        return is_stage_stalled or (self.num_active > 0 and self._usual_step.is_exceeded(self._progress_s))

    def start(self) -> None:
        """Start the stage threads and set the engine's clock to 0. `run` calls this if it has not been called.

        Raises RuntimeError if the engine was started before.
        """
        if self._zero is not None:
            raise RuntimeError("an engine runs once; make a new one")
        self._zero = time.perf_counter()
        for stage in (*self._stages, self._recorder):
            if stage is not None:
                stage.start()
        with self._changed:
            self._preparing.is_running = True
            self._preparing.put_next()

    def now_s(self) -> float:
        """Seconds since `start`, on a clock that never goes back. Raises RuntimeError before `start`."""
        if self._zero is None:
            raise RuntimeError("the engine has not been started")
        return time.perf_counter() - self._zero

    def wait_until(self, time_s: float, *, skips_idle: bool = False) -> bool:
        """Wait for a time on the engine's clock; return False as soon as the engine is closed. Thread-safe.

        With `skips_idle` the clock is set forward to that time once no request is open. An engine that records
        templates, which it does while it is idle, never skips.
        """
        with self._changed:
            while not self._is_closed and (left_s := time_s - self.now_s()) > 0:
                if skips_idle and not self._open.by_id and self._recorder is None:
                    assert self._zero is not None
                    self._zero -= left_s
                else:
                    self._changed.wait(left_s)
            return not self._is_closed

    def submit(self, request: Request, *, standalone_s: float | None = None, watch: Watch | None = None) -> None:
        """Check a request, and submit it as `submit_checked` does.

        Args:
            request: the request. Its `arrival_s` is the time on the engine's clock from which its latency counts.
            standalone_s: its latency when served alone, for policies that use it.
            watch: receives its progress.

        Raises:
            UsageError: if the model cannot serve it, or an open request has its id.
            RuntimeError: if the engine is closed.
        """
        self.submit_checked(self._model.checked(request, standalone_s), watch=watch)

    def submit_checked(self, checked: CheckedRequest, *, watch: Watch | None = None) -> None:
        """Submit a request that the engine's model has checked. Thread-safe, also while the engine runs.

        An id is in use until its request is reported to the collector as ended. It is free again from then on, in
        `on_finish` already, and the engine keeps nothing about its previous use. `watch` receives its progress. Raises
        as `submit`.
        """
        request, view = checked.request, checked.view
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the engine is closed: no more requests can be submitted")
            if request.request_id in self._open.by_id:
                raise UsageError(f"request id {request.request_id} is used twice")
            self._open.by_id[request.request_id] = OpenRequest(self._scheduler.add(request, view), watch)
            self._preparing.put_next()
            self._changed.notify_all()

    def close(self) -> None:
        """Accept no more requests; `run` returns when the submitted ones have ended."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def cancel(self, request_id: int, reason: str) -> bool:
        """End an open request as "cancelled" before the next step, in whatever stage it is. Thread-safe.

        Returns whether there is an open request with this id. It may still be completed meanwhile.
        """
        with self._changed:
            found = self._open.by_id.get(request_id)
            if found is not None:
                self._cancelled.append((found.state, reason))
                self._changed.notify_all()
        return found is not None

    def withdraw_waiting(self) -> list[Request]:
        """Remove and return all requests that wait for the batch. They are not reported anywhere. Thread-safe."""
        with self._changed:
            requests = self._scheduler.withdraw_waiting()
            for request in requests:
                del self._open.by_id[request.request_id]
            self._changed.notify_all()
        return requests

    def abort(self) -> None:
        """End the run before the next step; all requests that are open then are "cancelled". Thread-safe."""
        with self._changed:
            self._is_closed = self._is_aborted = True
            self._changed.notify_all()

    def run(self) -> RunResult:
        """Serve until the engine is closed and every request has ended; blocks the calling thread.

        Ctrl-C ends the run: images whose denoising is done are still written, all other requests are "cancelled", and
        the result is returned with `was_interrupted`. A second Ctrl-C discards the images that are not written yet, as
        `abort` does immediately.

        Raises RunError if everything fails (`max_failures`). Requests that are open then are "cancelled".
        """
        if self._zero is None:
            self.start()
        was_interrupted = False
        try:
            self._denoise_until_closed()
        except KeyboardInterrupt:
            was_interrupted = True
        finally:
            self.close()
            was_interrupted |= self._stop() or self._is_aborted
        if (error := self._error) is not None:
            raise error
        duration_s = self.now_s() if self._reports.last_end_s is None else self._reports.last_end_s
        return RunResult(duration_s, was_interrupted, self._scheduler.max_prepared, self.collector)

    def _decided(self, decision_s: float) -> None:
        self._decided_s += decision_s
        self._reports.queue_call(partial(self.collector.on_decision, decision_s), may_lag=True)

    @property
    def _error(self) -> BaseException | None:
        """Error that has ended one of the threads, or that of a stage in which everything fails."""
        sources = (*self._stages, self._recorder, self._failures)
        return next((each.error for each in sources if each is not None and each.error is not None), None)

    def _denoise_until_closed(self) -> None:
        scheduler, requests = self._scheduler, self._open.by_id
        while True:
            with self._changed:
                while not (self._has_work or self._is_aborted or self._cancelled or self._error):
                    if self._is_closed and scheduler.is_idle:
                        return
                    self._changed.wait(_CTRL_C_S)
                if self._is_aborted or self._error is not None:
                    return
                ended = self._end_cancelled()
                if not scheduler.active:
                    self._progress_s = time.monotonic()
                # Inline stages run first, so that requests prepared in them can take the next step.
                if not (is_due := self._is_stage_due):
                    ended += scheduler.decide(self.now_s())
                    self._preparing.put_next()
                num_waiting = scheduler.num_waiting
                batch = [requests[state.request.request_id] for state in scheduler.active]
                can_step, may_record = scheduler.can_step, self._may_record
            for state in ended:
                self._reports.report(state)
            if is_due:
                self._serve_stages()
                continue
            if can_step:
                self._step(batch, num_waiting)
            if may_record and self._recorder is not None:
                # One at a time while requests are active, as more passes would delay their steps.
                self._recorder.take_passes(1 if batch else self.max_batch_size)

    @property
    def _has_work(self) -> bool:
        return self._scheduler.is_due or self._is_stage_due or self._may_record

    @property
    def _is_stage_due(self) -> bool:
        return any(stage.is_due for stage in self._inline)

    def _serve_stages(self) -> None:
        """Run the queued work of stages that run inline."""
        for stage in self._inline:
            stage.serve()

    @property
    def _may_record(self) -> bool:
        """Whether passes of a template are pending and a place is free for them; never once the engine is closed."""
        recorder, scheduler = self._recorder, self._scheduler
        is_free = len(scheduler.active) < scheduler.max_batch_size
        return recorder is not None and recorder.is_due and is_free and not self._is_closed

    def _end_cancelled(self) -> list[RequestState]:
        """Close the cancelled requests that have not ended meanwhile. The caller holds the lock."""
        cancelled, self._cancelled = self._cancelled, []
        now_s = self.now_s()
        # Another request may have the id by now, so the record shows whether it is still the same request.
        return [
            state
            for state, reason in cancelled
            if state.record.status == "pending"
            and self._scheduler.end(state.request.request_id, "cancelled", now_s, reason)
        ]

    def _step(self, batch: Sequence[OpenRequest], num_waiting: int) -> None:
        prepared = [each.prepared for each in batch if each.prepared is not None]
        assert len(prepared) == len(batch), "requests join the batch when they are prepared"
        start_s = self.now_s()
        failures = self._model.stepper.step(prepared)
        end_s = self.now_s()
        self._progress_s = time.monotonic()
        self._usual_step.note(end_s - start_s)
        self._failures.count("denoising", next(iter(failures.values())) if len(failures) == len(batch) else None)
        decided_s, self._decided_s = self._decided_s, 0.0
        scheduler = self._scheduler
        ran, forecast = None, self._model.stepper.forecast
        if forecast:
            ran = [each.request.resolution for each in prepared if each.request.request_id not in forecast]
        seen, took_s = sum(each.request.pixels_seen for each in prepared), end_s - start_s
        row = StepRow.of(scheduler.num_steps, start_s, took_s, scheduler.batch, num_waiting, decided_s, ran, seen)
        with self._changed:
            left = scheduler.stepped(end_s, row.duration_s, failures)
        self._reports.queue_call(partial(self.collector.on_step, row), may_lag=True)
        if self._on_step is not None:
            self._reports.queue_callback(partial(self._on_step, row))
        self._postprocessing.show_progress(batch)
        for state in left:
            if state.stage == "decoding":
                self._postprocessing.put(state)
            else:
                self._reports.report(state)

    def _stop(self) -> bool:
        """End the threads and close every open record. Return whether Ctrl-C was pressed meanwhile.

        Images whose denoising is done are still written, unless Ctrl-C is pressed or the run is aborted.
        """
        preparing, postprocessing = self._preparing.stage, self._postprocessing.stage
        with self._changed:
            self._preparing.is_running = False
        preparing.discard_queued()
        if self._is_aborted:
            postprocessing.discard_queued()
        was_interrupted = False
        for stage in (self._recorder, preparing, postprocessing):
            try:
                if stage is not None:
                    stage.finish()
            except KeyboardInterrupt:
                was_interrupted = True
                postprocessing.discard_queued()
        with self._changed:
            now_s, reason = self.now_s(), "the run was stopped before it had finished"
            self._scheduler.end_all("cancelled", now_s, reason)
            left = [each.state for each in self._open.by_id.values()]
        for state in left:
            if state.record.status == "pending":  # Ctrl-C came when the scheduler was about to close it
                state.record.close("cancelled", now_s, reason)
            self._reports.report(state)
        return self._reports.finish() or was_interrupted
