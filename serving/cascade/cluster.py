"""A cascade of worker processes on this machine, under the same dispatcher as in the simulator. No torch here.

Requests come from a trace, or from clients (`backend`).
The death of a worker is detected at once. Workers send heartbeats, and one that sends nothing for `SILENT_S` is
killed. In both cases other workers retry its requests, a new plan is made for the remaining workers, and the worker is
restarted, at most three times within ten minutes.
"""

import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Protocol

from ...data.errors import RunError
from ...data.requests import Request
from ..core.processes import start_process
from .controller import SAMPLE_S
from .dispatcher import Dispatcher
from .legs import Leg
from .result import CascadeResult
from .worker import WorkerSettings

_ENTRY = f"{__package__}.worker:run_worker"
MAX_RESTARTS, RESTARTS_WITHIN_S = 3, 600.0
SILENT_S = 15.0
"""A worker that has sent nothing for this time is killed; it sends a heartbeat every `worker.ALIVE_EVERY_S`."""
_LOAD_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 10.0
_MAX_WAIT_S = 0.5
_MAX_UNSENT = 10_000
"""Most messages that wait for a worker: more than there are ever open requests."""


class ProcessWorker:
    """One worker process, controlled through the interface of `slots.Worker`.

    Messages are sent from a thread of their own, because a stalled process does not receive any.

    Attributes:
        process, connection: the process, and the connection to it.
        num_waiting: number of waiting requests in its last report.
        is_ready: whether it has loaded its models.
        silent_s: time since its last message, without pauses of this process.
    """

    def __init__(self, settings: WorkerSettings, leg: Leg | None) -> None:
        self.connection, other = Pipe()
        self.num_waiting = 0
        self.is_ready = False
        self.silent_s = 0.0
        self._unsent: queue.Queue[tuple[object, ...] | None] = queue.Queue(_MAX_UNSENT)
        name = f"psctl-worker-{settings.index}"
        self.process = start_process(_ENTRY, settings, leg, other, device=settings.device, name=name)
        other.close()
        self._sender = threading.Thread(target=self._send, name=f"{name}-sender", daemon=True)
        self._sender.start()

    def take(self, request: Request, now_s: float) -> None:
        self._enqueue("take", request)

    def cancel(self, request_id: int, reason: str) -> None:
        self._enqueue("cancel", request_id, reason)

    def limit_batch_size(self, batch_size: int) -> None:
        self._enqueue("limit", batch_size)

    def switch_model(self, leg: Leg, now_s: float) -> None:
        self._enqueue("change", leg)

    def begin(self, zero_s: float) -> None:
        """Send the start time of the trace, on the clock of the machine."""
        self._enqueue("zero", zero_s)

    def stop(self) -> None:
        """Ask the process to end without finishing its requests."""
        self._enqueue("stop")

    def close(self) -> None:
        """Close the connection of a process that has ended."""
        with contextlib.suppress(queue.Full):  # then the sender is busy, and ends when the pipe breaks
            self._unsent.put_nowait(None)
        self._sender.join(_STOP_TIMEOUT_S)
        self.connection.close()

    def _enqueue(self, *message: object) -> None:
        try:
            self._unsent.put_nowait(message)
        except queue.Full:
            self.process.kill()

    def _send(self) -> None:
        # If the process has died, the main loop learns it from the connection and gives its requests to other workers.
        with contextlib.suppress(OSError):
            while (message := self._unsent.get()) is not None:
                self.connection.send(message)


class Source(Protocol):
    """Source of requests.

    Attributes:
        wake_connection: connection that is readable from the arrival of a request until `take`; None if all requests
            are known in advance.
    """

    wake_connection: Connection | None

    @property
    def is_exhausted(self) -> bool:
        """Whether no more requests will arrive."""
        ...

    @property
    def next_s(self) -> float:
        """Arrival time of the next request, infinite if unknown."""
        ...

    def take(self, dispatcher: Dispatcher, now_s: float) -> None:
        """Pass all requests that have arrived to the dispatcher."""


class TraceSource(Source):
    """Requests of a trace, in order of arrival."""

    wake_connection = None

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests, self._place = requests, 0

    @property
    def is_exhausted(self) -> bool:
        return self._place == len(self._requests)

    @property
    def next_s(self) -> float:
        return math.inf if self.is_exhausted else self._requests[self._place].arrival_s

    def take(self, dispatcher: Dispatcher, now_s: float) -> None:
        while self.next_s <= now_s:
            dispatcher.arrive(self._requests[self._place], now_s)
            self._place += 1


class CascadeCluster:
    """Serves requests with worker processes, on the wall clock.

    Args:
        settings: settings of each worker.
        dispatcher: assigns requests to workers, and models to workers.
        on_note: called with a one-line message when a worker dies, is killed or is restarted.
        on_steps: called with a request id and the number of steps done, if workers report steps.
    """

    def __init__(
        self,
        settings: Sequence[WorkerSettings],
        dispatcher: Dispatcher,
        *,
        on_note: Callable[[str], None] = lambda text: None,
        on_steps: Callable[[int, int], None] = lambda request_id, steps_done: None,
    ) -> None:
        self._settings, self._dispatcher, self._on_note, self._on_steps = settings, dispatcher, on_note, on_steps
        self._workers: dict[int, ProcessWorker] = {}
        self._restarted_s = [deque[float](maxlen=MAX_RESTARTS) for _ in settings]
        self._zero_s = 0.0
        self._is_ended = False
        self.was_interrupted = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the live workers, in the order of their numbers."""
        return [pid for _, pid in sorted(self.pid_of.items())]

    @property
    def pid_of(self) -> dict[int, int]:
        """Process ids of the live workers, by number."""
        return {index: worker.process.pid or 0 for index, worker in list(self._workers.items())}

    def run(self, source: Source, on_start: Callable[[], None] = lambda: None) -> CascadeResult:
        """Start the workers, and serve all requests of a source.

        Ctrl-C or `end` stops the run: open requests are cancelled, and the result is returned.

        Raises:
            RunError: a worker cannot load, or all workers have died and none is restarted; in the latter case
                `Dispatcher.result` holds the requests served so far.
        """
        try:
            self._dispatcher.start(self._new_worker, len(self._settings))
            self._load()
            if self._is_ended:
                raise KeyboardInterrupt
            on_start()
            self._zero_s = time.perf_counter()
            for worker in self._workers.values():
                worker.begin(self._zero_s)
            self._serve(source)
        except KeyboardInterrupt:
            self.was_interrupted = True
            self._dispatcher.end_all("cancelled", self.now_s(), "the run was stopped before it had finished")
        finally:
            self._stop()
        result = self._dispatcher.result
        result.records = sorted(result.records, key=lambda record: record.request_id)
        return result

    def end(self) -> None:
        """Make `run` return soon. May be called from any thread."""
        self._is_ended = True

    def now_s(self) -> float:
        """Return the time since the workers began, from which all times of requests count."""
        return time.perf_counter() - self._zero_s if self._zero_s else 0.0

    def _new_worker(self, index: int, leg: Leg | None) -> ProcessWorker:
        worker = self._workers[index] = ProcessWorker(self._settings[index], leg)
        return worker

    def _load(self) -> None:
        """Wait until all workers are ready. Raises RunError: one fails, dies or takes too long."""
        deadline_s = time.monotonic() + _LOAD_TIMEOUT_S
        while waiting := [worker for worker in self._workers.values() if not worker.is_ready and not self._is_ended]:
            if time.monotonic() > deadline_s:
                raise RunError(f"{len(waiting)} workers have not loaded their models within {_LOAD_TIMEOUT_S:g} s")
            for connection in wait([worker.connection for worker in waiting], 1.0):
                worker = next(each for each in waiting if each.connection is connection)
                try:
                    word, *rest = worker.connection.recv()
                except (EOFError, OSError) as error:
                    raise RunError(f"{worker.process.name} died while it loaded its models") from error
                if word == "failed":
                    raise RunError(f"{worker.process.name} cannot load its models: {rest[0]}")
                worker.is_ready = word == "ready"

    def _serve(self, source: Source) -> None:
        next_tick_s, dispatcher = SAMPLE_S, self._dispatcher
        looked_s = time.monotonic()
        while not source.is_exhausted or dispatcher.num_open:
            now_s = self.now_s()
            source.take(dispatcher, now_s)
            if self._is_ended:
                raise KeyboardInterrupt
            if next_tick_s <= now_s:
                dispatcher.tick(now_s)
                # Missed ticks are skipped.
                next_tick_s = max(next_tick_s + SAMPLE_S, math.floor(now_s) + SAMPLE_S)
            if not self._workers:
                source.take(dispatcher, math.inf)
                dispatcher.end_all("failed", now_s, "no worker is left")
                raise RunError(f"all {len(self._settings)} workers died, and none could be started any more")
            timeout_s = min(max(min(next_tick_s, source.next_s) - self.now_s(), 0.0), _MAX_WAIT_S)
            self._receive_messages(timeout_s, source.wake_connection)
            before_s, looked_s = looked_s, time.monotonic()
            self._end_silent(looked_s - before_s)

    def _receive_messages(self, timeout_s: float, wake_connection: Connection | None) -> None:
        index_of = {worker.connection: index for index, worker in self._workers.items()}
        for connection in wait([*index_of, *([] if wake_connection is None else [wake_connection])], timeout_s):
            assert isinstance(connection, Connection)
            if connection is wake_connection:
                continue
            index = index_of[connection]
            self._workers[index].silent_s = 0.0
            try:
                word, *rest = connection.recv()
            except (EOFError, OSError):
                self._handle_death(index)
                continue
            self._handle_message(index, word, rest)

    def _handle_message(self, index: int, word: str, rest: list) -> None:  # type: ignore[type-arg]  what belongs to the word
        dispatcher, now_s, worker = self._dispatcher, self.now_s(), self._workers[index]
        if word == "ended":
            dispatcher.request_ended(index, rest[0], rest[1], now_s)
        elif word == "waiting":
            worker.num_waiting = rest[0]
        elif word == "steps":
            self._on_steps(rest[0], rest[1])
        elif word == "back":
            dispatcher.requests_returned(index, rest[0], now_s)
        elif word == "left":
            worker.num_waiting = 0
            dispatcher.switch_started(index)
        elif word == "changed":
            dispatcher.switch_finished(index, now_s)
        elif word == "ready":
            worker.is_ready = True
            worker.begin(self._zero_s)
            dispatcher.worker_restarted(index, now_s, worker)
            self._on_note(f"Worker {index} serves again.")
        elif word == "failed":
            self._on_note(f"Worker {index} could not load its models again: {rest[0]}")

    def _end_silent(self, passed_s: float) -> None:
        """Kill workers that have been silent too long; `passed_s` is the time since the last check."""
        for index, worker in self._workers.items():
            # A pause of this process or of the machine does not count as silence of a worker.
            worker.silent_s += min(passed_s, 2 * _MAX_WAIT_S)
            limit_s = SILENT_S if worker.is_ready else _LOAD_TIMEOUT_S
            if worker.silent_s > limit_s and worker.process.is_alive():
                self._on_note(f"Worker {index} has told nothing for {limit_s:g} s and is killed.")
                worker.process.kill()
                worker.process.join()

    def _handle_death(self, index: int) -> None:
        worker = self._workers.pop(index)
        worker.process.join(_STOP_TIMEOUT_S)
        worker.close()
        reason = f"worker {index} died (exit code {worker.process.exitcode})"
        now_s = self.now_s()
        if worker.is_ready:
            self._dispatcher.worker_died(index, now_s, reason)
        restarted_s = self._restarted_s[index]
        if len(restarted_s) == MAX_RESTARTS and now_s - restarted_s[0] < RESTARTS_WITHIN_S:
            times = f"for the {MAX_RESTARTS + 1}th time within {RESTARTS_WITHIN_S / 60:g} min"
            self._on_note(f"{reason}, {times}: it is not started again.")
            return
        restarted_s.append(now_s)
        self._on_note(f"{reason}; its requests go to others, and it is started anew.")
        self._workers[index] = ProcessWorker(self._settings[index], self._dispatcher.slots[index].leg)

    def _stop(self) -> None:
        for worker in self._workers.values():
            worker.stop()
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        for worker in self._workers.values():
            worker.process.join(max(0.0, deadline_s - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.close()
        self._workers = {}


def settings_for(template: WorkerSettings, num_workers: int, num_cores: int) -> list[WorkerSettings]:
    """Return settings for `num_workers` workers: each has its own GPU, or its own core if there are enough cores."""
    is_cuda = template.device.startswith("cuda")
    return [
        replace(
            template,
            index=index,
            device=f"cuda:{index}" if is_cuda else template.device,
            core=None if is_cuda or num_workers > num_cores else index,
        )
        for index in range(num_workers)
    ]
