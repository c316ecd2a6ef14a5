"""Every wrong request gets an exact error, and the server still draws: over real connections to a real server."""

import gzip
import io
import json
import math
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from PIL import Image

from ..support.bad_requests import BODIES, WRONG
from ..support.http_server import HttpServer
from ..support.tiny_models import save_tiny, tiny_sdxl
from ..support.waits import until

pytestmark = pytest.mark.slow
ASK = {"prompt": "a cat", "num_inference_steps": 2, "slo": 60}
TEXTS = (
    *("prompt", "negative_prompt", "header_slo", "response_format", "output_format", "background", "quality"),
    *("user", "safety_identifier", "model", "colour"),
)
GENERATIONS, EDITS = "/v1/images/generations", "/v1/images/edits"
HEAD = (
    f"POST {GENERATIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    "Authorization: Bearer good\r\n"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    folder = tmp_path_factory.mktemp("server")
    sizes = ["32", "48", "64"]
    model = save_tiny(folder / "tiny", tiny_sdxl(), guidance_scale=4.0, resolutions=sizes, num_inference_steps=30)
    (folder / "keys").write_text("# of others\nanother\nschl\u00fcssel\n", encoding="utf-8")
    # No SLO depends on measured times.
    options = ("--api-key-file", str(folder / "keys"), "--system", "patched-fcfs", "--slo", "600")
    with HttpServer(model, folder / "workspace", *options, env={"PSCTL_API_KEY": "good"}) as running:
        yield running


@pytest.fixture
def http(server: HttpServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60, headers={"authorization": "Bearer good"}) as client:
        yield client
        assert client.post(GENERATIONS, json=ASK).status_code == 200, "and the server still draws"


def error_of(answer: httpx.Response) -> tuple[int, str | None, str]:
    error = answer.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    return answer.status_code, error["param"], error["code"]


@pytest.mark.exhaustive
def test_invalid_fields_are_refused(http: httpx.Client) -> None:
    count = 0
    for fields, param, code, status in WRONG:
        if any(isinstance(value, float) and not math.isfinite(value) for value in fields.values()):
            continue  # not valid JSON
        fields = {"prompt": "a cat", **fields}
        headers = {"content-type": "application/json"}
        if "header_slo" in fields:
            headers["x-slo-seconds"] = fields.pop("header_slo")
        answer = http.post(GENERATIONS, content=json.dumps(fields).encode(), headers=headers)
        assert error_of(answer) == (status, param, code), fields
        count += 1
    assert count >= 70


@pytest.mark.exhaustive
def test_invalid_fields_of_edits_are_refused(http: httpx.Client) -> None:
    file = io.BytesIO()
    Image.new("RGBA", (64, 64)).save(file, "PNG")
    count = 0
    for fields, param, code, status in WRONG:
        # A form's text is read as a number where one is expected, so that some errors of JSON are no errors here.
        if any(
            name in ("size", "moderation", "\ud800") or value == "\ud800" or (name in TEXTS) != isinstance(value, str)
            for name, value in fields.items()
            if value is not None
        ):
            continue
        form: dict[str, Any] = {"prompt": "a cat", **fields}
        headers = {"x-slo-seconds": form.pop("header_slo")} if "header_slo" in form else {}
        parts = {name: (None, _text(value)) for name, value in form.items() if value is not None}
        answer = http.post(EDITS, files={"image": file.getvalue(), **parts}, headers=headers)
        assert error_of(answer) == (status, param, code), fields
        count += 1
    assert count >= 50


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def test_non_object_json_bodies_are_refused(http: httpx.Client) -> None:
    for body in BODIES:
        answer = http.post(GENERATIONS, content=body, headers={"content-type": "application/json"})
        assert error_of(answer) == (400, None, "invalid_json"), body[:60]


@pytest.mark.parametrize(
    ("method", "path", "change", "wanted"),
    [
        (
            "POST",
            GENERATIONS,
            {"content": b"{}", "headers": {"content-type": "text/plain"}},
            (415, "unsupported_media_type"),
        ),
        ("POST", GENERATIONS, {"content": b"{}"}, (415, "unsupported_media_type")),
        (
            "POST",
            GENERATIONS,
            {"content": gzip.compress(json.dumps(ASK).encode()), "headers": {"content-encoding": "gzip"}},
            (415, "unsupported_content_encoding"),
        ),
        ("POST", GENERATIONS, {"json": {**ASK, "negative_prompt": "x" * 300_000}}, (413, "body_too_large")),
        ("POST", GENERATIONS, {"json": ASK, "headers": {"authorization": ""}}, (401, "missing_api_key")),
        ("POST", GENERATIONS, {"json": ASK, "headers": {"authorization": "Basic good"}}, (401, "missing_api_key")),
        ("POST", GENERATIONS, {"json": ASK, "headers": {"authorization": "Bearer goods"}}, (401, "invalid_api_key")),
        ("POST", GENERATIONS, {"json": ASK, "headers": {"host": "evil.example"}}, (403, "host_not_allowed")),
        ("POST", GENERATIONS, {"json": ASK, "headers": {"origin": "http://evil.example"}}, (403, "origin_not_allowed")),
        ("POST", GENERATIONS, {"json": ASK, "headers": {"origin": "null"}}, (403, "origin_not_allowed")),
        ("GET", "/metrics", {"headers": {"authorization": ""}}, (401, "missing_api_key")),
        ("GET", GENERATIONS, {}, (405, "method_not_allowed")),
        ("PUT", "/v1/models", {"json": {}}, (405, "method_not_allowed")),
        ("GET", "/v1/nothing", {}, (404, "unknown_url")),
        ("GET", "/v1/images/..%2f..%2fetc%2fpasswd/content", {}, (404, "unknown_url")),
        ("GET", "/v1/images/img_0-0/content", {}, (404, "not_found")),
        ("GET", "/v1/images/%00/content", {}, (404, "not_found")),
        ("GET", f"{GENERATIONS}/img_0", {}, (404, "not_found")),
        ("DELETE", f"{GENERATIONS}/img_0", {}, (404, "not_found")),
        ("GET", "/v1/models/another", {}, (404, "model_not_found")),
        ("POST", EDITS, {"json": {}}, (400, "missing_required_parameter")),
        ("POST", EDITS, {"data": {"prompt": "a"}}, (415, "unsupported_media_type")),
        ("POST", EDITS, {"files": {"image": b"x"}}, (400, "missing_required_parameter")),
        ("POST", EDITS, {"files": {"image": b"x"}, "data": {"prompt": "a"}}, (400, "invalid_value")),
        ("POST", EDITS, {"files": {"image": b"x"}, "headers": {"authorization": ""}}, (401, "missing_api_key")),
        ("POST", EDITS, {"files": {"image": b"x"}, "headers": {"host": "evil.example"}}, (403, "host_not_allowed")),
        # Pages of other origins can send forms without a preflight request.
        *(
            ("POST", path, {"files": {"image": b"x"}, "headers": {"origin": origin}}, (403, "origin_not_allowed"))
            for path in (EDITS, "/v1/files")
            for origin in ("http://evil.example", "null")
        ),
        ("GET", EDITS, {}, (405, "method_not_allowed")),
        ("POST", "/v1/images/variations", {"json": {}}, (404, "unsupported_endpoint")),
        ("GET", "/v1/files/file-0", {}, (404, "not_found")),
        ("GET", "/v1/files/..%2fsecret", {}, (404, "unknown_url")),
        ("GET", "/v1/files/%2e%2e/content", {}, (404, "not_found")),
        ("DELETE", "/v1/files/file-0", {}, (404, "not_found")),
        ("GET", "/v1/batches/batch_0", {}, (404, "not_found")),
        ("POST", "/v1/batches/batch_0/cancel", {}, (404, "not_found")),
        ("POST", "/v1/files", {"content": b"x"}, (400, "invalid_value")),
        ("POST", "/v1/files", {"files": {"file": b"x"}}, (400, "missing_required_parameter")),
        ("POST", "/v1/files", {"files": {"file": b"x"}, "data": {"purpose": "assistants"}}, (400, "invalid_value")),
        ("POST", "/v1/batches", {"json": {"endpoint": GENERATIONS}}, (400, "missing_required_parameter")),
        ("POST", "/v1/batches", {"json": {"endpoint": "/v1/embeddings"}}, (400, "invalid_value")),
        ("POST", "/v1/batches", {"json": {"endpoint": GENERATIONS, "input_file_id": "file-0"}}, (404, "not_found")),
        (
            "POST",
            "/v1/batches",
            {"json": {"endpoint": GENERATIONS, "input_file_id": "../../x"}},
            (404, "not_found"),
        ),
        ("POST", "/v1/batches", {"content": b"{}"}, (415, "unsupported_media_type")),
        (
            "POST",
            "/v1/batches",
            {"content": b"[]", "headers": {"content-type": "application/json"}},
            (400, "invalid_json"),
        ),
        *(
            ("POST", "/v1/batches", {"json": {"endpoint": GENERATIONS, "metadata": metadata}}, (400, "invalid_value"))
            for metadata in (
                3,
                {"a": 1},
                {"a": "x" * 513},
                {"x" * 65: "a"},
                {"a": "\0"},
                dict.fromkeys("abcdefghijklmnopq", "a"),
            )
        ),
        (
            "POST",
            "/v1/batches",
            {
                "content": b'{"endpoint": "/v1/images/generations", "metadata": {"a": 1e999}}',
                "headers": {"content-type": "application/json"},
            },
            (400, "invalid_value"),
        ),
        ("GET", "/v1/batches?limit=0", {}, (400, "invalid_value")),
        ("GET", "/v1/batches?limit=1e1", {}, (400, "invalid_value")),
        ("GET", "/v1/files?after=file-0", {}, (400, "invalid_value")),
    ],
)
def test_wrong_paths_methods_and_keys_are_refused(
    http: httpx.Client, method: str, path: str, change: dict[str, Any], wanted: tuple[int, str]
) -> None:
    answer = http.request(method, path, **change)
    status, _, code = error_of(answer)
    assert (status, code) == wanted, answer.text


@pytest.mark.parametrize(
    "sent",
    [
        HEAD + "Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        HEAD + "Content-Length: 10\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + "Content-Length: 10\r\nContent-Length: 20\r\n\r\n{}",
        HEAD + "Content-Length: -1\r\n\r\n{}",
        HEAD + f"X-Long: {'x' * 70_000}\r\n\r\n",
        HEAD + "X-Request-Id: a\nb: c\rd\r\nContent-Length: 2\r\n\r\n{}",
        "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        "GET /\r\n\r\n",
        "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_invalid_http_is_refused(http: httpx.Client, server: HttpServer, sent: str) -> None:
    head, body = send_raw(server, sent)
    assert head.startswith("HTTP/1.1 400 "), sent[:80]
    assert json.loads(body)["error"]["code"] == "invalid_http"


def send_raw(server: HttpServer, sent: str) -> tuple[str, str]:
    """Send raw text; return head and body of what the server sends until it closes the connection."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=40) as raw:
        raw.sendall(sent.encode("latin-1"))
        parts = []
        while part := raw.recv(65536):
            parts.append(part)
    head, _, body = b"".join(parts).decode().partition("\r\n\r\n")
    return head, body


def test_forms_may_be_larger_but_are_bounded(http: httpx.Client, server: HttpServer) -> None:
    head, body = send_raw(server, HEAD.replace(GENERATIONS, EDITS) + "Content-Length: 50000001\r\n\r\n")
    assert (head.split()[1], json.loads(body)["error"]["code"]) == ("413", "body_too_large")


@pytest.mark.exhaustive
def test_slow_clients_are_disconnected(http: httpx.Client, server: HttpServer) -> None:
    start = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        no_end_of_the_body = pool.submit(send_raw, server, HEAD + "Content-Length: 100\r\n\r\n{")
        no_end_of_the_head = pool.submit(send_raw, server, HEAD)
    head, body = no_end_of_the_body.result()
    assert (head.split()[1], json.loads(body)["error"]["code"]) == ("408", "body_too_slow")
    assert no_end_of_the_head.result() == ("", ""), "closed without an answer"
    assert time.monotonic() - start < 25


def test_ids_of_other_clients_are_not_disclosed(http: httpx.Client, server: HttpServer) -> None:
    found = http.post(GENERATIONS, json=ASK).json()["id"]
    assert http.get(f"{GENERATIONS}/{found}").status_code == 200
    for _ in range(2):
        assert http.delete(f"{GENERATIONS}/{found}").json()["status"] == "completed", "twice is as good as once"
    long_id = http.get("/health", headers={"x-request-id": "x" * 200}).headers["x-request-id"]
    assert len(long_id) == 16
    # A client with another key does not find files and batches either.
    batch = batch_of(http, [json.dumps({"custom_id": "a", "body": {"prompt": "a cat", "num_inference_steps": 1}})])
    assert http.get("/v1/batches").json()["data"][0]["id"] == batch["id"]
    assert "owner" not in batch
    paths = [f"/v1/batches/{batch['id']}", f"{GENERATIONS}/{found}"]
    paths += [f"/v1/files/{batch[name]}/content" for name in ("input_file_id", "output_file_id")]
    for path in paths:
        assert http.get(path).status_code == 200
        for key in ("another", "schl\u00fcssel"):
            refused = http.get(path, headers={b"authorization": f"Bearer {key}".encode()})
            assert error_of(refused)[::2] == (404, "not_found"), path
    others = {"authorization": "Bearer another"}
    assert http.post(f"/v1/batches/{batch['id']}/cancel", headers=others).status_code == 404
    assert http.delete(f"/v1/files/{batch['input_file_id']}", headers=others).status_code == 404
    assert [http.get(path, headers=others).json()["data"] for path in ("/v1/files", "/v1/batches")] == [[], []]


def test_lists_have_pages(http: httpx.Client) -> None:
    names = {http.post("/v1/files", files={"file": b"x"}, data={"purpose": "batch"}).json()["id"] for _ in range(3)}
    found: list[str] = []
    page: dict[str, Any] = {"has_more": True}
    while page["has_more"]:
        page = http.get("/v1/files", params={"limit": 2, **({"after": found[-1]} if found else {})}).json()
        assert len(page["data"]) <= 2
        found += [each["id"] for each in page["data"]]
    assert len(found) == len({*found})
    assert names <= {*found}
    for name in names:
        http.delete(f"/v1/files/{name}").raise_for_status()


def test_one_large_body_does_not_block_the_server(http: httpx.Client) -> None:
    # As many keys as fit, the last of them twice.
    keys = [f'"{number:x}":1' for number in range(25_000)]
    body = ("{" + ",".join([*keys, keys[-1]]) + "}").encode()
    assert len(body) < 256 * 1024
    start = time.monotonic()
    answer = http.post(GENERATIONS, content=body, headers={"content-type": "application/json"})
    assert error_of(answer) == (400, None, "invalid_json")
    # Comparing every key with every other would take several seconds.
    assert time.monotonic() - start < 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "holds no request"),
        (['{"custom_id": "a", "body": {}}'] * 2, "line 2: custom_id 'a' is that of line 1"),
        (['{"custom_id": "a", "url": "/v1/embeddings", "body": {}}'], "line 1: url is"),
        ([f'{{"custom_id": "{number}", "body": {{}}}}' for number in range(50_001)], "more than 50,000 lines"),
        (["no json"], "line 1: the body is not valid JSON"),
    ],
)
def test_invalid_batch_files_fail(http: httpx.Client, lines: list[str], message: str) -> None:
    batch = batch_of(http, lines)
    assert batch["status"] == "failed"
    assert message in batch["errors"]["data"][0]["message"]


def test_one_bad_line_fails_alone(http: httpx.Client) -> None:
    bodies: list[dict[str, Any]] = [dict(ASK, seed=1), {"prompt": 3, "\ud800": 1}, dict(ASK, seed=2), {"\ud800": 1}]
    bodies[3]["prompt"] = "a cat"
    lines = [json.dumps({"custom_id": str(number), "body": body}) for number, body in enumerate(bodies)]
    batch = batch_of(http, lines)
    assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 4, "completed": 2, "failed": 2})
    errors = [json.loads(line) for line in http.get(f"/v1/files/{batch['error_file_id']}/content").text.splitlines()]
    told_of = [(each["custom_id"], each["response"]["body"]["error"]["param"]) for each in errors]
    assert sorted(told_of) == [("1", "prompt"), ("3", "\\ud800")]


def batch_of(http: httpx.Client, lines: list[str]) -> dict[str, Any]:
    """Run a batch of these lines and return it once it has ended."""
    file = http.post("/v1/files", files={"file": "\n".join(lines).encode()}, data={"purpose": "batch"}).json()
    asked = {"input_file_id": file["id"], "endpoint": GENERATIONS, "completion_window": "24h"}
    name = http.post("/v1/batches", json=asked).json()["id"]
    until(lambda: http.get(f"/v1/batches/{name}").json()["status"] in ("completed", "failed"), 60)
    return http.get(f"/v1/batches/{name}").json()
