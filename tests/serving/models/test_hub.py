"""Hub ids: revisions from the hub's cache, and what is said where nothing can be fetched, to the hub's own client."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ...support.tiny_models import save_tiny, tiny_sdxl

ID = "someone/tiny"


def load(spec: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Load a model in a process of its own, as the hub's client reads its environment once; print its fingerprint."""
    code = (
        "import sys\n"
        "from patchedserve.data.errors import PsctlError\n"
        "from patchedserve.serving.models.loading import load_model\n"
        "try: print(load_model(sys.argv[1], 'cpu', 'float32').fingerprint)\n"
        "except PsctlError as error: print(type(error).__name__, error)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, spec], capture_output=True, text=True, check=False, env=os.environ | environment
    )


@pytest.fixture(scope="module")
def hub_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hub's cache with two commits of a model; `main` is the first."""
    home = tmp_path_factory.mktemp("hub")
    repository = home / "hub" / f"models--{ID.replace('/', '--')}"
    for seed, commit in enumerate(("a" * 40, "b" * 40)):
        save_tiny(repository / "snapshots" / commit, tiny_sdxl(seed))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    (repository / "refs" / "v2").write_text("b" * 40)
    return home


def test_revisions_come_from_the_cache_while_offline(hub_cache: Path) -> None:
    offline = {"HF_HOME": str(hub_cache), "HF_HUB_OFFLINE": "1"}
    marks = {name: load(name, **offline).stdout.strip() for name in (ID, f"{ID}@main", f"{ID}@v2", f"{ID}@{'b' * 40}")}
    assert all(len(mark) == 16 for mark in marks.values()), marks
    assert marks[ID] == marks[f"{ID}@main"] != marks[f"{ID}@v2"] == marks[f"{ID}@{'b' * 40}"]


def test_half_a_download_is_named(hub_cache: Path, tmp_path: Path) -> None:
    home = Path(shutil.copytree(hub_cache, tmp_path / "hub"))
    file = next(home.glob(f"hub/*/snapshots/{'a' * 40}/unet/*.safetensors"))
    file.write_bytes(file.read_bytes()[:10_000])
    run = load(ID, HF_HOME=str(home), HF_HUB_OFFLINE="1")
    assert run.stdout.startswith("RunError"), run.stdout
    assert f"{file.name} is truncated" in run.stdout
    assert len(run.stdout.splitlines()) == 1


@pytest.fixture
def refusing_hub(request: pytest.FixtureRequest) -> Iterator[str]:
    """A hub that answers everything with one status and one of the hub's error codes."""
    status, code = request.param

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:
            """Nobody reads it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.mark.parametrize(
    ("refusing_hub", "spec", "message"),
    [
        ((403, "GatedRepo"), ID, f"RunError model {ID} is gated: accept its terms on the hub, then log in"),
        ((401, "RepoNotFound"), ID, f"UsageError unknown model '{ID}': no such bundled model, directory or hub"),
        ((404, "RevisionNotFound"), f"{ID}@v9", f"UsageError model {ID} has no revision v9: a branch, tag or commit"),
        ((500, ""), ID, f"RunError model {ID} cannot be fetched from the hub: download it on a machine with access"),
    ],
    indirect=["refusing_hub"],
)
def test_what_the_hub_refuses_is_one_line(refusing_hub: str, spec: str, message: str, tmp_path: Path) -> None:
    run = load(spec, HF_ENDPOINT=refusing_hub, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0")
    assert run.stdout.startswith(message), run.stdout + run.stderr
    assert len(run.stdout.splitlines()) == 1
    assert run.stderr == ""
