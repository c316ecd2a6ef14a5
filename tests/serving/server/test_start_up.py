"""The port of a server that still loads its model: probes with the progress, refusals, the estimate, and signals."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from patchedserve.serving.server.start_up import StartUp

from ...support.waits import until

LOADS_UNTIL_TOLD = """
import asyncio, ctypes, signal, sys
from patchedserve.data.errors import UsageError
from patchedserve.serving.server.address import Address
from patchedserve.serving.server.keys import Keys
from patchedserve.serving.server.limits import Limits
from patchedserve.serving.server.run import serve_forever
from patchedserve.serving.server.start_up import StartUp

address = Address(port=0, keys=Keys(["secret"]))
listening, start_up = address.listen(), StartUp()

def make():
    start_up("tuning", 3, 9)
    for sig in (signal.SIGINT, signal.SIGTERM):
        # As a library in C does, without Python's knowledge: the default handlers.
        ctypes.CDLL(None).signal(sig, None)
    print(listening.getsockname()[1], flush=True)
    sys.stdin.readline()
    raise UsageError("the model is of another kind")

try:
    asyncio.run(serve_forever(make, Limits(), address, listening, start_up, on_ready=print))
except UsageError as error:
    print(error)
    sys.exit(2)
"""


class Loading:
    """A process that listens, and loads until a line arrives on its stdin.

    Attributes:
        process: the process.
        url: its base URL.
    """

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LOADS_UNTIL_TOLD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{self.process.stdout.readline().strip()}"

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60)

    def handles(self, sig: signal.Signals) -> bool:
        """Whether the process has a handler for a signal."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (sig - 1) & 1)


@pytest.fixture
def loading() -> Iterator[Loading]:
    found = Loading()
    yield found
    if found.process.poll() is None:
        found.process.kill()
    found.process.communicate()


def test_port_answers_while_the_model_is_loaded(loading: Loading) -> None:
    assert (loading.get("/livez").status_code, loading.get("/livez").json()) == (200, {"status": "alive"})
    assert (loading.get("/health").status_code, loading.get("/health").json()) == (200, {"status": "starting"})
    for path in ("/readyz", "/ready"):
        ready = loading.get(path)
        assert ready.status_code == 503
        assert ready.json() == ready.json() | {"status": "starting", "doing": "tuning", "done": 3, "total": 9}
        assert ready.json()["estimated_s"] >= 0
        assert int(ready.headers["retry-after"]) >= 1
    key = {"authorization": "Bearer secret"}
    asked = httpx.post(f"{loading.url}/v1/images/generations", json={"prompt": "a cat"}, headers=key, timeout=60)
    assert (asked.status_code, asked.json()["error"]["code"]) == (503, "not_ready")
    assert asked.json()["error"]["message"] == "the server is starting: tuning 3 of 9"
    assert loading.get("/v1/models").status_code == 401, "keys are checked from the start"
    assert httpx.get(f"{loading.url}/livez", headers={"host": "evil.example"}).status_code == 403


def test_error_of_loading_ends_the_server(loading: Loading) -> None:
    out, _ = loading.process.communicate("go on\n", timeout=60)
    assert (loading.process.returncode, out) == (2, "the model is of another kind\n")


@pytest.mark.parametrize(("sig", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signal_while_loading_ends_the_server(loading: Loading, sig: signal.Signals, code: int) -> None:
    assert loading.get("/livez").status_code == 200
    until(lambda: loading.handles(sig))
    loading.process.send_signal(sig)
    # Its stdin stays open, so that it would load indefinitely.
    assert loading.process.wait(60) == code
    assert loading.process.stderr is not None
    assert loading.process.stderr.read() == "Ended before the server was ready\n"


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_estimate_is_of_the_units_and_of_the_previous_start(tmp_path: Path) -> None:
    clock, file = Clock(), tmp_path / "start.json"
    first = StartUp(clock)
    first.remember_in(file)
    assert first.left_s is None
    clock.now_s = 10.0
    first("tuning", 0, 4)
    assert first.left_s is None, "nothing is done yet"
    clock.now_s = 12.0
    first("tuning", 1, 4)
    assert (first.doing, first.left_s) == ("tuning 1 of 4", 6.0)
    clock.now_s = 20.0
    first("warming up")
    clock.now_s = 25.0
    first.end()
    assert json.loads(file.read_text()) == {"loading": 10.0, "tuning": 10.0, "warming up": 5.0}

    second = StartUp(clock)
    second.remember_in(file)
    assert second.left_s == 25.0
    clock.now_s += 4.0
    assert second.left_s == 21.0
    second("tuning", 0, 4)
    assert second.left_s == 15.0
    clock.now_s += 3.0
    second("tuning", 2, 4)
    assert second.left_s == 3.0 + 5.0
    second("warming up")
    clock.now_s += 60.0
    assert second.left_s == 0.0, "longer than the last time"
    assert second.to_json() == {"status": "starting", "doing": "warming up", "elapsed_s": 67.0, "estimated_s": 0.0}


@pytest.mark.parametrize("content", ["[1]", "{", '{"loading": "long"}'])
def test_damaged_durations_are_put_aside(tmp_path: Path, content: str) -> None:
    file = tmp_path / "start.json"
    file.write_text(content)
    found = StartUp()
    with pytest.warns(UserWarning, match=r"start\.json is damaged"):
        found.remember_in(file)
    assert found.left_s is None
    assert not file.exists()
