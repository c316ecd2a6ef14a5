"""`--stages` as users run it: a server whose processes are killed, and images that `psctl generate` draws."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from ..conftest import RunPsctl
from ..support.http_server import HttpServer, small_model
from ..support.waits import is_alive, until

GENERATIONS = "/v1/images/generations"
STAGES = {"psctl-prepare": "prepare", "psctl-postproce": "postprocess"}
"""Stages by the names of their processes, of which the system keeps 15 characters."""
ASK = {"prompt": "a cat", "num_inference_steps": 3, "seed": 5, "slo": 60}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model") / "tiny")


def stages_of(server: HttpServer) -> dict[str, int]:
    """Return the process ids of a server's stages, by stage."""
    found, parents, names = {}, {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended meanwhile
            name, (_, parent, *_) = (
                (folder / "comm").read_text(),
                (folder / "stat").read_text().rpartition(")")[2].split(),
            )
            parents[int(folder.name)], names[int(folder.name)] = int(parent), name.strip()
    for number, name in names.items():
        # Its parent is the process that forks the stages.
        if name in STAGES and parents.get(parents[number]) == server.process.pid:
            found[STAGES[name]] = number
    return found


@pytest.mark.exhaustive
def test_server_survives_killed_stages(model: Path, tmp_path: Path) -> None:
    with HttpServer(model, tmp_path, "--stages", "processes", start_s=120) as server:
        before = stages_of(server)
        assert before.keys() == {"prepare", "postprocess"}
        first = httpx.post(f"{server.url}{GENERATIONS}", json=ASK, timeout=60).raise_for_status().json()
        for part, process in before.items():
            os.kill(process, signal.SIGKILL)
            until(lambda process=process: process not in stages_of(server).values() or not is_alive(process))
            failed = httpx.post(f"{server.url}{GENERATIONS}", json=ASK, timeout=60)
            assert failed.status_code == 500
            assert "has died (SIGKILL)" in failed.json()["error"]["message"], part
            again = httpx.post(f"{server.url}{GENERATIONS}", json=ASK, timeout=60).raise_for_status().json()
            assert again["data"] == first["data"]
        after = stages_of(server)
        assert after.keys() == before.keys()
        assert not set(after.values()) & set(before.values())
        assert server.stop() == 0
    until(lambda: not any(map(is_alive, after.values())), timeout_s=5)


@pytest.mark.exhaustive
def test_no_stage_outlives_a_killed_server(model: Path, tmp_path: Path) -> None:
    with HttpServer(model, tmp_path, "--stages", "processes", start_s=120) as server:
        stages = stages_of(server)
        assert len(stages) == 2
        server.process.kill()
    until(lambda: not any(map(is_alive, stages.values())), timeout_s=5)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_hanging_stage_does_not_block_the_server(model: Path, tmp_path: Path) -> None:
    options = ("--stages", "processes", "--request-timeout", "1")
    with HttpServer(model, tmp_path, *options, start_s=120) as server:
        stages = stages_of(server)
        os.kill(stages["prepare"], signal.SIGSTOP)
        late = httpx.post(f"{server.url}{GENERATIONS}", json=ASK, timeout=60)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        # Its ticket has ended, too, which makes room for other requests.
        until(lambda: not httpx.get(f"{server.url}/v1/state").json()["requests"])
        assert server.stop() == 0
    until(lambda: not any(map(is_alive, stages.values())), timeout_s=5)


@pytest.mark.exhaustive
def test_second_signal_ends_a_server_draining_a_hanging_stage(model: Path, tmp_path: Path) -> None:
    options = ("--stages", "processes", "--drain-timeout", "600")
    with ThreadPoolExecutor() as pool, HttpServer(model, tmp_path, *options, start_s=120) as server:
        stages = stages_of(server)
        os.kill(stages["prepare"], signal.SIGSTOP)
        asking = pool.submit(httpx.post, f"{server.url}{GENERATIONS}", json=ASK, timeout=60)
        until(lambda: bool(httpx.get(f"{server.url}/v1/state").json()["requests"]))
        server.process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{server.url}/readyz").status_code == 503)
        assert httpx.get(f"{server.url}/livez").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(5) == 130
        assert isinstance(asking.exception(60), httpx.TransportError)
    until(lambda: not any(map(is_alive, stages.values())), timeout_s=5)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("part", ["prepare", "postprocess"])
def test_one_signal_ends_a_server_with_a_hanging_stage(model: Path, tmp_path: Path, part: str) -> None:
    options = ("--stages", "processes", "--drain-timeout", "1")
    with ThreadPoolExecutor() as pool, HttpServer(model, tmp_path, *options, start_s=120) as server:
        stages = stages_of(server)
        os.kill(stages[part], signal.SIGSTOP)
        asking = pool.submit(httpx.post, f"{server.url}{GENERATIONS}", json=ASK, timeout=60)
        until(lambda: bool(httpx.get(f"{server.url}/v1/state").json()["requests"]))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        assert asking.result().status_code == 503
    until(lambda: not any(map(is_alive, stages.values())), timeout_s=5)


@pytest.mark.exhaustive
def test_hanging_stage_is_reported(model: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool, HttpServer(model, tmp_path, "--stages", "processes", start_s=120) as server:
        prepare = stages_of(server)["prepare"]
        os.kill(prepare, signal.SIGSTOP)
        asking = pool.submit(httpx.post, f"{server.url}{GENERATIONS}", json=ASK, timeout=300)

        def probes() -> list[int]:
            return [httpx.get(f"{server.url}{path}").status_code for path in ("/livez", "/readyz", "/health")]

        assert probes() == [200, 200, 200]
        # 30 s, or 20 times the time of preparing in the warm-up.
        until(lambda: probes() == [200, 503, 503], timeout_s=150)
        os.kill(prepare, signal.SIGCONT)
        until(lambda: probes() == [200, 200, 200])
        # The request ends, in time or not.
        assert asking.result().status_code in (200, 503)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_images_are_equal_for_all_stage_options(model: Path, run_psctl: RunPsctl, tmp_path: Path) -> None:
    common = ("generate", "a cat", "--model", model, "--seed", "3", "--resolution", "64x32", "--dtype", "float32")
    ways = ("threads", "processes", "inline", "auto")
    for stages in ways:
        done = run_psctl(*common, "--stages", stages, "--output", tmp_path / f"{stages}.png")
        assert done.returncode == 0, done.stderr
    images = [np.asarray(Image.open(tmp_path / f"{stages}.png")) for stages in ways]
    assert all(np.array_equal(images[0], image) for image in images[1:])
    refused = run_psctl(*common, "--stages", "processes", "--offload", "text")
    assert refused.returncode == 2
    assert "--stages processes does not work with --offload text: its processes keep" in refused.stderr
