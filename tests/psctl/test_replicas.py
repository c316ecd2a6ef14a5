"""Replicas on Ray Serve: real processes, which are killed."""

import asyncio
import json
import logging
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from patchedserve.data.resolution import Resolution
from patchedserve.data.workspace import Workspace
from patchedserve.eval.metrics.psnr import psnr

from ..conftest import RunPsctl
from ..support.edits import file_of, image_of
from ..support.http_server import HttpServer, small_model
from ..support.latency_tables import write_profiles
from ..support.sockets import listening, started_by
from ..support.waits import until

pytest.importorskip("ray", reason="the extra `ray` is not installed")
# Its tests share a cluster whose start takes most of their time.
pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.in_order]
GENERATIONS = "/v1/images/generations"
_START_S = 400.0
"""Limit for a start that hangs: Ray and two replicas take 43 s on an idle machine, 125 s on one with other work."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A server whose profiles give 50 ms or more to steps of new images, less to edits, and 1 s to reading a record."""
    workspace = tmp_path_factory.mktemp("workspace")
    write_profiles(Workspace(workspace).for_model(str(model), "cpu").tables, load_s=1.0)
    options = ("--num-replicas", "2", "--system", "patched-fcfs", "--max-queue", "400", "--reuse-templates")
    options += ("--max-steps", "1000", "--router", "mask-aware")
    with HttpServer(model, workspace, *options, start_s=_START_S) as running:
        yield running
        assert running.stop() == 0


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A running cluster: commands start and stop their own replicas in it and leave it running."""
    import ray
    from ray import serve

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    assert ray.is_initialized()
    assert not serve.status().applications
    serve.shutdown()
    ray.shutdown()


def replicas_of(server: HttpServer) -> list[dict[str, Any]]:
    return httpx.get(f"{server.url}/v1/state", timeout=30).json()["replicas"]


def body(number: int, steps: int = 20) -> dict[str, Any]:
    size = ("32x32", "64x32")[number % 2]
    return {"prompt": f"cat {number}", "size": size, "seed": number, "num_inference_steps": steps, "n": 1}


async def burst(url: str, bodies: list[dict[str, Any]], kill: Callable[[], None] | None = None) -> list[httpx.Response]:
    """Send all bodies at once, call `kill` meanwhile, and return the responses."""
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        asked = [asyncio.ensure_future(client.post(GENERATIONS, json=each)) for each in bodies]
        if kill is not None:
            await asyncio.sleep(0.3)
            await asyncio.to_thread(kill)
        return list(await asyncio.gather(*asked))


LONG = {**body(0, 1000), "stream": True, "progress": True, "slo": 600}
"""A request that takes seconds even on the fastest machine."""


def test_images_do_not_depend_on_the_replica(server: HttpServer) -> None:
    until(lambda: len(replicas_of(server)) == 2, 60)
    assert len({each["process_id"] for each in replicas_of(server)} - {server.process.pid}) == 2
    answers = asyncio.run(burst(server.url, [body(3)] * 6))
    assert [answer.status_code for answer in answers] == [200] * 6
    images = {answer.json()["data"][0]["b64_json"] for answer in answers}
    # Batches may differ in the last bit, so that there may be two different images.
    assert len(images) <= 2
    refused = httpx.post(f"{server.url}{GENERATIONS}", json={**body(0), "size": "40x36"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_value")


def test_ray_is_reachable_only_locally_and_with_its_token(server: HttpServer) -> None:
    """Ray listens on this machine alone and accepts no call without its token."""
    import grpc

    until(lambda: len(replicas_of(server)) == 2, 60)
    sockets = {pid: list(listening(pid).values()) for pid in started_by(server.process.pid)}
    # The processes are the server, its replicas, and those of Ray.
    assert {server.process.pid, *(each["process_id"] for each in replicas_of(server))} <= sockets.keys()
    assert sum(map(bool, sockets.values())) >= 6
    names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in sockets}
    open_to_others = {
        (names[pid], str(address)) for pid, found in sockets.items() for address, _ in found if not address.is_loopback
    }
    assert open_to_others == set()
    [(_, port)] = next(found for pid, found in sockets.items() if names[pid] == "gcs_server")
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")(b"", timeout=30)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_partial_images_are_forwarded(server: HttpServer) -> None:
    asked = {**body(1), "stream": True, "partial_images": 2, "progress": True}
    with httpx.stream("POST", f"{server.url}{GENERATIONS}", json=asked, timeout=60) as stream:
        told = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: ")]
    kinds = [each["type"].removeprefix("image_generation.") for each in told]
    assert [each["partial_image_index"] for each in told if each["type"].endswith("partial_image")] == [0, 1]
    assert kinds.count("progress") == 20
    assert kinds[-1] == "completed"


def test_edits_read_records_of_replicas(server: HttpServer) -> None:
    size = Resolution(64, 32)
    files = {"image": file_of(image_of(size)), "mask": file_of(np.indices(size[::-1])[1] < 16)}
    fields = {"prompt": (None, "a red hat"), "n": (None, "4"), "slo": (None, "60")}

    def reused() -> list[bool]:
        answer = httpx.post(f"{server.url}/v1/images/edits", files={**files, **fields}, timeout=60)
        return [each["reused"] for each in answer.raise_for_status().json()["data"]]

    assert reused() == [False] * 4
    until(lambda: reused() == [True] * 4)


def test_edits_are_routed_to_the_replica_with_their_record(server: HttpServer) -> None:
    until(lambda: len(replicas_of(server)) == 2, 60)
    size, names = Resolution(64, 32), sorted(each["name"] for each in replicas_of(server))
    pictures = {number: file_of(image_of(size, number)) for number in (7, 8)}
    mask = file_of(np.indices(size[::-1])[1] < 16)

    def edit(number: int) -> bool:
        files = {"image": pictures[number], "mask": mask, "prompt": (None, "a red hat"), "slo": (None, "60")}
        answer = httpx.post(f"{server.url}/v1/images/edits", files=files, timeout=60)
        return answer.raise_for_status().json()["data"][0]["reused"]

    def drawn() -> dict[str, int]:
        """Return the images drawn by each replica, once the reports cover everything that the front end completed."""
        completed = server.metric('psctl_request_success_total{finished_reason="completed"}')
        found: dict[str, int] = {}

        def have_reported() -> bool:
            found.update((each["name"], each["drawn"]) for each in replicas_of(server))
            return sum(found.values()) == completed

        until(have_reported)
        return found

    # Of two idle replicas the first by name draws; the edit that arrives meanwhile goes to the other, as do later ones.
    with httpx.stream("POST", f"{server.url}{GENERATIONS}", json=LONG, timeout=600) as stream:
        lines = stream.iter_lines()
        next(lines)
        edit(7)
        assert "completed" in "".join(lines)
    until(lambda: edit(7))
    until(lambda: edit(8))
    for number, name in ((7, names[1]), (8, names[0])):
        before = drawn()
        assert all(edit(number) for _ in range(4))
        assert drawn() == {**before, name: before[name] + 4}


def test_client_disconnect_frees_the_replica(server: HttpServer) -> None:
    cancelled = 'psctl_request_success_total{finished_reason="cancelled"}'
    before = server.metric(cancelled)
    with httpx.stream("POST", f"{server.url}{GENERATIONS}", json=LONG, timeout=60) as stream:
        lines = stream.iter_lines()  # the connection closes once nothing refers to it
        next(lines)
        until(lambda: any(each["pixel_steps"] for each in replicas_of(server)))
    until(lambda: server.metric(cancelled) == before + 1)
    until(lambda: all(each["pixel_steps"] == 0 for each in replicas_of(server)), 20)
    assert httpx.post(f"{server.url}{GENERATIONS}", json=body(0), timeout=60).status_code == 200


def test_hanging_replica_blocks_no_request(server: HttpServer) -> None:
    def health() -> Any:
        return httpx.get(f"{server.url}/health", timeout=5).raise_for_status().json().get("replicas")

    until(lambda: health() == {"ready": 2, "all": 2}, 60)
    victim = replicas_of(server)[0]["process_id"]
    try:
        # The other replica draws the requests of the stopped one.
        answers = asyncio.run(
            burst(server.url, [body(number, 100) for number in range(12)], lambda: os.kill(victim, signal.SIGSTOP))
        )
        assert [answer.status_code for answer in answers] == [200] * 12, [each.text[:200] for each in answers]
        until(lambda: health() in ({"ready": 1, "all": 2}, None))
        for path in ("/livez", "/readyz", "/health"):
            assert httpx.get(f"{server.url}{path}", timeout=5).status_code == 200
        assert httpx.post(f"{server.url}{GENERATIONS}", json=body(99), timeout=20).status_code == 200
    finally:
        # Ray may have replaced the process by now.
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGCONT)
    until(lambda: health() == {"ready": 2, "all": 2}, max(60, server.start_s))


@pytest.mark.parametrize("times", [1, 3])
def test_killed_replica_loses_no_request(server: HttpServer, times: int) -> None:
    draws = random.Random(0)
    for number in range(times):
        until(lambda: len(replicas_of(server)) == 2, 60)
        victims = [each["process_id"] for each in replicas_of(server)]

        def kill(victims: list[int] = victims) -> None:
            os.kill(draws.choice(victims), signal.SIGKILL)

        bodies = [body(1000 * number + each) for each in range(60)]
        answers = asyncio.run(burst(server.url, bodies, kill))
        assert [answer.status_code for answer in answers] == [200] * 60, [each.text[:200] for each in answers]
        assert [answer.json()["seeds"] for answer in answers] == [[each["seed"]] for each in bodies]
        # Within 30 s on an idle machine; on any other faster than the whole server, which starts Ray and two replicas.
        until(
            lambda gone=victims: (
                len(replicas_of(server)) == 2 and {each["process_id"] for each in replicas_of(server)} != {*gone}
            ),
            max(30, server.start_s),
        )


@pytest.mark.usefixtures("cluster")
def test_files_are_drawn_by_replicas(model: Path, run_psctl: RunPsctl, tmp_path: Path) -> None:
    lines = [json.dumps({"custom_id": str(number), "body": {**body(number, 3), "n": 1}}) for number in range(12)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    done = run_psctl(
        "batch", "run", "lines.jsonl", "--model", model, "--num-replicas", "2", "--dtype", "float32", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["completed"] == 12
    too_many = run_psctl("batch", "run", "lines.jsonl", "--model", model, "--num-replicas", "900", "-o", "again")
    assert too_many.returncode == 2
    assert "900 replicas take one CPU each" in too_many.stderr


@pytest.mark.usefixtures("cluster")
def test_sets_of_images_are_drawn_by_replicas(model: Path, run_psctl: RunPsctl, tmp_path: Path) -> None:
    asked = ("eval", "psnr", "--model", model, "--num-prompts", "8", "--resolutions", "32,64x32", "--dtype", "float32")
    spread = run_psctl(*asked, "--num-inference-steps", "3", "--num-replicas", "2", "--images", "spread", "--json")
    assert spread.returncode == 0, spread.stderr
    alone = run_psctl(*asked, "--num-inference-steps", "3", "--images", "alone", "--json")
    assert alone.returncode == 0, alone.stderr
    names = sorted(path.name for path in (tmp_path / "spread").glob("*.png"))
    assert len(names) == 8
    for name in names:
        assert psnr(Image.open(tmp_path / "spread" / name), Image.open(tmp_path / "alone" / name)) >= 70
    manifests = [json.loads((tmp_path / folder / "manifest.json").read_text()) for folder in ("spread", "alone")]
    assert manifests[0] == manifests[1], "it is the same set, whoever draws it"


def test_replicas_scale_with_the_load(model: Path, tmp_path: Path) -> None:
    options = ("--min-replicas", "1", "--max-replicas", "2", "--target-queue-time", "0.5", "--system", "patched-fcfs")
    options += ("--max-queue-time", "600", "--scale-down-delay", "5", "--max-queue", "400")
    with HttpServer(model, tmp_path, *options, start_s=_START_S) as server:
        until(lambda: len(replicas_of(server)) == 1, 60)
        is_enough = threading.Event()

        def keep_busy() -> set[int]:
            codes = set[int]()
            while not is_enough.is_set():
                answers = asyncio.run(burst(server.url, [body(number, 100) for number in range(20)]))
                codes |= {answer.status_code for answer in answers}
            return codes

        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(keep_busy)
            try:
                until(lambda: len(replicas_of(server)) == 2, _START_S)
            finally:
                is_enough.set()
            assert asked.result() == {200}
        until(lambda: len(replicas_of(server)) == 1, 120)
        assert httpx.post(f"{server.url}{GENERATIONS}", json=body(0), timeout=60).status_code == 200
        assert server.stop() == 0
