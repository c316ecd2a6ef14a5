"""Hub ids: revisions from the hub's cache, and errors if the hub's client cannot fetch a model."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from ...support.hub import serving_hub
from ...support.original_checkpoint import save_original
from ...support.tiny_models import save_tiny, tiny_sd, tiny_sdxl

ID = "someone/tiny"


def load(*specs: str, dtypes: Sequence[str] = ("float32",), **environment: str) -> subprocess.CompletedProcess[str]:
    """Load models in a process of their own, as the hub's client reads its environment once, and print fingerprints.

    `dtypes` has a number format for each model, or one for all.
    """
    code = (
        "import sys\n"
        "from patchedserve.data.errors import PsctlError\n"
        "from patchedserve.serving.models.loading import load_model\n"
        "for pair in sys.argv[1:]:\n"
        "    spec, _, dtype = pair.rpartition(' ')\n"
        "    try: print(load_model(spec, 'cpu', dtype).fingerprint)\n"
        "    except PsctlError as error: print(type(error).__name__, error)\n"
    )
    formats = [*dtypes] if len(dtypes) > 1 else [*dtypes] * len(specs)
    return subprocess.run(
        [sys.executable, "-c", code, *(f"{spec} {dtype}" for spec, dtype in zip(specs, formats, strict=True))],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )


@pytest.fixture(scope="module")
def hub_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache of the hub with two commits of a model; `main` is the first."""
    home = tmp_path_factory.mktemp("hub")
    repository = home / "hub" / f"models--{ID.replace('/', '--')}"
    for seed, commit in enumerate(("a" * 40, "b" * 40)):
        save_tiny(repository / "snapshots" / commit, tiny_sdxl(seed))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    (repository / "refs" / "v2").write_text("b" * 40)
    return home


@pytest.mark.exhaustive
def test_revisions_are_loaded_from_the_cache_while_offline(hub_cache: Path) -> None:
    offline = {"HF_HOME": str(hub_cache), "HF_HUB_OFFLINE": "1"}
    run = load(ID, f"{ID}@main", f"{ID}@v2", f"{ID}@{'b' * 40}", **offline)
    marks = run.stdout.split()
    assert [len(mark) for mark in marks] == [16] * 4, run.stdout + run.stderr
    assert marks[0] == marks[1] != marks[2] == marks[3]


@pytest.mark.exhaustive
def test_incomplete_download_is_named(hub_cache: Path, tmp_path: Path) -> None:
    home = Path(shutil.copytree(hub_cache, tmp_path / "hub"))
    file = next(home.glob(f"hub/*/snapshots/{'a' * 40}/unet/*.safetensors"))
    file.write_bytes(file.read_bytes()[:10_000])
    run = load(ID, HF_HOME=str(home), HF_HUB_OFFLINE="1")
    assert run.stdout.startswith("RunError"), run.stdout
    assert f"{file.name} is truncated" in run.stdout
    assert len(run.stdout.splitlines()) == 1


@pytest.fixture
def refusing_hub(request: pytest.FixtureRequest) -> Iterator[str]:
    """Hub that answers every request with one status and one of the hub's error codes."""
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
            """Write no log."""

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
def test_hub_refusals_give_a_one_line_error(refusing_hub: str, spec: str, message: str, tmp_path: Path) -> None:
    run = load(spec, HF_ENDPOINT=refusing_hub, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0")
    assert run.stdout.startswith(message), run.stdout + run.stderr
    assert len(run.stdout.splitlines()) == 1
    assert run.stderr == ""


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return repositories of a model in both variants and of one in float16 only, by hub id."""
    folder = tmp_path_factory.mktemp("repositories")
    for name, variants in (("both", (None, "fp16")), ("half", ("fp16",))):
        for variant in variants:
            pipe = tiny_sdxl() if variant is None else tiny_sdxl().to(torch.float16)
            pipe.save_pretrained(folder / name, variant=variant)
    return {f"someone/{path.name}": path for path in folder.iterdir()}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_requested_variant_is_downloaded(repositories: dict[str, Path], tmp_path: Path) -> None:
    both, half = repositories["someone/both"], repositories["someone/half"]
    wanted = {
        "someone/whole": (both, "bfloat16", ""),
        "someone/halved": (both, "float16", ".fp16"),
        "someone/half": (half, "float32", ".fp16"),
    }
    dtypes = [dtype for _, dtype, _ in wanted.values()]
    with serving_hub({spec: folder for spec, (folder, _, _) in wanted.items()}) as hub:
        online = load(*wanted, dtypes=dtypes, HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0")
        weights = {file for file in hub.fetched if file.endswith(".safetensors")}
    marks = online.stdout.split()
    assert [len(mark) for mark in marks] == [16] * 3, online.stdout + online.stderr
    assert len(weights) == 4 * 3
    for spec, (_, _, variant) in wanted.items():
        assert f"{spec}/unet/diffusion_pytorch_model{variant}.safetensors" in weights
    # Downloaded weights load offline and in other formats, too.
    others = ["float32"] * 3 + ["float16"] * 3
    again = load(*wanted, *wanted, dtypes=others, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    assert again.stdout.split() == marks * 2, again.stderr


def test_settings_are_validated_before_weights_are_downloaded(repositories: dict[str, Path], tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from patchedserve.serving.models.loading import model_defaults, model_geometry\n"
        "model_geometry(sys.argv[1])\n"
        "print(model_defaults(sys.argv[1]).default_resolution, 'torch' in sys.modules)\n"
    )
    with serving_hub(repositories) as hub:
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        run = subprocess.run(
            [sys.executable, "-c", code, "someone/both"], capture_output=True, text=True, check=False, env=environment
        )
        assert hub.fetched
        assert not [file for file in hub.fetched if file.endswith(".safetensors")]
    assert run.stdout == "64x64 False\n", run.stdout + run.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_configuration_of_a_single_file_comes_from_the_hub(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="the extra single-file is not installed")
    pipe, published = tiny_sd(), "stable-diffusion-v1-5/stable-diffusion-v1-5"
    file = save_original(pipe, tmp_path / "finetuned.safetensors")
    repository = save_tiny(tmp_path / "repository", pipe)
    with serving_hub({published: repository}) as hub:
        online = load(str(file), HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="0")
    assert len(online.stdout.strip()) == 16, online.stdout + online.stderr
    assert not [name for name in hub.fetched if name.endswith(".safetensors")]
    assert load(str(file), HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="1").stdout == online.stdout
