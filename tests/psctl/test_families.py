"""`psctl generate` and `psctl serve` on small random models of each transformer family, built by the script.

FLUX.1 is also tested with the patch cache, from profile to images.
"""

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from patchedserve.data.tables.schemas import BLOCKS
from patchedserve.data.tables.streams import read_batches, read_facts

from ..conftest import RunPsctl

pytestmark = pytest.mark.slow
FAMILIES = (
    *("aura", "chroma", "flux-kontext", "flux-schnell", "flux2-dev", "flux2-klein", "lumina2", "pixart", "qwen"),
    *("sd3", "z-image"),
)


def write_model(script: dict[str, Any], family: str, folder: Path) -> dict[str, str]:
    """Write a model and return the environment for it."""
    torch.manual_seed(0)
    script["build"](family, script["TINY"]).to(torch.float32).save_pretrained(folder / "model")
    (folder / "model" / "psctl.json").write_text('{"max_sequence_length": 16, "resolutions": [64, 128]}')
    return {
        "PSCTL_MODEL": str(folder / "model"),
        "PSCTL_DTYPE": "float32",
        "PSCTL_WORKSPACE": str(folder / "workspace"),
    }


@pytest.fixture(scope="module")
def script(repository: Path) -> dict[str, Any]:
    return runpy.run_path(str(repository / "tests" / "benchmarks" / "make_random_model.py"))


def test_script_builds_all_families(script: dict[str, Any]) -> None:
    assert {*FAMILIES, "flux-dev", "sdxl"} == set(script["CONFIGS"]) == set(script["TINY"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_and_serve(family: str, script: dict[str, Any], run_psctl: RunPsctl, tmp_path: Path) -> None:
    common = write_model(script, family, tmp_path)
    steps = ("--num-inference-steps", "2")
    drawn = run_psctl("generate", "a hat", "two cars", "-r", "64", "-r", "128x64", *steps, **common)
    assert drawn.returncode == 0, drawn.stderr
    files = sorted(tmp_path.glob("images/*.png"))
    assert [Image.open(file).size for file in files] == [(64, 64), (128, 64)]
    served = run_psctl(
        "serve",
        "--num-prompts",
        "3",
        *steps,
        "--resolutions",
        "64,128",
        "--request-rate",
        "20",
        "--slo",
        "60",
        **common,
    )
    assert served.returncode == 0, served.stderr
    images = [np.asarray(Image.open(file), dtype=np.int16) for file in files]
    strips = ("--parallel", "virtual:2", "--output", str(tmp_path / "strips"))
    drawn = run_psctl("generate", "a hat", "two cars", "-r", "64", "-r", "128x64", *steps, *strips, **common)
    assert drawn.returncode == 0, drawn.stderr
    found = [np.asarray(Image.open(file), dtype=np.int16) for file in sorted((tmp_path / "strips").glob("*.png"))]
    for image, own in zip(images, found, strict=True):
        assert abs(image - own).max() <= 1


@pytest.mark.exhaustive
def test_cache_workflow_from_profile_to_serving(script: dict[str, Any], run_psctl: RunPsctl, tmp_path: Path) -> None:
    environment = write_model(script, "flux-dev", tmp_path) | {"PSCTL_CACHE_PATCH_SIZE": "4", "PSCTL_WARMUP_STEPS": "1"}

    def run(*arguments: Any) -> Any:
        done = run_psctl(*arguments, "--num-inference-steps", 6, "--json", **environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    said = run("profile", "blocks", "--num-prompts", 4, "--max-lag", 2)
    table = Path(said["table"])
    assert read_facts(table, BLOCKS)["blocks"] == ["transformer0", "transformer1", "single0", "single1"]
    changes = [batch.column("output_mse_normalised").to_numpy() for batch in read_batches(table, BLOCKS)]
    threshold = float(np.median(np.concatenate(changes)))
    done = run_psctl("train-predictor", "cache", "--threshold", threshold, "--trees", 4, **environment)
    assert done.returncode == 0, done.stderr

    cached = run("serve", "--num-prompts", 3, "--request-rate", "inf", "--cache", "patch")
    assert cached["completed_requests"] == 3
    assert 0 < cached["cache"]["saved_computation"] < 1

    images = {}
    ways = {"off": "off", "same": "patch --cache-threshold 0", "blocks": "patch --cache-threshold 2", "whole": "patch"}
    for name, options in ways.items():
        folder = tmp_path / name
        run("generate", "a hat", "two cars", "-r", 64, "-r", "128x64", "--cache", *options.split(), "-o", folder)
        images[name] = [np.asarray(Image.open(file), int) for file in sorted(folder.glob("*.png"))]
        assert len(images[name]) == 2
    for place, plain in enumerate(images["off"]):
        assert abs(images["same"][place] - plain).max() <= 1
        assert (images["blocks"][place] != plain).any()
        assert (images["whole"][place] != plain).any()
