"""Reports of a run: calls of its collector, and of its user's callbacks."""

import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..core.failures import Failures
from ..core.prepared import describe
from ..core.request_state import RequestRecord, RequestState
from .collectors import Collector
from .open_requests import OpenRequests
from .stages import StageThread

if TYPE_CHECKING:
    from PIL.Image import Image

_LAG_S = 0.05


class Reports:
    """Makes the calls of a run in order, in a thread of its own.

    Ctrl-C can interrupt the thread that denoises at any point, and only that thread: no request is reported twice or
    lost.

    Args:
        open_requests: the open requests of the engine.
        collector, on_finish: as for `Engine`.

    Attributes:
        callback_failures: errors of callbacks, which do not end the run.
        last_end_s: time at which the last of the requests reported to the collector ended; None if there is none.
        stage: the thread.
    """

    def __init__(
        self,
        open_requests: OpenRequests,
        collector: Collector,
        on_finish: Callable[[RequestRecord], None] | None,
    ) -> None:
        self._open, self._collector, self._on_finish = open_requests, collector, on_finish
        self.callback_failures = Failures()
        self.last_end_s: float | None = None
        self._pending: deque[Callable[[], None]] = deque()
        self._handed_over_s = 0.0
        self.stage = StageThread[bool](
            "psctl-collect", lambda _: self._make_calls(), device=torch.device("cpu"), on_error=open_requests.wake
        )

    def queue_call(self, call: Callable[[], None], *, may_lag: bool = False) -> None:
        """Queue a call. With `may_lag` it may be made some time later."""
        self._pending.append(call)
        now_s = time.perf_counter()
        if not may_lag or now_s - self._handed_over_s > _LAG_S:
            self._handed_over_s = now_s
            self.stage.put(True)

    def queue_callback(self, callback: Callable[[], None], *, may_lag: bool = False) -> None:
        """Queue a call of `call_safely`."""
        self.queue_call(partial(self.call_safely, callback), may_lag=may_lag)

    def call_safely(self, callback: Callable[[], None]) -> None:
        """Call a user's callback. Its errors are counted, and the first one is printed."""
        try:
            callback()
        except Exception as error:  # noqa: BLE001  an observer must not be able to end the run
            if not self.callback_failures.count:
                traceback.print_exc()
            self.callback_failures.note(describe("callback", error))

    def report(self, state: RequestState, image: "Image | None" = None, latents: torch.Tensor | None = None) -> None:
        """Release the tensors of a request that has ended, and report it to the collector. Thread-safe."""
        self._open.release(state)
        self.queue_call(partial(self._report, state, image, latents))

    def finish(self) -> bool:
        """Make all queued calls, and end the thread; return whether Ctrl-C was pressed meanwhile."""
        self.stage.put(True)
        try:
            self.stage.finish()
        except KeyboardInterrupt:
            self.stage.finish()
            return True
        return False

    def _make_calls(self) -> None:
        while self._pending:
            self._pending.popleft()()

    def _report(self, state: RequestState, image: "Image | None", latents: torch.Tensor | None) -> None:
        by_id, request_id = self._open.by_id, state.request.request_id
        with self._open.changed:
            # If Ctrl-C came right after the request was queued here, the engine's end has queued it again.
            if request_id not in by_id or by_id[request_id].state is not state:
                return
            del by_id[request_id]
        assert state.record.finish_s is not None
        self.last_end_s = max(self.last_end_s or 0.0, state.record.finish_s)
        self._collector.on_finish(state.record, image, latents)
        if self._on_finish is not None:
            self.call_safely(partial(self._on_finish, state.record))
        if not by_id:
            self._open.wake()
