"""Sets of generated images: drawn, continued, refused."""

import json
from pathlib import Path

import diffusers
import numpy as np
import pytest
from PIL import Image

from patchedserve.data.errors import RunError, UsageError
from patchedserve.data.files import write_json
from patchedserve.eval.sets.drawers import EngineDrawer
from patchedserve.eval.sets.generate import Manifest, generate_set, make_items, open_set, read_manifest
from patchedserve.eval.sets.image_sets import require_same_prompts
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions, ModelOptions

from ...support.eval_cases import SIZES, manifest_of, save_eval_model
from ...support.plain import plain_image
from ...support.tiny_models import tiny_sdxl

pytest.importorskip("torchmetrics", reason="the extra `eval` is not installed")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_eval_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def model(model_dir: Path) -> ServedModel:
    return load_model(str(model_dir), "cpu", "float32")


def test_settings_name_the_model_and_everything_that_affects_images(model_dir: Path, model: ServedModel) -> None:
    own = manifest_of(model).settings
    assert own["model"] == model.name
    assert not {"sampler", "lora", "prompt_cache_mb", "offload", "parallel"} & set(own)
    # Keeping conditioning changes no image, another sampler does.
    keeps = load_model(str(model_dir), "cpu", "float32", EngineOptions(prompt_cache_mb=8))
    assert manifest_of(keeps).settings == own
    other = manifest_of(
        load_model(str(model_dir), "cpu", "float32", EngineOptions(model=ModelOptions(sampler="ddim")))
    ).settings
    assert other == dict(own) | {"sampler": "ddim", "fingerprint": other["fingerprint"]}
    assert other["fingerprint"] != own["fingerprint"]


@pytest.mark.slow
def test_set_equals_plain_diffusers_and_resumes(model: ServedModel, tmp_path: Path) -> None:
    from patchedserve.eval.sets.generate import _request

    manifest = manifest_of(model)
    steps: list[int] = []
    assert generate_set(EngineDrawer(model), tmp_path, manifest, on_step=steps.append) == ()
    assert sum(steps) == 5 * 2
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [f"00{i}.png" for i in range(5)]
    pipe = tiny_sdxl()
    for i, item in enumerate(manifest.items):
        found = np.asarray(Image.open(tmp_path / item.file), dtype=int)
        expected = np.asarray(plain_image(pipe, _request(i, item, manifest.settings)), dtype=int)
        assert (item.seed, found.shape[:2]) == (7 + i, (32, 32 if i % 2 == 0 else 48))
        assert np.abs(found - expected).max() <= 1
    # Only the missing image is drawn, and it is the same as before.
    changed = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.png")}
    first = np.asarray(Image.open(tmp_path / "003.png"), dtype=int)
    (tmp_path / "003.png").unlink()
    steps.clear()
    generate_set(EngineDrawer(model), tmp_path, manifest, on_step=steps.append)
    assert sum(steps) == 2
    assert {path.name for path in tmp_path.glob("*.png") if path.stat().st_mtime_ns != changed[path.name]} == {
        "003.png"
    }
    # It is now alone in its batch, and so equal up to rounding.
    assert np.abs(np.asarray(Image.open(tmp_path / "003.png"), dtype=int) - first).max() <= 1
    assert read_manifest(tmp_path) == manifest


def test_resuming_a_different_set_is_refused(model: ServedModel, tmp_path: Path) -> None:
    manifest = manifest_of(model)
    assert [item.file for item in open_set(tmp_path, manifest)] == [f"00{i}.png" for i in range(5)]
    with pytest.raises(UsageError, match=r"holds another set of images: policy is 'fcfs', but .* with 'continuous'"):
        open_set(tmp_path, manifest_of(model, policy="fcfs"))
    with pytest.raises(UsageError, match=r"cache is 0\.3, but .* None"):
        open_set(tmp_path, manifest_of(model, cache=0.3))
    # The set was drawn by other code, or by a psctl that did not record its version.
    with pytest.raises(UsageError) as caught:
        open_set(tmp_path, manifest_of(model, diffusers_version="9.9"))
    assert str(caught.value) == (
        f"{tmp_path}: holds another set of images: diffusers_version is '9.9', but its images were drawn with "
        f"'{diffusers.__version__}'; to draw anew, give another folder or delete this one"
    )
    with pytest.raises(UsageError, match="psctl_version is None, but"):
        open_set(tmp_path, manifest_of(model, psctl_version=None))
    with pytest.raises(UsageError, match="torch_version is None, but"):
        open_set(tmp_path, manifest_of(model, torch_version=None))
    with pytest.raises(UsageError, match="6 images were asked for, but it is a set of 5"):
        open_set(tmp_path, manifest_of(model, 6))
    other = Manifest(make_items([(f"pair-{i}", "a cat") for i in range(5)], SIZES, seed=7), manifest.settings)
    with pytest.raises(UsageError, match="prompts, seeds or sizes are others"):
        open_set(tmp_path, other)
    with pytest.raises(UsageError, match=r"000\.png has prompt 'a hat 0' in the first"):
        require_same_prompts(manifest, other)
    require_same_prompts(manifest, manifest_of(model, policy="fcfs"))
    loose = tmp_path / "loose"
    loose.mkdir()
    Image.new("RGB", (8, 8)).save(loose / "a.png")
    with pytest.raises(UsageError, match="holds images but no manifest"):
        open_set(loose, manifest)


def test_damaged_manifests_are_named(model: ServedModel, tmp_path: Path) -> None:
    open_set(tmp_path, manifest_of(model))
    file = tmp_path / "manifest.json"
    content = json.loads(file.read_text())
    content["images"][0]["prompt"] = "a dog"
    file.write_text(json.dumps(content))
    with pytest.raises(UsageError, match="was changed after it was written"):
        read_manifest(tmp_path)
    del content["images"][0]["prompt"]
    file.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"manifest\.json: is damaged"):
        read_manifest(tmp_path)
    file.write_text("{}")
    with pytest.raises(UsageError, match="is not a manifest of psctl"):
        read_manifest(tmp_path)


def test_invalid_items_are_refused() -> None:
    with pytest.raises(UsageError, match="ids of the text-image pairs must differ"):
        make_items([("a", "x"), ("a", "y")], SIZES)
    with pytest.raises(UsageError, match="0 prompts"):
        make_items([], SIZES)
    with pytest.raises(UsageError, match="may be at most"):
        make_items([("a", "x"), ("b", "y")], SIZES, seed=2**63 - 1)


def test_failed_images_are_counted_and_others_kept(model: ServedModel, tmp_path: Path) -> None:
    manifest = manifest_of(model, 3)
    # A broken link is not an image yet; its target is a folder that cannot be created.
    write_json(tmp_path / "manifest.json", manifest.to_json())
    (tmp_path / "file").touch()
    (tmp_path / "001.png").symlink_to(tmp_path / "file" / "inside.png")
    with pytest.raises(RunError, match=r"1 of 3 images failed.*001\.png"):
        generate_set(EngineDrawer(model), tmp_path, manifest)
    assert (tmp_path / "002.png").is_file()
    (failed,) = generate_set(EngineDrawer(model), tmp_path, manifest, max_bad=1)
    assert failed.startswith("001.png: ")
