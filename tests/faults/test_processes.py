"""Each process of a server is stopped, slowed and killed under load: other requests are answered, the server recovers.

Workers of cascades and replicas are tested in `tests/serving/cascade/test_fleet.py` and
`tests/psctl/test_replicas.py`.
"""

import itertools
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from patchedserve.data.resolution import Resolution

from ..support.edits import file_of, image_of
from ..support.http_server import HttpServer, small_model
from ..support.waits import is_alive, until

pytestmark = pytest.mark.slow
STOPPED_S, WHOLE_WITHIN_S = 4.0, 30.0
PROCESSES = {"prepare": "psctl-prepare", "postprocess": "psctl-postproce", "edits": "psctl-edits"}
"""Process names by part; the system keeps 15 characters of a name."""
STATUSES = {200, 409, 429, 500, 503, 504}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model") / "tiny")


@contextmanager
def serving(model: Path, folder: Path, *options: str) -> Iterator[HttpServer]:
    # Latencies that were measured on an idle machine must not decide which requests a test serves.
    with HttpServer(model, folder, "--slo-scale", "1000", *options, start_s=180) as server:
        yield server


def processes_of(server: HttpServer, part: str) -> list[int]:
    """Return the process ids of a part: the server itself, or its children and grandchildren of that name."""
    if part == "server":
        return [server.process.pid]
    found, parents = [], {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended meanwhile
            _, parent, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(parent)
            if (folder / "comm").read_text().strip() == PROCESSES[part]:
                found.append(int(folder.name))
    ours = server.process.pid
    return [each for each in found if ours in (parents[each], parents.get(parents[each])) and is_alive(each)]


def descendants(server: HttpServer) -> set[int]:
    """Return the ids of all processes that a server has started, directly or not."""
    found, size = {server.process.pid}, 0
    while size < len(found):
        size = len(found)
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) in found:
                    found.add(int(folder.name))
    return found - {server.process.pid}


class Load:
    """Clients that send one request after the other, each with an id of its own, and the statuses they received."""

    def __init__(self, url: str, *, edits: bool) -> None:
        self.answers: dict[str, int] = {}
        self._url, self._edits, self._numbers = url, edits, itertools.count()
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(3)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        while not self._is_over.is_set():
            name = f"load-{next(self._numbers)}"
            self.answers[name] = ask(self._url, name, edits=self._edits).status_code


def ask(url: str, name: str, *, edits: bool = False) -> httpx.Response:
    """Request one image of two steps, generated or edited, with this request id."""
    headers = {"x-request-id": name}
    if not edits:
        body = {"prompt": "a cat", "size": "32x32", "num_inference_steps": 2}
        return httpx.post(f"{url}/v1/images/generations", json=body, headers=headers, timeout=120)
    mask = np.zeros((32, 64), dtype=bool)
    mask[:8, :8] = True
    files: dict[str, Any] = {"image": file_of(image_of(Resolution(64, 32), 1)), "mask": file_of(mask)}
    files |= {"prompt": (None, "a hat"), "num_inference_steps": (None, "2")}
    return httpx.post(f"{url}/v1/images/edits", files=files, headers=headers, timeout=120)


def probes(url: str) -> dict[str, int]:
    return {path: httpx.get(f"{url}{path}", timeout=10).status_code for path in ("/livez", "/readyz", "/health")}


def is_whole(url: str) -> bool:
    return set(probes(url).values()) == {200} and ask(url, "").status_code == 200


def stopped(process: int) -> None:
    os.kill(process, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    os.kill(process, signal.SIGCONT)


def slowed(process: int) -> None:
    """Leave a third of the time to a process."""
    for _ in range(20):
        os.kill(process, signal.SIGSTOP)
        time.sleep(0.2)
        os.kill(process, signal.SIGCONT)
        time.sleep(0.1)


def killed(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    until(lambda: not is_alive(process))


def check_books(server: HttpServer, answers: dict[str, int]) -> None:
    """Check that each request has ended once: responses, log, metrics and state agree."""
    until(lambda: not httpx.get(f"{server.url}/v1/state").json()["requests"])
    drawn = sum(status == 200 for status in answers.values())
    assert server.metric('psctl_request_success_total{finished_reason="completed"}') >= drawn
    assert server.stop() == 0
    lines = [json.loads(line) for line in server.lines if line.startswith("{")]
    ends = Counter(line["request_id"] for line in lines if line["request_id"] in answers)
    assert {name for name, status in answers.items() if status == 200} <= ends.keys()
    assert max(ends.values()) == 1, ends.most_common(3)
    completed = {line["request_id"] for line in lines if line["event"] == "completed"}
    assert {name for name, status in answers.items() if status == 200} == completed & answers.keys()
    assert not any("Traceback" in line for line in server.lines)


FAULTS: dict[str, Callable[[int], None]] = {"stopped": stopped, "slowed": slowed, "killed": killed}
CASES = [
    pytest.param(part, fault, marks=() if (part, fault) in {("prepare", "killed")} else pytest.mark.faults)
    for part in ("server", *PROCESSES)
    for fault in FAULTS
    if (part, fault) != ("server", "killed")
]


@pytest.mark.parametrize(("part", "fault"), CASES)
def test_server_recovers_soon_after_a_fault(part: str, fault: str, model: Path, tmp_path: Path) -> None:
    options = ("--stages", "processes") if part in ("prepare", "postprocess") else ()
    with serving(model, tmp_path, *options) as server:
        assert ask(server.url, "before", edits=part == "edits").status_code == 200
        with Load(server.url, edits=part == "edits") as load:
            until(lambda: len(load.answers) >= 3)
            victims = processes_of(server, part)
            assert victims
            for victim in victims:
                FAULTS[fault](victim)
            assert probes(server.url)["/livez"] == 200
            until(lambda: is_whole(server.url), WHOLE_WITHIN_S)
            num_answered = len(load.answers)
            # The clients of the load receive responses, too, and not only errors.
            until(lambda: len(load.answers) >= num_answered + 6)
        answers = dict(load.answers)
        assert set(answers.values()) <= STATUSES
        assert [answers[name] for name in list(answers)[-3:]] == [200] * 3
        children = descendants(server)
        check_books(server, answers)
    wait_until_ended(children)


@pytest.mark.faults
def test_requests_complete_on_an_idle_machine_after_a_slow_period(model: Path, tmp_path: Path) -> None:
    """What the predictor learns during a slow time must not make it refuse everything later by the tables' SLOs."""
    with HttpServer(model, tmp_path, "--slo-scale", "3", start_s=180) as server:
        with Load(server.url, edits=False) as load:
            until(lambda: len(load.answers) >= 3)
            slowed(server.process.pid)
        assert set(load.answers.values()) <= {200, 503}
        until(lambda: not httpx.get(f"{server.url}/v1/state").json()["requests"])
        after = [ask(server.url, f"after-{number}").status_code for number in range(20)]
        assert after == [200] * 20
        check_books(server, load.answers)


@pytest.mark.faults
def test_killed_server_leaves_no_process_and_recovers_after_restart(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, "--stages", "processes") as server:
        assert ask(server.url, "before").status_code == 200
        children = descendants(server)
        assert children
        killed(server.process.pid)
    wait_until_ended(children)
    with serving(model, tmp_path) as server:
        assert is_whole(server.url)
        assert not any("damaged" in line for line in server.lines)
        assert server.stop() == 0


def wait_until_ended(children: set[int]) -> None:
    """Wait for the end of processes. Raises AssertionError, which names it, if one is still alive."""
    with suppress(AssertionError):
        until(lambda: not any(map(is_alive, children)), WHOLE_WITHIN_S)
    left = [Path(f"/proc/{each}/stat").read_text() for each in filter(is_alive, children)]
    assert not left, left


def usage(process: int) -> tuple[int, int, int]:
    """Return the numbers of open files, threads and children of a process."""
    own = Path(f"/proc/{process}")
    children = (own / f"task/{process}/children").read_text().split()
    return len([*(own / "fd").iterdir()]), len([*(own / "task").iterdir()]), len(children)


@pytest.mark.faults
def test_many_faults_leak_no_resources(model: Path, tmp_path: Path) -> None:
    """Repeatedly killed stages and disconnecting clients leave no files, threads or processes behind."""
    with serving(model, tmp_path, "--stages", "processes") as server:

        def leave() -> None:
            body = {"prompt": "a cat", "num_inference_steps": 50, "stream": True, "progress": True}
            with httpx.stream("POST", f"{server.url}/v1/images/generations", json=body, timeout=60) as stream:
                next(stream.iter_lines())

        def fault() -> None:
            for part in ("prepare", "postprocess"):
                [victim] = processes_of(server, part)
                killed(victim)
                ask(server.url, "")
                until(lambda: is_whole(server.url), WHOLE_WITHIN_S)
            for _ in range(5):
                leave()
            until(lambda: not httpx.get(f"{server.url}/v1/state").json()["requests"])

        for _ in range(2):
            fault()
        before = usage(server.process.pid)
        for _ in range(6):
            fault()
        # A connection that has just ended may still be open.
        until(lambda: all(now <= then + 2 for now, then in zip(usage(server.process.pid), before, strict=True)))
        assert server.stop() == 0
