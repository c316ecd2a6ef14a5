"""The engine: prepare, denoise and postprocess stages, scheduled at the level of single denoising steps.

    submit -> waiting -> (policy) -> joining -> active -> [postprocess thread] -> record
                 `-- [prepare thread] --^          `-- one step of all active requests, again and again

The thread that calls `Engine.run` denoises. Between any two steps it asks the policy who joins; requests leave as soon
as their own last step is done (PatchedServe sections 6.1.1 and 7; the iteration level of ORCA). Text encoding and image
decoding run in two threads beside it. A request that fails in any stage ends as "failed" with its reason, and the
others go on.

The policy sees every request that has arrived, prepared or not. Only a few requests that wait are prepared ahead
(`PrepareOrder`); an admitted one that is not keeps its place in the batch and is prepared next. So memory does not grow
with the queue, and discarded requests mostly cost no text encoding.

The policy is asked between two steps, not beside one: on a CPU it would take the cores of the step, and on a GPU the
decision would be about a batch that no longer exists when the step ends. What that costs is measured
(`RunResult.decision_times_s`); policies read a `WaitingQueue`, so it does not grow with the queue.
"""

import time
from collections import deque
from collections.abc import Callable

from ...data.checks import require_counts
from ...data.requests import Request
from ..core.request_state import RequestRecord, RequestState
from ..core.step_row import StepRow
from ..models.served import ServedModel
from ..scheduling.policies import (
    LearningPredictor,
    Policy,
    StepLatencyPredictor,
    WaitingQueue,
    check_decision,
    require_predictor,
)
from .run_result import RunResult
from .side_stages import Entry, ImagePath, SideStages
from .step_log import StepLog


class Engine:
    """Serves requests with one model under one policy. An engine runs once.

    Args:
        model: the loaded model.
        policy: asked between steps who joins and who is dropped.
        predictor: step latencies, for policies that ask for them. If it can learn (`LearningPredictor`), it is told
            how long every step has taken.
        max_batch_size: largest number of requests in the denoise batch.
        max_prepared_ahead: largest number of waiting requests that are prepared; None for twice `max_batch_size`.
        image_path: says where to save each image (atomically; the suffix says the format), or None not to save it.
        keep_images, keep_latents: whether the result holds the images and the final latents.
        on_finish: called with each record when it becomes final, from the thread where that happens.
        on_step: called after each denoising iteration.

    Raises:
        UsageError: if `max_batch_size` or `max_prepared_ahead` is below 1, or the policy needs a predictor and there is
            none.
    """

    def __init__(
        self,
        model: ServedModel,
        policy: Policy,
        *,
        predictor: StepLatencyPredictor | None = None,
        max_batch_size: int = 16,
        max_prepared_ahead: int | None = None,
        image_path: ImagePath | None = None,
        keep_images: bool = False,
        keep_latents: bool = False,
        on_finish: Callable[[RequestRecord], None] | None = None,
        on_step: Callable[[StepRow], None] | None = None,
    ) -> None:
        require_counts({"max batch size": max_batch_size, "max prepared ahead": max_prepared_ahead})
        if policy.requires_predictor:
            require_predictor(policy, predictor)
        self._model = model
        self._policy = policy
        self._predictor = predictor
        self._max_batch_size = max_batch_size
        self._stages = SideStages(
            model,
            self.now_s,
            max_prepared_ahead=max_prepared_ahead or 2 * max_batch_size,
            image_path=image_path,
            keep_images=keep_images,
            keep_latents=keep_latents,
            on_finish=on_finish,
        )
        # Guards `_arrived` and `_is_closed`, too.
        self._changed = self._stages.changed
        self._arrived: deque[Entry] = deque()
        self._is_closed = False
        # Of the denoising thread alone. Joining: admitted, and not prepared yet.
        self._waiting = WaitingQueue()
        self._joining: dict[int, Entry] = {}
        self._active: dict[int, Entry] = {}
        self._log = StepLog(predictor if isinstance(predictor, LearningPredictor) else None, on_step)
        self._zero: float | None = None

    def start(self) -> None:
        """Start the stage threads and set the engine's clock to 0. `run` does it if it has not been done.

        Raises RuntimeError if the engine was started before.
        """
        if self._zero is not None:
            raise RuntimeError("an engine runs once; make a new one")
        self._zero = time.perf_counter()
        self._stages.start()

    def now_s(self) -> float:
        """Seconds since `start`, on a clock that never goes back. Raises RuntimeError before `start`."""
        if self._zero is None:
            raise RuntimeError("the engine has not been started")
        return time.perf_counter() - self._zero

    def submit(self, request: Request, *, standalone_s: float | None = None) -> None:
        """Hand in a request; any thread may, also while the engine runs.

        Args:
            request: what to draw. Its `arrival_s` is when its latency starts to count on the engine's clock.
            standalone_s: its latency when served alone, for policies that ask for it.

        Raises:
            UsageError: if the model cannot serve it, or its id was used before.
            RuntimeError: if the engine is closed.
        """
        self._model.check_request(request)
        entry = Entry(RequestState.of(request, standalone_s))
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the engine is closed: no more requests can be submitted")
            self._stages.add(entry)
            self._arrived.append(entry)
            self._changed.notify_all()

    def close(self) -> None:
        """Say that no more requests will come; `run` returns when the submitted ones have ended."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def run(self) -> RunResult:
        """Serve until the engine is closed and every request has ended; blocks the calling thread.

        Ctrl-C ends the run: images whose denoising is done are still written, all other requests are "cancelled", and
        the result is returned with `was_interrupted`. A second Ctrl-C gives up the images that are not written yet.
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
            was_interrupted |= self._stages.stop()
        stages, log = self._stages, self._log
        if stages.error is not None:
            raise stages.error
        records = [stages.entries[request_id].state.record for request_id in sorted(stages.entries)]
        duration_s = max((record.finish_s for record in records if record.finish_s is not None), default=self.now_s())
        return RunResult(
            records,
            log.rows,
            duration_s,
            was_interrupted,
            stages.images,
            stages.latents,
            log.decision_times_s,
            stages.max_prepared,
        )

    # What follows is the denoise stage: the thread that called `run`.

    def _denoise_until_closed(self) -> None:
        while self._take_news():
            self._ask_policy()
            if self._can_step():
                self._step()

    def _can_step(self) -> bool:
        """Whether somebody can take a step; a batch of one resolution takes its first step together."""
        return bool(self._active) and not (self._joining and self._policy.requires_one_resolution)

    def _is_idle(self) -> bool:
        """Whether somebody waits although nobody is in the batch or on the way there: the policy must be asked."""
        return bool(self._waiting) and not (self._active or self._joining)

    def _take_news(self) -> bool:
        """Take note of who has arrived or was prepared; sleep while there is nothing to do. False: all is done."""
        stages = self._stages
        with self._changed:
            if stages.error is not None:
                return False
            while not (self._arrived or stages.prepared_ids or self._can_step() or self._is_idle()):
                if self._is_closed and not (self._waiting or self._joining or self._active):
                    return False
                if stages.error is not None:
                    return False
                self._changed.wait()
            while self._arrived:
                self._waiting.add(self._arrived.popleft().state.view())
            while stages.prepared_ids:
                request_id = stages.prepared_ids.popleft()
                entry = stages.entries[request_id]
                if entry.state.record.status != "pending":
                    # Preparing it has failed: nobody is to admit it, or to wait for it.
                    self._joining.pop(request_id, None)
                    if self._waiting.get(request_id) is not None:
                        self._waiting.remove(request_id)
                elif self._joining.pop(request_id, None) is not None:
                    self._activate(entry)
        return True

    def _activate(self, entry: Entry) -> None:
        entry.state.record.admitted_s = self.now_s()
        self._active[entry.state.request.request_id] = entry

    def _ask_policy(self) -> None:
        if not self._waiting:
            return
        now_s = self.now_s()
        active = [entry.state.view() for entry in (*self._active.values(), *self._joining.values())]
        decision = self._policy.decide(now_s, self._waiting, active, self._max_batch_size, self._predictor)
        check_decision(
            decision,
            self._waiting,
            active,
            self._max_batch_size,
            requires_one_resolution=self._policy.requires_one_resolution,
        )
        with self._changed:
            for request_id in decision.admit:
                self._waiting.remove(request_id)
                entry = self._stages.demand(request_id)
                if entry.prepared is not None:
                    self._activate(entry)
                elif entry.state.record.status == "pending":
                    self._joining[request_id] = entry
            for request_id, _ in decision.drop:
                self._waiting.remove(request_id)
                self._stages.forget(request_id)
            self._stages.prepare_next()
        for request_id, reason in decision.drop:
            self._stages.end(self._stages.entries[request_id], "discarded", reason)
        self._log.note_decision(self.now_s() - now_s)

    def _step(self) -> None:
        batch = [entry.prepared for entry in self._active.values() if entry.prepared is not None]
        start_s = self.now_s()
        failures = self._model.stepper.step(batch)
        end_s = self.now_s()
        self._log.note_step(
            start_s,
            end_s - start_s,
            [prepared.request.resolution for prepared in batch],
            num_waiting=len(self._waiting) + len(self._joining),
            has_failed=bool(failures),
        )
        for request_id, entry in list(self._active.items()):
            if request_id in failures:
                del self._active[request_id]
                self._stages.end(entry, "failed", failures[request_id])
                continue
            assert entry.prepared is not None
            progress = entry.prepared.state
            # In the steps that were asked for: a scheduler of second order takes nearly twice as many.
            entry.state.steps_done = progress.steps_done * entry.state.request.num_inference_steps // progress.num_steps
            if progress.is_finished:
                entry.state.record.denoise_end_s = end_s
                del self._active[request_id]
                self._stages.postprocess(entry)
