"""Real worker processes, without models: they serve, die, are restarted, and hang."""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence

import pytest

from patchedserve.data.errors import RunError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.request_state import RequestRecord, Status
from patchedserve.serving.core.retries import MAX_RESTARTS
from patchedserve.serving.fleet import processes
from patchedserve.serving.fleet.messages import Cancel, Draw
from patchedserve.serving.fleet.processes import ProcessFleet, ProcessWorker

from ...support.fleet_worker import EXIT_CODE
from ...support.waits import until

pytestmark = pytest.mark.slow


class OneByOne:
    """Director that sends its only worker one request at a time; a request of which the worker dies fails."""

    def __init__(self) -> None:
        self.worker: ProcessWorker | None = None
        self.queue, self.drawn = deque[Request](), deque[Request]()
        self.records: list[RequestRecord] = []
        self.deaths: list[str] = []

    @property
    def num_open(self) -> int:
        return len(self.queue) + len(self.drawn)

    def start(self, make: Callable[[int], ProcessWorker], num_workers: int) -> None:
        assert num_workers == 1
        self.worker = make(0)

    def tick(self, now_s: float) -> None: ...

    def arrive(self, request: Request, now_s: float) -> None:
        self.queue.append(request)
        self._send()

    def request_ended(self, index: int, record: RequestRecord, confidence: float | None, now_s: float) -> None:
        assert self.drawn.popleft().request_id == record.request_id
        self.records.append(record)
        self._send()

    def requests_returned(self, index: int, request_ids: Sequence[int], now_s: float) -> None: ...

    def switch_started(self, index: int) -> None: ...

    def switch_finished(self, index: int, now_s: float) -> None: ...

    def worker_died(self, index: int, now_s: float, reason: str) -> None:
        self.deaths.append(reason)
        self.worker = None
        self._close(self.drawn, "failed", now_s, reason)

    def worker_restarted(self, index: int, now_s: float, worker: ProcessWorker) -> None:
        self.worker = worker
        self._send()

    def end_all(self, status: Status, now_s: float, reason: str) -> None:
        for requests in (self.drawn, self.queue):
            self._close(requests, status, now_s, reason)

    def _send(self) -> None:
        if self.worker is not None and self.queue and not self.drawn:
            self.drawn.append(self.queue.popleft())
            self.worker.send(Draw(self.drawn[0]))

    def _close(self, requests: deque[Request], status: Status, now_s: float, reason: str) -> None:
        while requests:
            self.records.append(record := RequestRecord.of(requests.popleft()))
            record.close(status, now_s, reason)


def worker(index: int, entry: str = "run") -> ProcessWorker:
    return ProcessWorker(index, f"patchedserve.tests.support.fleet_worker:{entry}", device="none")


def request(number: int, prompt: str = "a cat") -> Request:
    return Request(number, prompt, Resolution(64, 64), 4, arrival_s=0.01 * number)


def test_trace_is_served_in_order_of_arrival() -> None:
    director, steps = OneByOne(), list[tuple[int, int]]()
    fleet = ProcessFleet(worker, director, 1, tick_s=1.0, on_steps=lambda *stepped: steps.append(stepped))
    pids: list[int] = []
    fleet.run([request(number) for number in range(20)], lambda: pids.extend(fleet.pids.values()))
    assert [(record.request_id, record.status) for record in director.records] == [(n, "completed") for n in range(20)]
    assert steps == [(number, 4) for number in range(20)]
    assert (len(pids), fleet.pids, fleet.was_interrupted) == (1, {}, False)


def test_worker_that_dies_too_often_is_not_restarted() -> None:
    director, notes = OneByOne(), list[str]()
    fleet = ProcessFleet(worker, director, 1, tick_s=1.0, on_note=notes.append)
    requests = [request(0), *(request(number, "die") for number in range(1, MAX_RESTARTS + 2)), request(9)]
    # Those that arrive when no worker is left fail, too.
    requests.append(Request(10, "a cat", Resolution(64, 64), 4, arrival_s=1e6))
    with pytest.raises(RunError, match="all 1 workers died, and none could be started any more"):
        fleet.run(requests)
    died = f"worker 0 died (exit code {EXIT_CODE})"
    reasons = [None, *[died] * (MAX_RESTARTS + 1), "no worker is left", "no worker is left"]
    assert [record.reason for record in director.records] == reasons
    assert [record.status for record in director.records[1:]] == ["failed"] * (MAX_RESTARTS + 3)
    again = [f"{died}; its requests go to others, and it is started anew.", "Worker 0 serves again."]
    last = f"{died}, for the {MAX_RESTARTS + 1}th time within 10 min: it is not started again."
    assert notes == [*again * MAX_RESTARTS, last]


def test_clients_are_served_until_the_end() -> None:
    director, served = OneByOne(), threading.Event()

    def note(request_id: int, steps_done: int) -> None:
        if request_id == 2:
            served.set()

    fleet = ProcessFleet(worker, director, 1, tick_s=1.0, on_steps=note)
    running = threading.Thread(target=fleet.run, daemon=True)
    running.start()
    for number in range(3):
        fleet.post(lambda now_s, number=number: director.arrive(request(number), now_s))
    assert served.wait(60)
    fleet.end()
    running.join(60)
    assert not running.is_alive()
    assert fleet.was_interrupted
    assert [record.request_id for record in director.records] == [0, 1, 2]
    assert director.num_open == 0


def test_hanging_dispatcher_is_reported_and_blocks_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STUCK_S", 2.0)
    director, goes_on = OneByOne(), threading.Event()
    fleet = ProcessFleet(worker, director, 1, tick_s=1.0)
    running = threading.Thread(target=fleet.run, daemon=True)
    running.start()
    fleet.post(lambda now_s: director.arrive(request(0), now_s))
    until(lambda: bool(director.records), 60)
    assert not fleet.is_stuck
    num_calls = 0

    def hang(now_s: float) -> None:
        assert goes_on.wait(120)

    def count(now_s: float) -> None:
        nonlocal num_calls
        num_calls += 1

    def post_many() -> None:
        for _ in range(20_000):
            fleet.post(count)

    fleet.post(hang)
    until(lambda: fleet.is_stuck)
    posting = threading.Thread(target=post_many, daemon=True)
    posting.start()
    posting.join(60)
    assert not posting.is_alive(), "it waits for a thread that reads nothing"
    goes_on.set()
    until(lambda: num_calls == 20_000 and not fleet.is_stuck, 60)
    fleet.end()
    running.join(60)
    assert not running.is_alive()


def test_worker_that_cannot_load_ends_the_run() -> None:
    fleet = ProcessFleet(lambda index: worker(index, "run_without_files"), OneByOne(), 1, tick_s=1.0)
    with pytest.raises(RunError, match="psctl-worker-0 cannot load its models: no such file"):
        fleet.run([request(0)])


def test_commands_to_a_hanging_worker_do_not_block() -> None:
    hanging = worker(0)
    os.kill(hanging.process.pid or 0, signal.SIGSTOP)

    def cancel_many() -> None:
        for number in range(processes._MAX_UNSENT // 2):
            hanging.send(Cancel(number, "its client has left"))

    # Three times half of the bound on unsent commands exceeds it even if the connection takes a part; the worker is
    # then killed.
    for _ in range(3):
        sending = threading.Thread(target=cancel_many, daemon=True)
        sending.start()
        sending.join(60)
        assert not sending.is_alive(), "it waits for a process that takes nothing"
    hanging.process.join(60)
    assert hanging.process.exitcode == -signal.SIGKILL
    hanging.close()
    assert not hanging._sender.is_alive()
