"""Workers of a cascade, and replicas, are stopped, slowed and killed under load, one of them or all."""

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from patchedserve.psctl.app import main

from ..support.http_server import HttpServer, small_model
from ..support.server_faults import (
    FAULTS,
    GENERATION,
    STATUSES,
    WHOLE_WITHIN_S,
    Load,
    ask,
    check_books,
    descendants,
    is_whole,
    killed,
    probes,
)
from ..support.waits import is_alive, until

pytestmark = [pytest.mark.slow, pytest.mark.faults]
CASCADE = ("--cascade", "emoji-xl:1,emoji-xl:3")
OF_CASCADES = {"prompt": "a cat", "size": "64x64"}
_START_S = 400.0


@pytest.fixture(scope="module")
def cascade(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with the discriminator and the profile of a cascade."""
    workspace = tmp_path_factory.mktemp("cascade")
    common = [*CASCADE, "--resolutions", "64", "--workspace", str(workspace)]
    train = ["train-predictor", "discriminator", *common, "--num-prompts", "40", "--steps", "8"]
    measure = ["profile", "cascade", *common, "--num-prompts", "16", "--batch-sizes", "1,2"]
    for command in (train, measure):
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            assert main(command) == 0
    return workspace


@contextlib.contextmanager
def serving(kind: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[HttpServer]:
    options: tuple[str, ...] = ("--slo-scale", "1000")
    if kind == "replicas":
        pytest.importorskip("ray", reason="the extra `ray` is not installed")
        model, options = small_model(folder / "model"), (*options, "--num-replicas", "2", "--system", "patched-fcfs")
    else:
        model, folder = None, request.getfixturevalue("cascade")
        options = (*options, *CASCADE, "--workers", "2")
    with HttpServer(model, folder, *options, start_s=_START_S) as server:
        yield server


def workers_of(server: HttpServer) -> list[dict[str, Any]]:
    return httpx.get(f"{server.url}/v1/state", timeout=30).json()["replicas"]


def are_ready(server: HttpServer) -> bool:
    return [each["health"] for each in workers_of(server)] == ["ready", "ready"]


@pytest.mark.parametrize("kind", ["cascade", "replicas"])
def test_fleet_recovers_soon_after_faults(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    body = OF_CASCADES if kind == "cascade" else GENERATION
    with serving(kind, request, tmp_path) as server:
        with Load(server.url, body=body) as load:

            def recovers() -> None:
                until(lambda: is_whole(server.url, body), WHOLE_WITHIN_S)
                num_answered = len(load.answers)
                until(lambda: len(load.answers) >= num_answered + 6)

            until(lambda: len(load.answers) >= 3)
            # "killed" comes last: the others need both workers, and Ray takes long to start one on a busy machine.
            for fault in ("stopped", "slowed", "all stopped", "killed"):
                until(lambda: are_ready(server), max(WHOLE_WITHIN_S, server.start_s))
                workers = [each["process_id"] for each in workers_of(server)]
                if fault in FAULTS:
                    FAULTS[fault](workers[0])
                    assert set(probes(server.url).values()) == {200}, "the other worker draws"
                else:
                    for worker in workers:
                        os.kill(worker, signal.SIGSTOP)
                    until(lambda: probes(server.url) == {"/livez": 200, "/readyz": 503, "/health": 503})
                    for worker in workers:
                        os.kill(worker, signal.SIGCONT)
                recovers()
        answers = dict(load.answers)
        assert set(answers.values()) <= STATUSES
        assert [answers[name] for name in list(answers)[-3:]] == [200] * 3
        check_books(server, answers)


def test_server_ends_with_an_error_if_ray_ends(tmp_path: Path) -> None:
    """Without its raylet, Ray starts no replica again, so only another start of the server helps."""
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    options = ("--slo-scale", "1000", "--num-replicas", "1", "--system", "patched-fcfs", "--max-steps", "1000")
    with HttpServer(small_model(tmp_path / "model"), tmp_path, *options, start_s=_START_S) as server:
        others = descendants(server)
        [raylet] = [each for each in others if Path(f"/proc/{each}/comm").read_text().strip() == "raylet"]
        with ThreadPoolExecutor() as pool:
            asking = pool.submit(ask, server.url, "long", body={**GENERATION, "num_inference_steps": 1000})
            until(lambda: any(each["running"] for each in workers_of(server)))
            killed(raylet)
            assert server.process.wait(WHOLE_WITHIN_S) == 1
            assert asking.result().json()["error"]["code"] == "engine_error"
        assert "Error: Ray's raylet has ended, and all replicas with it" in server.lines
        # Ray's agents notice it within a minute.
        until(lambda: not any(map(is_alive, others)), 120)
