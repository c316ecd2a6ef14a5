"""`psctl router` before real servers: OpenAI's client, servers that stop or are killed, and clients that leave."""

import base64
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from patchedserve.data.resolution import Resolution
from patchedserve.serving.runs.http.proxy import _USUAL, _work_of

from ..conftest import RunPsctl
from ..support.http_server import HttpServer, routing, small_model
from ..support.waits import until

SMALL = {"prompt": "a cat", "size": "32x32", "num_inference_steps": 2, "seed": 1}
LARGE = {"prompt": "a dog", "size": "64x32", "num_inference_steps": 100, "seed": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[HttpServer]]:
    """Two servers, which tests of their ends start again."""
    options = ("--system", "patched-fcfs", "--max-queue-time", "600")
    with (
        HttpServer(model, tmp_path_factory.mktemp("one"), *options) as one,
        HttpServer(model, tmp_path_factory.mktemp("other"), *options) as other,
    ):
        yield [one, other]


@pytest.fixture(scope="module")
def router(servers: list[HttpServer]) -> Iterator[str]:
    with routing(*urls_of(servers)) as (url, _):
        yield url


def urls_of(servers: list[HttpServer]) -> list[str]:
    return [f"{server.url}/v1" for server in servers]


def generate(url: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}/v1/images/generations", json=body, timeout=120)


def states(router: str) -> dict[str, dict[str, Any]]:
    return httpx.get(f"{router}/health").json()["servers"]


@pytest.mark.slow
def test_clients_see_one_server(router: str, servers: list[HttpServer], tmp_path: Path) -> None:
    client = openai.OpenAI(base_url=f"{router}/v1", api_key="none", max_retries=0)
    assert [each.id for each in client.models.list()] == [each["id"] for each in models_of(servers[0])]
    drawn: Any = client.images.generate(prompt="a cat", size="32x32", extra_body={"num_inference_steps": 2, "seed": 1})  # type: ignore[call-overload]
    assert drawn.data[0].b64_json == generate(servers[0].url, SMALL).json()["data"][0]["b64_json"]
    # An image is fetched from the server that has drawn it, at the router's address.
    found = [generate(router, SMALL | {"response_format": "url"}) for _ in range(2)]
    for answered in found:
        url = answered.json()["data"][0]["url"]
        assert url.startswith(f"{router}/v1/images/")
        assert httpx.get(url).content == base64.b64decode(drawn.data[0].b64_json)
    with client.images.with_streaming_response.generate(
        prompt="a cat", size="32x32", stream=True, partial_images=1, extra_body={"num_inference_steps": 2}
    ) as stream:  # type: ignore[call-overload]
        kinds = [line for line in stream.iter_lines() if line.startswith("event:")]
    assert kinds[-1] == "event: image_generation.completed"
    refused = generate(router, SMALL | {"size": "7x7"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "size")
    assert refused.headers["x-psctl-server"] in urls_of(servers)
    for method, path, code in (("GET", "/v1/batches", 404), ("DELETE", "/v1/models", 404), ("GET", "/docs", 404)):
        answered = httpx.request(method, f"{router}{path}")
        assert (answered.status_code, answered.json()["error"]["code"]) == (code, "not_found")
    answered = httpx.get(f"{router}/v1/models", headers={"Host": "evil.example"})
    assert (answered.status_code, answered.json()["error"]["code"]) == (403, "host_not_allowed")
    answered = httpx.post(f"{router}/v1/images/generations", content=b"{")
    assert (answered.status_code, answered.json()["error"]["code"]) == (400, "invalid_json")


def models_of(server: HttpServer) -> list[dict[str, Any]]:
    return httpx.get(f"{server.url}/v1/models").json()["data"]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_request_of_a_stopped_server_is_drawn_by_another(router: str, servers: list[HttpServer]) -> None:
    """While a server has a large image, small ones go to the other; when it stops, its image does, too."""
    # Of servers with equal work, the one with the first name is chosen.
    first, other = sorted(servers, key=lambda server: server.url)
    alone = generate(first.url, LARGE).json()["data"][0]["b64_json"]
    with ThreadPoolExecutor(1) as pool:
        first.process.send_signal(signal.SIGSTOP)
        try:
            large = pool.submit(generate, router, LARGE)
            until(lambda: states(router)[f"{first.url}/v1"]["pixel_steps"] == 64 * 32 * 100)
            for _ in range(3):
                assert generate(router, SMALL).headers["x-psctl-server"] == f"{other.url}/v1"
            drawn = large.result(120)
            assert drawn.headers["x-psctl-server"] == f"{other.url}/v1"
            assert drawn.json()["data"][0]["b64_json"] == alone
            assert not states(router)[f"{first.url}/v1"]["is_up"]
            assert httpx.get(f"{router}/readyz").status_code == 200
        finally:
            first.process.send_signal(signal.SIGCONT)
    until(lambda: states(router)[f"{first.url}/v1"]["is_up"])
    assert all(state["pixel_steps"] == 0 for state in states(router).values())
    metrics = httpx.get(f"{router}/metrics").text
    assert f'psctl_router_server_up{{server="{first.url}/v1"}} 1.0' in metrics
    assert f'psctl_router_answers_total{{server="{other.url}/v1",status="200"}}' in metrics


@pytest.mark.slow
def test_leaving_cancels_the_image(router: str, servers: list[HttpServer]) -> None:
    def num_cancelled() -> float:
        return sum(each.metric('psctl_request_success_total{finished_reason="cancelled"}') for each in servers)

    before = num_cancelled()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{router}/v1/images/generations", json=LARGE | {"num_inference_steps": 200}, timeout=0.2)
    until(lambda: num_cancelled() == before + 1)
    until(lambda: all(state["pixel_steps"] == 0 for state in states(router).values()))


@pytest.mark.slow
def test_killed_servers_cost_no_request(model: Path, servers: list[HttpServer], tmp_path: Path) -> None:
    with (
        HttpServer(model, tmp_path / "third", "--system", "patched-fcfs") as third,
        routing(f"{third.url}/v1", f"{servers[0].url}/v1") as (url, process),
    ):
        assert all(state["is_up"] for state in states(url).values())
        third.process.kill()
        for _ in range(4):
            assert generate(url, SMALL).headers["x-psctl-server"] == f"{servers[0].url}/v1"
        with ThreadPoolExecutor(1) as pool:
            last = pool.submit(generate, url, LARGE)
            until(lambda: states(url)[f"{servers[0].url}/v1"]["pixel_steps"] == 64 * 32 * 100)
            process.send_signal(signal.SIGTERM)
            assert last.result(120).status_code == 200, "open requests are finished"
        assert process.wait(60) == 0
    with routing(f"{third.url}/v1") as (url, process):
        answered = generate(url, SMALL)
        assert (answered.status_code, answered.json()["error"]["code"]) == (503, "not_ready")
        assert httpx.get(f"{url}/readyz").status_code == 503
        assert httpx.get(f"{url}/livez").status_code == 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpu1:8000/v1"], "the server is 'gpu1:8000/v1', but it must be like http://gpu1:8000/v1"),
        (["http://gpu1:8000"], "the server is 'http://gpu1:8000', but it must be like http://gpu1:8000/v1"),
        (["http://a/v1", "http://a/v1/"], "the server http://a/v1 is given twice"),
        (
            ["http://a/v1", "--router", "mask-aware"],
            "router mask-aware asks how long steps take, and there is no predictor to tell it",
        ),
    ],
)
def test_bad_options_are_refused(arguments: list[str], message: str, run_psctl: RunPsctl) -> None:
    done = run_psctl("router", *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"Error: {message}\n")


def form(**fields: str) -> bytes:
    parts = [f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}' for name, value in fields.items()]
    image = '--b\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\nContent-Type: image/png\r\n\r\n'
    return "\r\n".join([*parts, image + "x" * 200_000, "--b--\r\n"]).encode()


@pytest.mark.parametrize(
    ("kind", "body", "size", "steps"),
    [
        (b"application/json", b'{"size": "512x768", "num_inference_steps": 20, "n": 2}', Resolution(512, 768), 40),
        (b"application/json", b'{"width": 512, "height": 768, "steps": 20}', Resolution(512, 768), 20),
        (b"application/json", b'{"size": "auto", "n": "many"}', *_USUAL),
        (b"application/json", b"{}", *_USUAL),
        (b"multipart/form-data; boundary=b", form(size="512x768", steps="7"), Resolution(512, 768), 7),
        (b"multipart/form-data; boundary=b", form(prompt="a cat"), *_USUAL),
    ],
)
def test_work_of_a_request(kind: bytes, body: bytes, size: Resolution, steps: int) -> None:
    assert _work_of(kind, body) == (size, steps)
