"""`psctl generate` and `psctl serve` on small random models of each transformer family, as the script makes them."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from ..conftest import RunPsctl

pytestmark = pytest.mark.slow
FAMILIES = (
    *("aura", "chroma", "flux-schnell", "flux2-dev", "flux2-klein", "lumina2", "pixart", "qwen", "sd3", "z-image"),
)


@pytest.fixture(scope="module")
def script(repository: Path) -> dict[str, Any]:
    return runpy.run_path(str(repository / "tests" / "benchmarks" / "make_random_model.py"))


def test_the_script_makes_all_of_them(script: dict[str, Any]) -> None:
    assert {*FAMILIES, "flux-dev", "sdxl"} == set(script["CONFIGS"]) == set(script["TINY"])


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_and_serve(family: str, script: dict[str, Any], run_psctl: RunPsctl, tmp_path: Path) -> None:
    torch.manual_seed(0)
    script["build"](family, is_tiny=True).to(torch.float32).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "psctl.json").write_text('{"max_sequence_length": 16, "resolutions": [64, 128]}')
    common = {"PSCTL_MODEL": str(tmp_path / "model"), "PSCTL_DTYPE": "float32"}
    steps = ("--num-inference-steps", "2")
    drawn = run_psctl("generate", "a hat", "two cars", "-r", "64", "-r", "128x64", *steps, **common)
    assert drawn.returncode == 0, drawn.stderr
    files = sorted(tmp_path.glob("images/*.png"))
    assert [Image.open(file).size for file in files] == [(64, 64), (128, 64)]
    served = run_psctl(
        "serve", "--num-prompts", "3", *steps, "--resolutions", "64,128", "--request-rate", "20", **common
    )
    assert served.returncode == 0, served.stderr
    refused = run_psctl("generate", "a hat", "--cache", "patch", "--overwrite", **common)
    if family != "sd3":
        assert refused.returncode == 2
        assert refused.stderr.splitlines()[-1].startswith("Error: --cache does not work with a")
