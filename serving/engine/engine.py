"""The engine: prepare, denoise and postprocess stages, scheduled at the level of single denoising steps.

    submit -> waiting -> (policy) -> joining -> active -> [postprocess thread] -> record
                 `-- [prepare thread] --^          `-- one step of all active requests, again and again

The thread that calls `Engine.run` denoises. Between any two steps the `Scheduler` asks the policy which requests join;
a request leaves as soon as its own last step is done (PatchedServe sections 6.1.1 and 7; ORCA's iteration level). The
policy is asked between steps, not during one: on a CPU it would take cores from the step, and on a GPU the decision
would be about a batch that no longer exists when the step ends. `RunResult.decision_times_s` says what that costs.
"""

import time
from collections.abc import Callable, Sequence

from ...data.errors import UsageError
from ...data.requests import Request
from ..core.prepared import PreparedRequest
from ..core.request_state import RequestRecord
from ..core.step_row import StepRow
from ..models.served import ServedModel
from ..scheduling.policies import Policy, StepLatencyPredictor
from ..scheduling.scheduler import Scheduler
from .run_result import RunResult
from .side_stages import ImagePath, SideStages


class Engine:
    """Serves requests with one model under one policy. An engine runs once.

    Args:
        model: the loaded model.
        policy, predictor, max_batch_size, max_prepared_ahead: as for `Scheduler`.
        image_path: where to save each image (atomically; the suffix sets the format); None does not save it.
        keep_images, keep_latents: whether the result holds the images and the final latents.
        on_finish: called with each record when it becomes final, from the thread where that happens.
        on_step: called after each denoising iteration.

    Raises:
        UsageError: as `Scheduler`.
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
        self._model = model
        self._on_step = on_step
        self._result = RunResult()
        self._num_decisions_noted = 0
        self._scheduler = Scheduler(
            policy,
            predictor,
            max_batch_size=max_batch_size,
            max_prepared_ahead=max_prepared_ahead,
            on_decision=self._result.decision_times_s.append,
        )
        self._stages = SideStages(
            model,
            self._scheduler,
            self._result,
            self.now_s,
            image_path=image_path,
            keep_images=keep_images,
            keep_latents=keep_latents,
            on_finish=on_finish,
        )
        # Guards the scheduler and the fields below.
        self._changed = self._stages.changed
        self._records: dict[int, RequestRecord] = {}
        self._is_closed = False
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
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the engine is closed: no more requests can be submitted")
            if request.request_id in self._records:
                raise UsageError(f"request id {request.request_id} is used twice")
            self._records[request.request_id] = self._scheduler.add(request, standalone_s).record
            self._stages.prepare_next()
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
        result = self._result
        try:
            self._denoise_until_closed()
        except KeyboardInterrupt:
            result.was_interrupted = True
        finally:
            self.close()
            result.was_interrupted |= self._stages.stop()
        if self._stages.error is not None:
            raise self._stages.error
        result.records = [self._records[request_id] for request_id in sorted(self._records)]
        ends_s = [record.finish_s for record in result.records if record.finish_s is not None]
        result.duration_s = max(ends_s, default=self.now_s())
        result.max_prepared = self._scheduler.max_prepared
        return result

    def _denoise_until_closed(self) -> None:
        scheduler, stages = self._scheduler, self._stages
        while True:
            with self._changed:
                while stages.error is None and not scheduler.is_due:
                    if self._is_closed and scheduler.is_idle:
                        return
                    self._changed.wait()
                if stages.error is not None:
                    return
                dropped = scheduler.decide(self.now_s())
                stages.prepare_next()
                num_waiting = scheduler.num_waiting
                batch = [stages.prepared[state.request.request_id] for state in scheduler.active]
                can_step = scheduler.can_step
            for state in dropped:
                stages.let_go(state)
            if can_step:
                self._step(batch, num_waiting)

    def _step(self, batch: Sequence[PreparedRequest], num_waiting: int) -> None:
        start_s = self.now_s()
        failures = self._model.stepper.step(batch)
        end_s = self.now_s()
        steps, decision_times_s = self._result.steps, self._result.decision_times_s
        decided_s = sum(decision_times_s[self._num_decisions_noted :])
        self._num_decisions_noted = len(decision_times_s)
        row = StepRow.of(len(steps), start_s, end_s - start_s, self._scheduler.batch, num_waiting, decided_s)
        steps.append(row)
        with self._changed:
            left = self._scheduler.stepped(end_s, row.duration_s, failures)
        if self._on_step is not None:
            self._on_step(row)
        for state in left:
            if state.stage == "decoding":
                self._stages.postprocess(state)
            else:
                self._stages.let_go(state)
