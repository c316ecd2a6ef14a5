"""A server behind nginx with TLS and a path, pages of other sites, keys that are read again, and the log's options."""

import json
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from patchedserve.data.errors import UsageError
from patchedserve.serving.server.address import Address
from patchedserve.serving.server.keys import Keys
from patchedserve.serving.server.request_log import RequestLog

from ...conftest import RunPsctl
from ...support.http_server import HttpServer, small_model
from ...support.tools import need_tools
from ...support.waits import until

GENERATIONS = "/v1/images/generations"
ASK: dict[str, Any] = {"prompt": "a cat", "size": "32x32", "response_format": "url", "slo": 600}
APP = "https://app.example"
KEYS = '[web]\nkeys = ["first"]\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("proxied")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return small_model(folder / "tiny")


@pytest.fixture(scope="module")
def server(model: Path, folder: Path) -> Iterator[HttpServer]:
    (folder / "keys.toml").write_text(KEYS)
    (folder / "psctl.toml").write_text(f"""
[serve]
root-path = "/images"
trusted-proxy = ["127.0.0.0/8", "10.0.0.1"]
cors-origin = "{APP}"
api-key-file = "{folder}/keys.toml"
allowed-host = "images.example"
log-format = "text"
log-level = "info"
""")
    options = ["--config", str(folder / "psctl.toml")]
    warnings_only = {"PSCTL_SERVE_LOG_LEVEL": "warning"}
    with HttpServer(model, folder / "workspace", *options, env=warnings_only) as found:
        yield found


def headers(key: str = "first", **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **{name.replace("_", "-"): value for name, value in more.items()}}


def address_of_image(server: HttpServer, path: str = "", **more: str) -> str:
    asked = httpx.post(f"{server.url}{path}{GENERATIONS}", json=ASK, headers=headers(**more), timeout=60)
    assert asked.status_code == 200, asked.text
    return asked.json()["data"][0]["url"]


@pytest.mark.parametrize("path", ["", "/images"])
def test_addresses_of_images_have_the_proxys_scheme_and_path(server: HttpServer, path: str) -> None:
    found = address_of_image(server, path, host="images.example", x_forwarded_proto="https")
    assert re.fullmatch(r"https://images\.example/images/v1/images/\S+-0/content", found)
    plain = address_of_image(server, path)
    assert plain.startswith(f"{server.url}/images/v1/images/")
    for inside in (plain, plain.replace("/images/v1", "/v1")):
        assert httpx.get(inside, timeout=60).headers["content-type"] == "image/png"
    assert httpx.get(f"{server.url}{path}/livez").status_code == 200, "open without a key"
    assert httpx.get(f"{server.url}{path}/v1/models").status_code == 401
    # The page's own requests are relative to its address.
    assert 'fetch("v1/models"' in httpx.get(f"{server.url}{path}/").text


def test_behind_nginx_with_tls(server: HttpServer, folder: Path) -> None:
    need_tools("nginx", "openssl")
    subject = ["-subj", "/CN=images.example", "-addext", "subjectAltName=DNS:images.example"]
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-keyout", "key.pem", "-out"]
    subprocess.run([*new, "cert.pem", *subject], cwd=folder, check=True, capture_output=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (folder / "nginx.conf").write_text(f"""
daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
events {{}}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  server {{
    listen 127.0.0.1:{port} ssl; server_name images.example;
    ssl_certificate {folder}/cert.pem; ssl_certificate_key {folder}/key.pem;
    location /images/ {{
      proxy_pass {server.url}/;
      proxy_set_header Host $http_host; proxy_set_header X-Forwarded-Proto $scheme;
    }}
  }}
}}""")
    nginx = subprocess.Popen(["nginx", "-c", folder / "nginx.conf"], stderr=subprocess.DEVNULL)
    try:
        until(lambda: _listens(port))
        # As with `curl --resolve images.example:...`.
        base, host = f"https://127.0.0.1:{port}/images", {"host": f"images.example:{port}"}
        with httpx.Client(verify=False, timeout=60) as client:
            asked = client.post(f"{base}{GENERATIONS}", json=ASK, headers=headers(**host))
            assert asked.status_code == 200, asked.text
            found = asked.json()["data"][0]["url"]
            assert found.startswith(f"https://images.example:{port}/images/v1/images/")
            inside = found.replace(f"images.example:{port}", f"127.0.0.1:{port}")
            assert client.get(inside, headers=host).headers["content-type"] == "image/png"
    finally:
        nginx.terminate()
        nginx.wait(60)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.exhaustive
@pytest.mark.slow
def test_untrusted_clients_do_not_set_the_scheme(model: Path, tmp_path: Path) -> None:
    with HttpServer(model, tmp_path, "--trusted-proxy", "10.0.0.1") as server:
        found = address_of_image(server, x_forwarded_proto="https")
        assert found.startswith(f"{server.url}/v1/images/")


def test_pages_of_listed_sites_may_send_requests(server: HttpServer) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}
    allowed = httpx.options(f"{server.url}{GENERATIONS}", headers={"origin": APP, **asks})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == APP
    assert "x-stainless-os" in allowed.headers["access-control-allow-headers"]
    for key, status in (("first", 200), ("wrong", 401)):
        asked = httpx.post(f"{server.url}{GENERATIONS}", json=ASK, headers=headers(key, origin=APP), timeout=60)
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (status, APP)
        assert "X-Request-Id" in asked.headers["access-control-expose-headers"]
    for origin in ("https://evil.example", "http://app.example", f"{APP}:444", f"{APP}.evil.example", "null"):
        preflight = httpx.options(f"{server.url}{GENERATIONS}", headers={"origin": origin, **asks})
        asked = httpx.post(f"{server.url}{GENERATIONS}", json=ASK, headers=headers(origin=origin))
        assert (preflight.status_code, asked.status_code) == (400, 403)
        assert "access-control-allow-origin" not in {**preflight.headers, **asked.headers}


def test_keys_are_read_again_on_sighup(server: HttpServer, folder: Path) -> None:
    def status(key: str) -> int:
        return httpx.get(f"{server.url}/v1/models", headers=headers(key)).status_code

    file = folder / "keys.toml"
    assert (status("first"), status("second")) == (200, 401)
    file.write_text('[web]\nkeys = ["second"]\nrequests_per_minute = 1\n[other]\nkeys = ["third"]\n')
    server.process.send_signal(signal.SIGHUP)
    server.wait(re.compile("SIGHUP: read the keys again, of 2 owners"))
    assert (status("first"), status("second"), status("third")) == (401, 200, 200)
    asked = [httpx.post(f"{server.url}{GENERATIONS}", json=ASK, headers=headers("second")) for _ in range(2)]
    assert [each.status_code for each in asked] == [200, 429], "limits are those of the file, too"
    file.write_text("[web]\nkeys = []\n")
    server.process.send_signal(signal.SIGHUP)
    server.wait(re.compile("SIGHUP: the keys are as before: --api-key-file .*: web has no keys"))
    assert (status("second"), status("third")) == (200, 200)
    file.write_text(KEYS)
    server.process.send_signal(signal.SIGHUP)
    server.wait(re.compile("of 1 owners"))
    assert (status("first"), status("second")) == (200, 401)


def test_text_log_has_lines_of_its_level_only(server: HttpServer) -> None:
    wrong = httpx.get(f"{server.url}/v1/models", headers=headers("wrong", x_request_id="mine-1"))
    assert wrong.status_code == 401
    line = re.compile(
        r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ WARNING refused request_id=\"mine-1\" .*status=401$", re.MULTILINE
    )
    server.wait(line)
    address_of_image(server)
    assert not any(" INFO " in each or "completed" in each for each in server.lines)


def test_levels_of_the_json_log(capsys: pytest.CaptureFixture[str]) -> None:
    for level, count in (("info", 1), ("warning", 1), ("error", 0)):
        RequestLog(level=level).on_answer("/v1/models", 401, "mine")  # type: ignore[arg-type]
        lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
        assert [line["level"] for line in lines] == ["warning"] * count


def test_new_keys_replace_the_old_ones_everywhere() -> None:
    keys = Keys(named={"web": ["first"]}, operator="first")
    limits = keys.limits
    keys.become(Keys(["second"], {"other": ["third"]}))
    assert keys.owner("Bearer third") == "other"
    assert "other" in limits
    assert "web" not in limits
    assert len(limits) == 2
    assert keys.operator == ""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"origins": ["app.example"]}, "--cors-origin is 'app.example', but it must be like https://app.example"),
        ({"origins": ["*"]}, r"--cors-origin is '\*'"),
        ({"origins": [f"{APP}/"]}, "with no path"),
        ({"root_path": "images"}, "--root-path is 'images', but it must be like /images"),
        ({"root_path": "/images/"}, "--root-path"),
        (
            {"proxies": ["nginx"]},
            "--trusted-proxy: 'nginx' does not appear to be an IPv4 or IPv6 network; give",
        ),
    ],
)
def test_invalid_settings_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Address(**given).check()


def test_invalid_settings_of_the_command(run_psctl: RunPsctl) -> None:
    done = run_psctl("serve", "--http", "--root-path", "images/")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--root-path is 'images/'" in done.stderr
