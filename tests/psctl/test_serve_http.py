"""`psctl serve --http` as its clients see it: OpenAI's client and raw connections, against a real server."""

import asyncio
import base64
import io
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from patchedserve.eval.metrics.psnr import psnr
from patchedserve.psctl.options.http import HttpFlags
from patchedserve.serving.server.address import Address

from ..conftest import RunPsctl
from ..support.http_server import HttpServer, small_model
from ..support.waits import until

pytestmark = pytest.mark.slow
ASK = {"prompt": "a cat", "num_inference_steps": 3, "seed": 5, "slo": 60}
LONG = {**ASK, "num_inference_steps": 1000, "slo": 600}
"""A request that takes seconds even on the fastest machine."""
MAX_STEPS = ("--max-steps", "1000")
GENERATIONS = "/v1/images/generations"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workspace")


@pytest.fixture(scope="module")
def server(model: Path, workspace: Path) -> Iterator[HttpServer]:
    with HttpServer(model, workspace, "--max-queue", "8", "--served-model-name", "dall-e-3", *MAX_STEPS) as running:
        yield running


def picture(b64_json: str | None) -> Image.Image:
    assert b64_json is not None
    return Image.open(io.BytesIO(base64.b64decode(b64_json)))


def test_openai_client_draws(client: openai.OpenAI, model: Path, run_psctl: RunPsctl, tmp_path: Path) -> None:
    def drawn(n: int) -> list[Image.Image]:
        found = client.images.generate(model="dall-e-3", prompt="a cat", n=n, size="32x32", extra_body=ASK)
        assert found.data is not None
        return [picture(each.b64_json) for each in found.data]

    alone, *none = drawn(1)
    assert not none
    images = drawn(2)
    assert [image.size for image in images] == [(32, 32)] * 2
    for seed, image in zip((5, 6), images, strict=True):
        options = ("--dtype", "float32", "--resolution", "32x32", "--num-inference-steps", "3", "--seed", str(seed))
        done = run_psctl("generate", "a cat", "--model", model, *options, "--output", f"{seed}.png")
        assert done.returncode == 0, done.stderr
        wanted = Image.open(tmp_path / f"{seed}.png")
        assert psnr(image, wanted) >= 70, "in a batch, sums are rounded in another order"
        if seed == 5:
            assert alone.tobytes() == wanted.tobytes()


def test_request_without_cache_is_exact_beside_cached_ones(
    model: Path, workspace: Path, run_psctl: RunPsctl, tmp_path: Path
) -> None:
    body = {**ASK, "size": "32x32", "num_inference_steps": 8}
    options = ("--dtype", "float32", "--resolution", "32x32", "--num-inference-steps", "8", "--seed", "5")
    assert run_psctl("generate", "a cat", "--model", model, *options, "--output", "exact.png").returncode == 0
    del body["slo"]
    with HttpServer(model, workspace, "--cache", "interval", "--cache-interval", "2", "--slo", "32x32=55") as server:

        def drawn(**more: Any) -> dict[str, Any]:
            answer = httpx.post(f"{server.url}{GENERATIONS}", json=body | more, timeout=60)
            assert answer.status_code == 200, answer.text
            assert answer.json()["metrics"]["slo_s"] == 55, "that of the server"
            return answer.json()["data"][0]

        reusing, exact = drawn(), drawn(cache=False)
    wanted = Image.open(tmp_path / "exact.png").tobytes()
    assert exact["steps_reused"] == 0 < reusing["steps_reused"]
    assert picture(exact["b64_json"]).tobytes() == wanted != picture(reusing["b64_json"]).tobytes()


def test_stream_sends_partial_images_then_the_final_one(client: openai.OpenAI) -> None:
    body = {**ASK, "num_inference_steps": 8, "progress": True}
    del body["prompt"]
    stream = client.images.generate(prompt="a cat", stream=True, partial_images=3, extra_body=body)
    events = [json.loads(event.model_dump_json()) for event in stream]
    kinds = [event["type"].removeprefix("image_generation.") for event in events]
    assert [event["partial_image_index"] for event in events if event["type"].endswith("partial_image")] == [0, 1, 2]
    assert kinds[-1] == "completed"
    assert [event["steps_done"] for event in events if event["type"].endswith("progress")] == list(range(1, 9))
    last = picture(events[-1]["b64_json"])
    assert last.size == (64, 32) or last.size == (32, 32)
    assert events[-1]["usage"]["total_tokens"] > 0
    alone = client.images.generate(prompt="a cat", extra_body=body | {"progress": False})
    assert alone.data is not None
    assert picture(alone.data[0].b64_json).tobytes() == last.tobytes()


def test_images_by_url(http: httpx.Client) -> None:
    found = http.post(GENERATIONS, json={**ASK, "response_format": "url", "output_format": "webp", "n": 2}).json()
    urls = [each["url"] for each in found["data"]]
    assert len(set(urls)) == 2
    for url in urls:
        fetched = http.get(url)
        assert (fetched.status_code, fetched.headers["content-type"]) == (200, "image/webp")
        assert Image.open(io.BytesIO(fetched.content)).format == "WEBP"
    status = http.get(f"{GENERATIONS}/{found['id']}").json()
    assert (status["status"], status["seeds"], status["data"]) == ("completed", [5, 6], found["data"])
    assert found["metrics"]["slo_met"] is True
    for name in ("queue_s", "prepare_s", "denoise_s", "decode_s"):
        assert found["metrics"][name] >= 0
    assert http.get("/v1/images/img_0-0/content").json()["error"]["code"] == "not_found"


def test_models_health_and_metrics(http: httpx.Client, server: HttpServer) -> None:
    models = http.get("/v1/models").json()["data"]
    assert [each["id"] for each in models][1] == "dall-e-3"
    assert http.get(f"/v1/models/{models[0]['id']}").json()["sizes"] == ["32x32", "64x32"]
    assert http.get("/v1/models/another").status_code == 404
    assert http.get("/health").json() == {"status": "ready"}
    assert [http.get(path).status_code for path in ("/livez", "/readyz", "/ready")] == [200] * 3
    before = server.metric('psctl_request_success_total{finished_reason="completed"}')
    http.post(GENERATIONS, json={**ASK, "n": 3}).raise_for_status()
    assert server.metric('psctl_request_success_total{finished_reason="completed"}') == before + 3
    assert server.metric("psctl_num_requests_running") == 0
    assert server.metric("psctl_batch_failures") == 0


def test_head_equals_get_without_a_body(http: httpx.Client) -> None:
    named = [path for path, ways in http.get("/openapi.json").json()["paths"].items() if "get" in ways]
    paths = [path for path in named if "{" not in path]
    assert {"/livez", "/readyz", "/v1/models", "/v1/state/stream", "/v1/files"} <= set(paths)
    for path in (*paths, "/", "/v1/models/another", "/v1/images/edits"):
        # The client keeps its connection: bytes after the head would be read as the start of the next response.
        head = http.head(path)
        with http.stream("GET", path) as answer:
            assert (head.status_code, head.content) == (answer.status_code, b""), path
            assert head.headers["content-type"] == answer.headers["content-type"], path


def test_dashboard_queries_existing_metrics(http: httpx.Client) -> None:
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"psctl_\w+", target["expr"])
    }
    there = set(re.findall(r"^# TYPE (psctl_\w+)", http.get("/metrics").text, re.MULTILINE))
    stems = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    assert stems <= there, stems - there
    assert len(asked) > 15


def test_retry_headers_are_sent(http: httpx.Client) -> None:
    for change, status, code, header in (
        ({"n": 9}, 429, "queue_full", "retry-after"),
        ({"slo": 1e-6}, 503, "deadline_unreachable", "x-should-retry"),
    ):
        answer = http.post(GENERATIONS, json={**ASK, **change}, headers={"x-request-id": "mine"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers[header] == {"retry-after": "1", "x-should-retry": "false"}[header]


def test_every_request_has_a_line_in_the_log(http: httpx.Client, server: HttpServer) -> None:
    def line_of(name: str, **change: Any) -> dict[str, Any]:
        http.post(GENERATIONS, json={**ASK, "prompt": "a secret", **change}, headers={"x-request-id": name})
        until(lambda: any(f'"request_id": "{name}"' in line for line in server.lines))
        [found] = [json.loads(line) for line in server.lines if f'"request_id": "{name}"' in line]
        return found

    drawn = line_of("drawn")
    assert (drawn["event"], drawn["n"], drawn["slo_met"]) == ("completed", 1, True)
    refused = line_of("wrong", size="huge")
    assert (refused["event"], refused["route"], refused["status"]) == ("refused", GENERATIONS, 400)
    assert line_of("full", n=9)["code"] == "queue_full"
    assert line_of("late", slo=1e-6)["code"] == "deadline_unreachable"
    assert not any("a secret" in line for line in server.lines)


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_closed", [True, False])
def test_unread_log_does_not_block_the_server(model: Path, workspace: Path, is_closed: bool) -> None:
    with HttpServer(model, workspace, reads_log=False) as server, httpx.Client(base_url=server.url, timeout=20) as http:
        if is_closed:
            assert server.process.stderr is not None
            server.process.stderr.close()
        lost = "psctl_log_lines_lost_total"
        while server.metric(lost) < 3:
            answers = [http.get("/v1/models/x", headers={"X-Request-Id": f"{n:0>128}"}) for n in range(100)]
            assert {each.status_code for each in answers} == {404}
            # This exceeds the capacity of a pipe and the queue: lines must be lost by then.
            assert server.metric('psctl_http_requests_total{code="404",route="/v1/models/{name:path}"}') < 10_000
        assert http.post(GENERATIONS, json=ASK).status_code == 200
        assert server.stop() == 0


def test_id_of_an_open_request_is_refused(http: httpx.Client) -> None:
    long = {**LONG, "stream": True}
    with http.stream("POST", GENERATIONS, json=long, headers={"x-request-id": "mine"}):
        again = http.post(GENERATIONS, json=ASK, headers={"x-request-id": "mine"})
        assert (again.status_code, again.json()["error"]["code"]) == (409, "id_in_flight")
        assert again.headers["x-should-retry"] == "false"
    until(lambda: http.post(GENERATIONS, json=ASK, headers={"x-request-id": "mine"}).status_code == 200)


def test_asynchronous_openai_client_draws(server: HttpServer) -> None:
    async def drawn() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            asked = [client.images.generate(prompt="a cat", size="32x32", extra_body=ASK) for _ in range(3)]
            stream = await client.images.generate(prompt="a cat", stream=True, partial_images=1, extra_body=ASK)
            kinds = [event.type async for event in stream]
            assert all(found.data for found in await asyncio.gather(*asked))
            return kinds

    assert asyncio.run(drawn()) == ["image_generation.partial_image", "image_generation.completed"]


def test_small_responses_are_sent_immediately(http: httpx.Client) -> None:
    times = []
    for _ in range(12):
        start = time.perf_counter()
        http.get("/health").raise_for_status()
        times.append(time.perf_counter() - start)
    # With Nagle's algorithm on a persistent connection, all but the first take 40 ms.
    assert sorted(times)[3] < 0.03, times


def test_client_disconnect_frees_its_places(http: httpx.Client, server: HttpServer) -> None:
    long = {**LONG, "n": 4}
    before = server.metric('psctl_request_success_total{finished_reason="cancelled"}')
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}{GENERATIONS}", json=long, timeout=1)
    until(lambda: server.metric('psctl_request_success_total{finished_reason="cancelled"}') == before + 4)
    assert http.post(GENERATIONS, json={**ASK, "n": 8}).status_code == 200


def test_delete_cancels(http: httpx.Client, server: HttpServer) -> None:
    answers: list[httpx.Response] = []
    long = {**LONG, "stream": True}
    with http.stream("POST", GENERATIONS, json=long) as stream:
        name = stream.headers["x-generation-id"]
        assert http.get(f"{GENERATIONS}/{name}").json()["status"] in ("queued", "in_progress")
        answers.append(http.delete(f"{GENERATIONS}/{name}"))
        told = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: ")]
    assert [each["error"]["code"] for each in told] == ["cancelled"]
    assert answers[0].status_code == 200
    until(lambda: http.get(f"{GENERATIONS}/{name}").json()["status"] == "cancelled")
    assert http.delete(f"{GENERATIONS}/{name}").status_code == 200


def test_signal_drains_the_server(model: Path, workspace: Path) -> None:
    with HttpServer(model, workspace) as server:
        found: list[httpx.Response] = []
        body = {**ASK, "num_inference_steps": 100, "slo": 600}
        asking = threading.Thread(
            target=lambda: found.append(httpx.post(f"{server.url}{GENERATIONS}", json=body, timeout=60))
        )
        asking.start()
        until(lambda: server.metric("psctl_num_requests_running") == 1)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        probes = {path: httpx.get(f"{server.url}{path}").status_code for path in ("/livez", "/readyz", "/health")}
        assert probes == {"/livez": 200, "/readyz": 503, "/health": 200}
        refused = httpx.post(f"{server.url}{GENERATIONS}", json=ASK)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        asking.join(60)
        assert found[0].status_code == 200
        assert server.process.wait(60) == 0


@pytest.mark.exhaustive
def test_idle_connection_outlives_proxy_timeouts(model: Path, workspace: Path) -> None:
    assert HttpFlags().keep_alive == Address().keep_alive_s > 75
    with HttpServer(model, workspace, "--keep-alive", "0.5") as server:
        host, _, port = server.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            for _ in range(2):
                connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
                answer = b""
                while not answer.endswith(b"}"):
                    answer += connection.recv(65536)
                assert answer.startswith(b"HTTP/1.1 200")
            assert connection.recv(65536) == b"", "closed by the server, sooner than by default"


@pytest.mark.exhaustive
def test_requests_beyond_the_timeout_are_cancelled(model: Path, workspace: Path) -> None:
    with HttpServer(model, workspace, "--request-timeout", "0.5", "--drain-timeout", "0.5", *MAX_STEPS) as server:
        given_up = httpx.post(f"{server.url}{GENERATIONS}", json=LONG, timeout=30)
        assert (given_up.status_code, given_up.json()["error"]["code"]) == (504, "timeout")
        assert _errors_of(server, LONG) == ["timeout"]
        until(lambda: server.metric("psctl_num_requests_running") == 0)
        assert server.stop() == 0


@pytest.mark.exhaustive
def test_requests_open_after_draining_receive_an_error(model: Path, workspace: Path) -> None:
    # The clients' threads end with the server, also if the test fails.
    with ThreadPoolExecutor() as pool, HttpServer(model, workspace, "--drain-timeout", "0.5", *MAX_STEPS) as server:
        long = {**LONG, "n": 4}
        told = pool.submit(_errors_of, server, long)
        watching = pool.submit(lambda: httpx.get(f"{server.url}/v1/state/stream", timeout=30).text)
        # The scheduler may delay some of the four.
        until(lambda: server.metric("psctl_num_requests_running") >= 1)
        start = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - start < 10
        assert told.result() == ["draining"]
        assert '"status": "draining"' in watching.result(), "the last that the page is told"


def test_second_signal_ends_the_server_immediately(model: Path, workspace: Path) -> None:
    with ThreadPoolExecutor() as pool, HttpServer(model, workspace, *MAX_STEPS) as server:
        long = {**LONG, "n": 8}
        pool.submit(lambda: httpx.post(f"{server.url}{GENERATIONS}", json=long, timeout=30))
        until(lambda: server.metric("psctl_num_requests_running") >= 1)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(5) == 130
    until(lambda: any("Ended at once by a second signal" in line for line in server.lines))


def _errors_of(server: HttpServer, body: dict[str, Any]) -> list[str]:
    """Return the error codes in the events of a stream."""
    with httpx.stream("POST", f"{server.url}{GENERATIONS}", json={**body, "stream": True}, timeout=60) as stream:
        told = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: ")]
    return [each["error"]["code"] for each in told if "error" in each]


def test_api_keys(model: Path, workspace: Path) -> None:
    with HttpServer(model, workspace, "--log-prompts", env={"PSCTL_API_KEY": "secret"}) as server:
        for headers, status in (
            ({}, 401),
            ({"authorization": "Bearer wrong"}, 401),
            ({"authorization": "Bearer secret"}, 200),
        ):
            assert httpx.post(f"{server.url}{GENERATIONS}", json=ASK, headers=headers, timeout=60).status_code == status
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/metrics").status_code == 401
        key = {"authorization": "Bearer secret"}
        found = httpx.post(f"{server.url}{GENERATIONS}", json={**ASK, "response_format": "url"}, headers=key).json()
        assert httpx.get(found["data"][0]["url"]).status_code == 200, "its address is nobody's guess"
        assert httpx.get(f"{server.url}{GENERATIONS}/{found['id']}").status_code == 401
        assert server.stop(signal.SIGINT) == 0
        assert not any("secret" in line for line in server.lines)
        assert any('"prompt": "a cat"' in line for line in server.lines)


def test_bad_usage_is_refused(run_psctl: RunPsctl, model: Path, server: HttpServer) -> None:
    port = server.url.rpartition(":")[2]
    for options, message in (
        (("--request-rate", "3"), "--request-rate belongs to traces"),
        (("--trace", "poisson"), "--trace belongs to traces"),
        (("--host", "0.0.0.0"), "set PSCTL_API_KEY or --api-key-file, or say --insecure"),
        (("--port", port), f"cannot listen on 127.0.0.1:{port}"),
        (("--api-key-file", "missing"), "missing"),
        (("--max-queue", "0"), "--max-queue"),
        (("--predictor", "missing"), "--predictor belongs to traces"),
        (("--remeasure",), "--remeasure belongs to traces"),
        (("--record", "never"), "add --reuse-templates, or leave it out"),
        (("--template-memory-mb", "9"), "add --reuse-templates, or leave it out"),
        (("--reuse-templates", "--template-disk-mb", "0"), "--template-disk-mb is 0, but it must be above 0"),
        (("--reuse-templates", "--engine", "plain"), "--reuse-templates does not work with --engine plain: only"),
        (("--reuse-templates", "--parallel", "virtual:2"), "--reuse-templates does not work with --parallel: only"),
        (("--reuse-templates", "--cache", "interval"), "--reuse-templates does not work with --cache interval: both"),
        (("--reuse-templates", "--compile"), "--reuse-templates does not work with --compile: its"),
    ):
        done = run_psctl("serve", "--http", "--model", model, *options)
        assert done.returncode in (1, 2)
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    for options in (("--num-replicas", "2"), ("--reuse-templates",)):
        done = run_psctl("serve", "--model", model, *options)
        assert (done.returncode, f"{options[0]} is for servers: add --http" in done.stderr) == (2, True)
    done = run_psctl("serve", "--http", "--cascade", "emoji-xl:4,emoji-xl:50", "--reuse-templates")
    assert (done.returncode, "--reuse-templates is for a single model" in done.stderr) == (2, True)
