"""The engine: prepare, denoise and postprocess stages, scheduled at the level of single denoising steps.

    submit -> [prepare thread] -> waiting -> (policy) -> active -> [postprocess thread] -> record
                                              `-- one step of all active requests, again and again

The thread that calls `Engine.run` denoises. Between any two steps it asks the policy who joins; requests leave as soon
as their own last step is done (PatchedServe sections 6.1.1 and 7; the iteration level of ORCA). Text encoding and image
decoding run first come, first served in two threads beside it. A request that fails in any stage ends as "failed" with
its reason, and the others go on.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..data.errors import UsageError
from ..data.files import atomic_write
from ..data.requests import Request
from .lifecycle import RequestRecord, RequestState, Status
from .model import ServedModel
from .policies import Policy, check_decision
from .prepared import PreparedRequest, describe
from .run_result import RunResult, StepRow
from .stages import StageThread

if TYPE_CHECKING:
    from PIL.Image import Image

ImagePath = Callable[[Request], Path | None]


@dataclass(slots=True)
class _Entry:
    """A submitted request with its tensors; these are dropped as soon as it ends."""

    state: RequestState
    prepared: PreparedRequest | None = None


class Engine:
    """Serves requests with one model under one policy. An engine runs once.

    Args:
        model: the loaded model.
        policy: asked between steps who joins and who is dropped.
        max_batch_size: largest number of requests in the denoise batch.
        image_path: says where to save each image (atomically; the suffix says the format), or None not to save it.
        keep_images, keep_latents: whether the result holds the images and the final latents.
        on_finish: called with each record when it becomes final, from the thread where that happens.
        on_step: called after each denoising iteration.

    Raises:
        UsageError: if `max_batch_size` is below 1.
    """

    def __init__(
        self,
        model: ServedModel,
        policy: Policy,
        *,
        max_batch_size: int = 16,
        image_path: ImagePath | None = None,
        keep_images: bool = False,
        keep_latents: bool = False,
        on_finish: Callable[[RequestRecord], None] | None = None,
        on_step: Callable[[StepRow], None] | None = None,
    ) -> None:
        if max_batch_size < 1:
            raise UsageError(f"max batch size is {max_batch_size}, but it must be at least 1")
        self._model = model
        self._policy = policy
        self._max_batch_size = max_batch_size
        self._image_path = image_path
        self._keep_images = keep_images
        self._keep_latents = keep_latents
        self._on_finish = on_finish
        self._on_step = on_step

        self._prepare = StageThread("psctl-prepare", self._prepare_one, device=model.device, on_error=self._wake)
        self._postprocess = StageThread(
            "psctl-postprocess", self._postprocess_one, device=model.device, on_error=self._wake
        )
        # Guards `_entries`, `_ready`, `_num_preparing`, `_is_closed` and the closing of records.
        self._changed = threading.Condition()
        self._entries: dict[int, _Entry] = {}
        self._ready: deque[_Entry] = deque()
        self._num_preparing = 0
        self._is_closed = False
        self._waiting: dict[int, _Entry] = {}
        self._active: dict[int, _Entry] = {}
        self._steps: list[StepRow] = []
        self._images: dict[int, Image] = {}
        self._latents: dict[int, torch.Tensor] = {}
        self._zero: float | None = None

    def start(self) -> None:
        """Start the stage threads and set the engine's clock to 0. `run` does it if it has not been done.

        Raises RuntimeError if the engine was started before.
        """
        if self._zero is not None:
            raise RuntimeError("an engine runs once; make a new one")
        self._zero = time.perf_counter()
        self._prepare.start()
        self._postprocess.start()

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
        entry = _Entry(RequestState.of(request, standalone_s))
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the engine is closed: no more requests can be submitted")
            if request.request_id in self._entries:
                raise UsageError(f"request id {request.request_id} is used twice")
            self._entries[request.request_id] = entry
            self._num_preparing += 1
        self._prepare.put(entry)

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
            was_interrupted |= self._shut_down()
        for stage in (self._prepare, self._postprocess):
            if stage.error is not None:
                raise stage.error
        records = [self._entries[request_id].state.record for request_id in sorted(self._entries)]
        duration_s = max((record.finish_s for record in records if record.finish_s is not None), default=self.now_s())
        return RunResult(records, self._steps, duration_s, was_interrupted, self._images, self._latents)

    # Denoise stage: the thread that called `run`

    def _denoise_until_closed(self) -> None:
        while self._take_ready():
            self._ask_policy()
            if self._active:
                self._step()

    def _take_ready(self) -> bool:
        """Move prepared requests to the waiting queue; sleep while there is nothing to do. False: all is done."""
        with self._changed:
            while not (self._ready or self._waiting or self._active):
                if self._is_closed and not self._num_preparing:
                    return False
                if self._prepare.error is not None or self._postprocess.error is not None:
                    return False
                self._changed.wait()
            while self._ready:
                entry = self._ready.popleft()
                self._waiting[entry.state.request.request_id] = entry
        return True

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _ask_policy(self) -> None:
        if not self._waiting:
            return
        waiting = [entry.state.view() for entry in self._waiting.values()]
        active = [entry.state.view() for entry in self._active.values()]
        waiting.sort(key=lambda view: (view.arrival_s, view.request_id))
        now_s = self.now_s()
        decision = self._policy.decide(now_s, waiting, active, self._max_batch_size)
        check_decision(
            decision,
            waiting,
            active,
            self._max_batch_size,
            requires_one_resolution=self._policy.requires_one_resolution,
        )
        for request_id in decision.admit:
            entry = self._waiting.pop(request_id)
            entry.state.record.admitted_s = now_s
            self._active[request_id] = entry
        for request_id, reason in decision.drop:
            self._end(self._waiting.pop(request_id), "discarded", reason)

    def _step(self) -> None:
        batch = [entry.prepared for entry in self._active.values() if entry.prepared is not None]
        start_s = self.now_s()
        failures = self._model.stepper.step(batch)
        end_s = self.now_s()
        resolutions = dict(Counter(str(prepared.request.resolution) for prepared in batch))
        row = StepRow(len(self._steps), start_s, end_s - start_s, len(batch), len(self._waiting), resolutions)
        self._steps.append(row)
        if self._on_step is not None:
            self._on_step(row)
        for request_id, entry in list(self._active.items()):
            if request_id in failures:
                del self._active[request_id]
                self._end(entry, "failed", failures[request_id])
                continue
            assert entry.prepared is not None
            progress = entry.prepared.state
            # In the steps that were asked for: a scheduler of second order takes nearly twice as many.
            entry.state.steps_done = progress.steps_done * entry.state.request.num_inference_steps // progress.num_steps
            if progress.is_finished:
                entry.state.record.denoise_end_s = end_s
                del self._active[request_id]
                self._postprocess.put(entry)

    # Prepare and postprocess stages: threads of their own

    def _prepare_one(self, entry: _Entry) -> None:
        record = entry.state.record
        record.prepare_start_s = self.now_s()
        try:
            entry.prepared = self._model.prepare(entry.state.request)
        except Exception as error:  # noqa: BLE001  one failing request must not take down the others
            self._end(entry, "failed", describe("preparing", error))
        record.prepare_end_s = self.now_s()
        with self._changed:
            self._num_preparing -= 1
            if entry.prepared is not None:
                self._ready.append(entry)
            self._changed.notify_all()

    def _postprocess_one(self, entry: _Entry) -> None:
        assert entry.prepared is not None
        request, latents = entry.state.request, entry.prepared.latents
        try:
            image = self._model.decode(latents)
            path = None if self._image_path is None else self._image_path(request)
            if path is not None:
                with atomic_write(path) as temporary:
                    image.save(temporary)  # the format by the suffix
                entry.state.record.image_path = str(path)
        except Exception as error:  # noqa: BLE001  as above
            self._end(entry, "failed", describe("postprocessing", error))
            return
        if self._keep_images:
            self._images[request.request_id] = image
        if self._keep_latents:
            self._latents[request.request_id] = latents
        self._end(entry, "completed")

    # The end of a request, and of the run

    def _end(self, entry: _Entry, status: Status, reason: str | None = None) -> None:
        with self._changed:
            if entry.state.record.status != "pending":
                return
            entry.state.record.close(status, self.now_s(), reason)
            entry.prepared = None
        if self._on_finish is not None:
            self._on_finish(entry.state.record)

    def _shut_down(self) -> bool:
        """End both threads and close every open record. Returns whether Ctrl-C came meanwhile."""
        self.close()
        self._prepare.discard_queued()
        was_interrupted = False
        for stage in (self._prepare, self._postprocess):
            try:
                stage.finish()
            except KeyboardInterrupt:
                was_interrupted = True
                self._postprocess.discard_queued()
        with self._changed:
            open_entries = [entry for entry in self._entries.values() if entry.state.record.status == "pending"]
        for entry in open_entries:
            self._end(entry, "cancelled", "the run was stopped before it had finished")
        return was_interrupted
