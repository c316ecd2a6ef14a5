"""A fleet of worker processes on this machine, whose requests come from a trace or from clients. No torch.

A director, such as the dispatcher of a cascade, decides which worker draws what. The death of a worker is detected at
once. Workers send heartbeats, and one that sends nothing for `SILENT_S` is killed. A worker that has died is restarted,
unless it died too often (`core.retries`).
"""

import contextlib
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from ...data.errors import RunError
from ...data.requests import Request
from ..core.processes import start_process
from ..core.request_state import RequestRecord, Status
from ..core.retries import MAX_RESTARTS, RESTARTS_WITHIN_S, Restarts
from .messages import Alive, Begin, Command, Died, Ended, Event, Loaded, Returned, Stepped, Stop, Switched

SILENT_S = 15.0
"""A worker that has sent nothing for this time is killed; it sends a heartbeat every `worker.ALIVE_EVERY_S`."""
STALLED_S = 5.0
"""After this time without an event, a worker counts as stalled."""
STUCK_S = 30.0
"""After this time without a turn of its loop, the thread that serves counts as stuck. Waiting for a worker that dies
takes at most 20 s.
"""
_LOAD_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 10.0
_MAX_WAIT_S = 0.5
_MAX_UNSENT = 10_000
"""Most commands that wait for a worker: more than there are ever open requests."""


class ProcessWorker:
    """A worker process, and the connection to it.

    Commands are sent from a thread of their own, because a stalled process does not receive any.

    Args:
        index: number of the worker.
        entry: function that the process runs, as in `start_process`.
        arguments: its arguments; the last one is its connection, for `worker.WorkerEnd`.
        device: device that the process computes on.

    Attributes:
        process, connection: the process, and the connection to it.
        num_waiting: number of waiting requests in its last report.
        is_ready: whether it has loaded its models.
        silent_s: time since its last event, without pauses of this process.
    """

    def __init__(self, index: int, entry: str, *arguments: Any, device: str) -> None:
        self.index, self.num_waiting, self.is_ready, self.silent_s = index, 0, False, 0.0
        self.connection, other = Pipe()
        self._unsent: queue.Queue[Command | None] = queue.Queue(_MAX_UNSENT)
        name = f"psctl-worker-{index}"
        self.process = start_process(entry, *arguments, other, device=device, name=name)
        other.close()
        self._sender = threading.Thread(target=self._send_all, name=f"{name}-sender", daemon=True)
        self._sender.start()

    def send(self, command: Command) -> None:
        """Send a command without waiting. A worker that does not receive its commands is killed."""
        try:
            self._unsent.put_nowait(command)
        except queue.Full:
            self.process.kill()

    def receive(self) -> Event:
        """Wait for the next event. After `Died` the connection is closed."""
        self.silent_s = 0.0
        try:
            event = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(_STOP_TIMEOUT_S)
            self.close()
            return Died(f"worker {self.index} died (exit code {self.process.exitcode})")
        match event:
            case Loaded(None):
                self.is_ready = True
            case Alive(num_waiting):
                self.num_waiting = num_waiting
            case Switched():
                self.num_waiting = 0
        return event

    def close(self) -> None:
        """Close the connection of a process that has ended."""
        with contextlib.suppress(queue.Full):  # then the sender is busy, and ends when the pipe breaks
            self._unsent.put_nowait(None)
        self._sender.join(_STOP_TIMEOUT_S)
        self.connection.close()

    def _send_all(self) -> None:
        # If the process has died, `receive` returns `Died`.
        with contextlib.suppress(OSError):
            while (command := self._unsent.get()) is not None:
                self.connection.send(command)


class Director(Protocol):
    """Decides what the workers of a fleet do. It is called from one thread, with the time since the fleet began.

    `start` makes the workers, `tick` is called regularly, and the others report events; `index` numbers the workers.
    `num_open` is the number of requests that have not ended, all of which `end_all` closes.
    """

    @property
    def num_open(self) -> int: ...
    def start(self, make: Callable[[int], ProcessWorker], num_workers: int) -> None: ...
    def tick(self, now_s: float) -> None: ...
    def arrive(self, request: Request, now_s: float) -> None: ...
    def request_ended(self, index: int, record: RequestRecord, confidence: float | None, now_s: float) -> None: ...
    def requests_returned(self, index: int, request_ids: Sequence[int], now_s: float) -> None: ...
    def switch_started(self, index: int) -> None: ...
    def switch_finished(self, index: int, now_s: float) -> None: ...
    def worker_died(self, index: int, now_s: float, reason: str) -> None: ...
    def worker_restarted(self, index: int, now_s: float, worker: ProcessWorker) -> None: ...
    def end_all(self, status: Status, now_s: float, reason: str) -> None: ...


class ProcessFleet:
    """Serves requests with worker processes, on the wall clock.

    Args:
        launch: starts the worker with a number.
        director: assigns requests to workers.
        num_workers: number of workers.
        tick_s: time between two calls of `Director.tick`; missed calls are skipped.
        on_note: called with a one-line message when a worker dies, is killed or is restarted.
        on_steps: called with a request id and the number of steps done, if workers report steps.

    Attributes:
        was_interrupted: whether Ctrl-C or `end` stopped the run.
    """

    def __init__(
        self,
        launch: Callable[[int], ProcessWorker],
        director: Director,
        num_workers: int,
        *,
        tick_s: float,
        on_note: Callable[[str], None] = lambda text: None,
        on_steps: Callable[[int, int], None] = lambda request_id, steps_done: None,
    ) -> None:
        self._launch, self._director, self._on_note, self._on_steps = launch, director, on_note, on_steps
        self._tick_s = tick_s
        self._workers: dict[int, ProcessWorker] = {}
        self._restarts = [Restarts() for _ in range(num_workers)]
        self._calls: deque[Callable[[float], None]] = deque()
        self._wake_reader, self._wake_writer = Pipe(duplex=False)
        os.set_blocking(self._wake_writer.fileno(), False)
        # Start of the current turn of the serving loop; None outside of it.
        self._turn_s: float | None = None
        self._zero_s = 0.0
        self._is_ended = self.was_interrupted = False

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the live workers, by number. Thread-safe."""
        return {index: worker.process.pid or 0 for index, worker in sorted(self._workers.items())}

    @property
    def stalled(self) -> set[int]:
        """Numbers of the workers that have sent nothing for `STALLED_S`. Thread-safe."""
        workers = sorted(self._workers.items())
        return {index for index, worker in workers if worker.is_ready and worker.silent_s > STALLED_S}

    @property
    def is_stuck(self) -> bool:
        """Whether the thread that serves has hung for `STUCK_S`, so that no request is assigned. Thread-safe."""
        turn_s = self._turn_s
        return turn_s is not None and time.monotonic() - turn_s > STUCK_S

    def now_s(self) -> float:
        """Return the time since the workers began, from which all times of requests count."""
        return time.perf_counter() - self._zero_s if self._zero_s else 0.0

    def run(self, requests: Sequence[Request] | None = None, on_start: Callable[[], None] = lambda: None) -> None:
        """Start the workers, and serve the requests of a trace in order of arrival; or else clients, until `end`.

        Ctrl-C or `end` stops the run: open requests are cancelled.

        Raises:
            RunError: a worker cannot load, or all workers have died and none is restarted; in the latter case the
                requests that were served so far have ended.
        """
        try:
            self._director.start(self._start, len(self._restarts))
            self._load()
            if self._is_ended:
                raise KeyboardInterrupt
            on_start()
            self._zero_s = time.perf_counter()
            for worker in self._workers.values():
                worker.send(Begin(self._zero_s))
            self._serve(deque(requests or ()), is_endless=requests is None)
        except KeyboardInterrupt:
            self.was_interrupted = True
            self._director.end_all("cancelled", self.now_s(), "the run was stopped before it had finished")
        finally:
            self._stop()

    def post(self, call: Callable[[float], None]) -> None:
        """Call a function with the time in the thread of `run`. Thread-safe, and never blocks."""
        self._calls.append(call)
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes the thread as well
            self._wake_writer.send_bytes(b"1")

    def end(self) -> None:
        """Make `run` return soon. Thread-safe."""
        self._is_ended = True
        self.post(lambda now_s: None)

    def _start(self, index: int) -> ProcessWorker:
        worker = self._workers[index] = self._launch(index)
        return worker

    def _load(self) -> None:
        """Wait until all workers are ready. Raises RunError: one fails, dies or takes too long."""
        deadline_s = time.monotonic() + _LOAD_TIMEOUT_S
        while waiting := [worker for worker in self._workers.values() if not worker.is_ready and not self._is_ended]:
            if time.monotonic() > deadline_s:
                raise RunError(f"{len(waiting)} workers have not loaded their models within {_LOAD_TIMEOUT_S:g} s")
            for connection in wait([worker.connection for worker in waiting], 1.0):
                worker = next(each for each in waiting if each.connection is connection)
                match worker.receive():
                    case Died():
                        raise RunError(f"{worker.process.name} died while it loaded its models")
                    case Loaded(str() as error):
                        raise RunError(f"{worker.process.name} cannot load its models: {error}")

    def _serve(self, arriving: deque[Request], *, is_endless: bool) -> None:
        director, next_tick_s, looked_s = self._director, self._tick_s, time.monotonic()
        while is_endless or arriving or director.num_open:
            now_s, self._turn_s = self.now_s(), time.monotonic()
            while arriving and arriving[0].arrival_s <= now_s:
                director.arrive(arriving.popleft(), now_s)
            while self._calls:
                self._calls.popleft()(now_s)
            if self._is_ended:
                raise KeyboardInterrupt
            if next_tick_s <= now_s:
                director.tick(now_s)
                next_tick_s = max(next_tick_s, math.floor(now_s)) + self._tick_s
            if not self._workers:
                for request in arriving:
                    director.arrive(request, now_s)
                director.end_all("failed", now_s, "no worker is left")
                raise RunError(f"all {len(self._restarts)} workers died, and none could be started any more")
            next_s = min(next_tick_s, arriving[0].arrival_s if arriving else math.inf)
            self._receive_events(min(max(next_s - self.now_s(), 0.0), _MAX_WAIT_S))
            before_s, looked_s = looked_s, time.monotonic()
            self._kill_silent(looked_s - before_s)

    def _receive_events(self, timeout_s: float) -> None:
        worker_of = {worker.connection: worker for worker in self._workers.values()}
        for connection in wait([*worker_of, self._wake_reader], timeout_s):
            assert isinstance(connection, Connection)
            if connection is self._wake_reader:
                while self._wake_reader.poll():
                    self._wake_reader.recv_bytes()
                continue
            worker = worker_of[connection]
            self._handle_event(worker, worker.receive(), self.now_s())

    def _handle_event(self, worker: ProcessWorker, event: Event, now_s: float) -> None:
        director, index = self._director, worker.index
        match event:
            case Ended(record):
                director.request_ended(index, record, record.confidence, now_s)
            case Stepped(request_id, steps_done):
                self._on_steps(request_id, steps_done)
            case Returned(request_ids):
                director.requests_returned(index, request_ids, now_s)
            case Switched():
                director.switch_started(index)
                director.switch_finished(index, now_s)
            case Loaded(None):
                worker.send(Begin(self._zero_s))
                director.worker_restarted(index, now_s, worker)
                self._on_note(f"Worker {index} serves again.")
            case Loaded(error):
                self._on_note(f"Worker {index} could not load its models again: {error}")
            case Died(reason):
                if worker.is_ready:
                    director.worker_died(index, now_s, reason)
                if self._restarts[index].allow(now_s):
                    self._on_note(f"{reason}; its requests go to others, and it is started anew.")
                    self._start(index)
                else:
                    times = f"for the {MAX_RESTARTS + 1}th time within {RESTARTS_WITHIN_S / 60:g} min"
                    self._on_note(f"{reason}, {times}: it is not started again.")
                    del self._workers[index]

    def _kill_silent(self, passed_s: float) -> None:
        """Kill workers that have been silent too long; `passed_s` is the time since the last check."""
        for index, worker in self._workers.items():
            # A pause of this process or of the machine does not count as silence of a worker.
            worker.silent_s += min(passed_s, 2 * _MAX_WAIT_S)
            limit_s = SILENT_S if worker.is_ready else _LOAD_TIMEOUT_S
            if worker.silent_s > limit_s and worker.process.is_alive():
                self._on_note(f"Worker {index} has sent nothing for {limit_s:g} s and is killed.")
                worker.process.kill()
                worker.process.join()

    def _stop(self) -> None:
        self._turn_s = None
        for worker in self._workers.values():
            worker.send(Stop())
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        for worker in self._workers.values():
            worker.process.join(max(0.0, deadline_s - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.close()
        self._workers = {}
