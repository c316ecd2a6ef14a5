"""Costs of HTTP and of misbehaving clients: the server compared with the engine in this process, by turns.

    python tests/benchmarks/bench_http.py [--model emoji-xl] [--rounds 6] [--output-file results/http-emoji-xl.json]

Goals (nothing else may run):

    one client at a time, median                 at most 15 ms and 3 % over the engine
    a burst of mixed sizes                       at least 0.97 of the engine's images per second
    `/health` meanwhile, a full queue's refusal  at most 100 and 50 ms at the 99th percentile
    first of three partial images of 30 steps    after at most 0.40 of the latency
    a burst in which all stream three of them    at least 0.90 of the images per second
    a cancelled request                          leaves the batch within 2 steps, 99th percentile
    200 clients that neither send nor read       others' 95th percentile at most 1.1 times as long; closed within 40 s
"""

import argparse
import asyncio
import json
import socket
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np

from patchedserve.data.files import write_json
from patchedserve.data.prompts.captions import load_prompts
from patchedserve.data.requests import Request
from patchedserve.data.workspace import Workspace
from patchedserve.profiling.http.load import LoadSettings, body_of, send_load
from patchedserve.serving.engine.engine import Engine
from patchedserve.serving.engine.replay import replay
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.runs.machine import cpu_name
from patchedserve.serving.scheduling.policies import get_policy
from patchedserve.tests.support.http_server import HttpServer
from patchedserve.tests.support.soak import Usage
from patchedserve.tests.support.waits import until

_BURST, _STEPS, _TAKEN_BACK, _STUCK, _STUCK_ROUNDS = 48, 30, 40, 200, 4
_SATURATION = 2 * _BURST
"""Requests of a burst for the throughput: enough that filling the first and draining the last batch counts little."""


def requests_of(model: ServedModel, count: int) -> list[Request]:
    """Return requests of mixed sizes, all at once, without SLOs."""
    prompts, sizes = load_prompts(), model.defaults.resolutions
    return [
        Request(number, prompts[number], sizes[number % len(sizes)], _STEPS, model.defaults.guidance_scale, seed=number)
        for number in range(count)
    ]


def in_process(model: ServedModel, requests: list[Request]) -> tuple[float, float]:
    """Return images per second and the median latency on the engine."""
    start = time.perf_counter()
    result = replay(Engine(model, get_policy("continuous")), list(map(model.checked, requests)))
    duration_s = time.perf_counter() - start
    return len(requests) / duration_s, median(record.latency_s or 0.0 for record in result.records)


def over_http(settings: LoadSettings, requests: list[Request]) -> tuple[float, list[float]]:
    """Return images per second and all latencies on the server."""
    start = time.perf_counter()
    records = send_load(requests, settings).records
    duration_s = time.perf_counter() - start
    other = [(record.status, record.reason) for record in records if record.status != "completed"]
    assert not other, f"{len(other)} of {len(records)} were not drawn: {other[:3]}"
    return len(requests) / duration_s, [record.latency_s or 0.0 for record in records]


async def saturated(
    settings: LoadSettings, requests: list[Request], *, for_s: float, spread_s: float
) -> tuple[list[float], list[float]]:
    """Return times of `/health` and of refusals in seconds, while there are more clients than places.

    The clients start within `spread_s`, and repeat their request after a response, or half a second after a refusal.
    """
    health: list[float] = []
    late: list[float] = []
    num_clients = _SATURATION + 16
    base = settings.base_url.removesuffix("/v1")
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
        # The time in which this process connects must not count as time of a refusal.
        await asyncio.gather(*(client.get(f"{base}/health") for _ in range(num_clients)))
        end_s = time.perf_counter() + for_s

        async def draw(number: int) -> None:
            request = requests[number % len(requests)]
            await asyncio.sleep(spread_s * number / num_clients)
            while time.perf_counter() < end_s:
                start = time.perf_counter()
                answer = await client.post(settings.url, json=body_of(request, settings))
                if answer.status_code == 429:
                    late.append(time.perf_counter() - start)
                    await asyncio.sleep(0.5)

        async def watch() -> None:
            while time.perf_counter() < end_s:
                start = time.perf_counter()
                (await client.get(f"{base}/health")).raise_for_status()
                health.append(time.perf_counter() - start)
                await asyncio.sleep(0.05)

        await asyncio.gather(watch(), *map(draw, range(num_clients)))
    return health, late


def first_partial(settings: LoadSettings, request: Request) -> float:
    """Return the share of a stream's latency after which its first partial image arrives."""
    body = body_of(request, replace(settings, stream=True))
    start, first_s = time.perf_counter(), None
    with httpx.stream("POST", settings.url, json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if first_s is None and "partial_image" in line:
                first_s = time.perf_counter() - start
    assert first_s is not None, "no partial image"
    return first_s / (time.perf_counter() - start)


def steps_after_cancel(settings: LoadSettings, request: Request, company: list[Request]) -> list[int]:
    """Return how many steps each request still runs after it was cancelled, while others are drawn."""
    stop = threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            send_load(company, settings)

    thread = threading.Thread(target=keep_busy)
    thread.start()
    found = []
    try:
        for number in range(_TAKEN_BACK):
            body = body_of(replace(request, num_inference_steps=100), settings) | {"stream": True, "progress": True}
            asked_at, last = None, 0
            with httpx.stream("POST", settings.url, json=body, timeout=60) as answer:
                name = answer.headers["x-generation-id"]
                for line in answer.iter_lines():
                    if not line.startswith("data: ") or "steps_done" not in line:
                        continue
                    last = json.loads(line[6:])["steps_done"]
                    if asked_at is None and last >= 3 + number % 10:
                        asked_at = last
                        httpx.delete(f"{settings.url}/{name}", timeout=30).raise_for_status()
            assert asked_at is not None, "it was never taken back"
            found.append(last - asked_at)
    finally:
        stop.set()
        thread.join()
    return found


def stuck(settings: LoadSettings, requests: list[Request], process_id: int) -> dict[str, Any]:
    """Measure others' latencies with and without stuck clients, by turns, and the time until these are closed."""
    latencies: dict[str, list[float]] = {"alone": [], "beside": []}
    gone_s, most = [], 0
    for number in range(_STUCK_ROUNDS):
        for side in ("alone", "beside")[:: 1 if number % 2 == 0 else -1]:
            if side == "alone":
                latencies[side] += over_http(settings, requests)[1]
                continue
            before, start = Usage.of(process_id).files, time.perf_counter()
            sockets = stuck_clients(settings)
            most = max(most, Usage.of(process_id).files)
            latencies[side] += over_http(settings, requests)[1]
            until(lambda: Usage.of(process_id).files <= before + 2, 120, 0.2)  # noqa: B023
            gone_s.append(time.perf_counter() - start)
            for opened in sockets:
                opened.close()
    p95 = {side: float(np.percentile(found, 95)) for side, found in latencies.items()}
    return {
        "p95_alone_s": p95["alone"],
        "p95_beside_s": p95["beside"],
        "p95_ratio": p95["beside"] / p95["alone"],
        "gone_s": max(gone_s),
        "most_files": most,
        "raw": latencies,
    }


def stuck_clients(settings: LoadSettings) -> list[socket.socket]:
    """Open stuck clients: a third each send nothing, half a head, half a body; some never read all they request."""
    host, port = settings.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    head = f"POST /v1/images/generations HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    sockets = []
    for number in range(_STUCK):
        opened = socket.socket()
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        opened.connect((host, int(port)))
        sent = ("", head, f"{head}Content-Length: 100\r\n\r\n{{")[number % 3]
        if number % 20 == 0:
            sent = f"GET /openapi.json HTTP/1.1\r\nHost: {host}\r\n\r\n" * 500
        opened.sendall(sent.encode())
        sockets.append(opened)
    return sockets


def measure(model_name: str, rounds: int) -> dict[str, Any]:
    """Run all measurements and return the result."""
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(model_name, workspace=Workspace(folder))
        model.tune(model.defaults.resolutions, Workspace(folder).for_model(model_name, "cpu").tables)
        requests = requests_of(model, _BURST)
        burst = requests_of(model, _SATURATION)
        options = ("--system", "patched-fcfs", "--cache", "off", "--dtype", "auto")
        options += ("--max-queue", str(_SATURATION), "--max-queue-time", "600")
        with HttpServer(model_name, Path(folder), *options, start_s=300) as server:
            settings = LoadSettings(f"{server.url}/v1")
            found: dict[str, list[float]] = {
                name: [] for name in ("own", "http", "stream", "own_s", "http_s", "health", "late", "herd", "partial")
            }
            in_process(model, requests[:6])
            over_http(settings, requests[:6])
            for number in range(rounds):
                sides = ["own", "http", "stream"]
                for side in sides[number % 3 :] + sides[: number % 3]:
                    if side == "own":
                        found[side].append(in_process(model, burst)[0])
                    else:
                        found[side].append(over_http(replace(settings, stream=side == "stream"), burst)[0])
                for request in requests[:9]:
                    found["own_s"].append(in_process(model, [request])[1])
                    found["http_s"] += over_http(settings, [request])[1]
                found["partial"] += [first_partial(settings, request) for request in requests[:6]]
            found["herd"] = asyncio.run(saturated(settings, requests, for_s=1.0, spread_s=0.0))[1]
            found["health"], found["late"] = asyncio.run(saturated(settings, requests, for_s=30.0, spread_s=5.0))
            left = steps_after_cancel(settings, requests[0], requests[1:9])
            company = stuck(
                settings, [replace(each, arrival_s=0.5 * each.request_id) for each in requests], server.process.pid
            )
            assert server.stop() == 0
    more_s = [http - own for own, http in zip(found["own_s"], found["http_s"], strict=True)]
    return {
        "machine": cpu_name(),
        "model": model_name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "rounds": rounds,
        "burst": _SATURATION,
        "latency_own_p50_s": median(found["own_s"]),
        "latency_http_p50_s": median(found["http_s"]),
        "latency_more_p50_ms": 1e3 * median(more_s),
        "latency_ratio": median(http / own for own, http in zip(found["own_s"], found["http_s"], strict=True)),
        "throughput_own": median(found["own"]),
        "throughput_http": median(found["http"]),
        "throughput_ratio": median(http / own for own, http in zip(found["own"], found["http"], strict=True)),
        "streaming_ratio": median(each / http for each, http in zip(found["stream"], found["http"], strict=True)),
        "health_p99_ms": 1e3 * float(np.percentile(found["health"], 99)),
        "refused": len(found["late"]),
        "refused_p99_ms": 1e3 * float(np.percentile(found["late"], 99)) if found["late"] else None,
        "refused_of_all_at_once_p50_ms": 1e3 * median(found["herd"]),
        "first_partial_share": median(found["partial"]),
        "steps_after_cancel_p99": float(np.percentile(left, 99)),
        "steps_after_cancel": left,
        "stuck_clients": company,
        "raw": found,
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="emoji-xl")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--output-file", type=Path)
    given = parser.parse_args()
    result = measure(given.model, given.rounds)
    print(json.dumps({name: value for name, value in result.items() if name != "raw"}, indent=1))
    if given.output_file is not None:
        write_json(given.output_file, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
