"""Faults of a running server's processes, load by clients, and the checks that each request has ended once."""

import itertools
import json
import os
import signal
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from patchedserve.data.resolution import Resolution

from .edits import file_of, image_of
from .http_server import HttpServer
from .waits import is_alive, until

STOPPED_S, WHOLE_WITHIN_S = 4.0, 30.0
STATUSES = {200, 409, 429, 500, 503, 504}
"""Statuses of responses that a fault may lead to."""
_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Shared by all requests, none of which uses TLS. To load certificates for each took ten times as long as the rest."""
GENERATION: Mapping[str, Any] = {"prompt": "a cat", "size": "32x32", "num_inference_steps": 2}


class Load:
    """Clients that send one request after the other, each with an id of its own, and the statuses they received."""

    def __init__(self, url: str, *, edits: bool = False, body: Mapping[str, Any] = GENERATION) -> None:
        self.answers: dict[str, int] = {}
        self._url, self._edits, self._body, self._numbers = url, edits, body, itertools.count()
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
            status = ask(self._url, name, edits=self._edits, body=self._body).status_code
            self.answers[name] = status
            if status != 200:
                self._is_over.wait(0.1)


def ask(url: str, name: str, *, edits: bool = False, body: Mapping[str, Any] = GENERATION) -> httpx.Response:
    """Request one image, generated or edited, with this request id."""
    headers = {"x-request-id": name}
    if not edits:
        return httpx.post(f"{url}/v1/images/generations", json=body, headers=headers, timeout=120, verify=_TLS)
    mask = np.zeros((32, 64), dtype=bool)
    mask[:8, :8] = True
    files: dict[str, Any] = {"image": file_of(image_of(Resolution(64, 32), 1)), "mask": file_of(mask)}
    files |= {"prompt": (None, "a hat"), "num_inference_steps": (None, "2")}
    return httpx.post(f"{url}/v1/images/edits", files=files, headers=headers, timeout=120, verify=_TLS)


def probes(url: str) -> dict[str, int]:
    paths = "/livez", "/readyz", "/health"
    return {path: httpx.get(f"{url}{path}", timeout=10, verify=_TLS).status_code for path in paths}


def is_whole(url: str, body: Mapping[str, Any] = GENERATION) -> bool:
    return set(probes(url).values()) == {200} and ask(url, "", body=body).status_code == 200


def stopped(process: int) -> None:
    os.kill(process, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    os.kill(process, signal.SIGCONT)


def slowed(process: int, *, slices: int = 20, stopped_s: float = 0.2, running_s: float = 0.1) -> None:
    """Leave a part of the time to a process, by default a third."""
    for _ in range(slices):
        os.kill(process, signal.SIGSTOP)
        time.sleep(stopped_s)
        os.kill(process, signal.SIGCONT)
        time.sleep(running_s)


def killed(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    until(lambda: not is_alive(process))


FAULTS: dict[str, Callable[[int], None]] = {"stopped": stopped, "slowed": slowed, "killed": killed}


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
