"""Evaluations from end to end on tiny models: sets of images, features, metrics, comparisons."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from patchedserve.data.datasets.base import BadEntries
from patchedserve.data.datasets.folders import open_folder
from patchedserve.data.errors import RunError, UsageError
from patchedserve.data.files import write_json
from patchedserve.data.resolution import Resolution
from patchedserve.data.workspace import Workspace
from patchedserve.eval.compare_run import compare
from patchedserve.eval.eval_options import EvalOptions, plan_eval
from patchedserve.eval.eval_run import evaluate_folders, evaluate_model
from patchedserve.eval.features import features_of
from patchedserve.eval.generate_set import (
    Manifest,
    generate_set,
    generation_settings,
    make_items,
    open_set,
    read_manifest,
)
from patchedserve.eval.image_sets import require_same_prompts
from patchedserve.eval.judges import Judges
from patchedserve.eval.measure import measure_pairs, measure_sets
from patchedserve.eval.psnr import psnr
from patchedserve.eval.result_files import EvalResults
from patchedserve.eval.ssim import ssim
from patchedserve.serving.loading import load_model
from patchedserve.serving.model import ServedModel
from patchedserve.serving.stepper import EngineOptions

from .helpers import plain_image, save_tiny, tiny_sdxl

pytest.importorskip("torchmetrics", reason="the extra `eval` is not installed")
SIZES = (Resolution(32, 32), Resolution(48, 32))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    return save_tiny(path, tiny_sdxl(), num_inference_steps=2, guidance_scale=3.0, resolutions=["32", "48x32"])


@pytest.fixture(scope="module")
def model(model_dir: Path) -> ServedModel:
    return load_model(str(model_dir), "cpu", "float32")


def _manifest(model: ServedModel, count: int = 5, **changes: Any) -> Manifest:
    settings = generation_settings(model, policy="bucketed", num_inference_steps=2, guidance_scale=3.0)
    return Manifest(make_items([(f"pair-{i}", f"a hat {i}") for i in range(count)], SIZES, seed=7), settings | changes)


# Sets of generated images


def test_a_set_is_what_plain_diffusers_draws_and_goes_on_where_it_stopped(model: ServedModel, tmp_path: Path) -> None:
    from patchedserve.eval.generate_set import _request

    manifest = _manifest(model)
    steps: list[int] = []
    assert generate_set(model, tmp_path, manifest, on_step=steps.append) == ()
    assert sum(steps) == 5 * 2
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [f"00{i}.png" for i in range(5)]
    pipe = tiny_sdxl()
    for i, item in enumerate(manifest.items):
        found = np.asarray(Image.open(tmp_path / item.file), dtype=int)
        expected = np.asarray(plain_image(pipe, _request(i, item, manifest.settings)), dtype=int)
        assert (item.seed, found.shape[:2]) == (7 + i, (32, 32 if i % 2 == 0 else 48))
        assert np.abs(found - expected).max() <= 1
    # Only what is missing is drawn, and it is the same again.
    changed = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.png")}
    first = np.asarray(Image.open(tmp_path / "003.png"), dtype=int)
    (tmp_path / "003.png").unlink()
    steps.clear()
    generate_set(model, tmp_path, manifest, on_step=steps.append)
    assert sum(steps) == 2
    assert {path.name for path in tmp_path.glob("*.png") if path.stat().st_mtime_ns != changed[path.name]} == {
        "003.png"
    }
    # Alone in its batch now, and so equal up to rounding.
    assert np.abs(np.asarray(Image.open(tmp_path / "003.png"), dtype=int) - first).max() <= 1
    assert read_manifest(tmp_path) == manifest


def test_another_set_is_refused(model: ServedModel, tmp_path: Path) -> None:
    manifest = _manifest(model)
    assert [item.file for item in open_set(tmp_path, manifest)] == [f"00{i}.png" for i in range(5)]
    with pytest.raises(UsageError, match=r"holds another set of images: policy is 'fcfs', but .* with 'bucketed'"):
        open_set(tmp_path, _manifest(model, policy="fcfs"))
    with pytest.raises(UsageError, match=r"cache is 0\.3, but .* None"):
        open_set(tmp_path, _manifest(model, cache=0.3))
    with pytest.raises(UsageError, match="6 images were asked for, but it is a set of 5"):
        open_set(tmp_path, _manifest(model, 6))
    other = Manifest(make_items([(f"pair-{i}", "a cat") for i in range(5)], SIZES, seed=7), manifest.settings)
    with pytest.raises(UsageError, match="prompts, seeds or sizes are others"):
        open_set(tmp_path, other)
    with pytest.raises(UsageError, match=r"000\.png has prompt 'a hat 0' in the first"):
        require_same_prompts(manifest, other)
    require_same_prompts(manifest, _manifest(model, policy="fcfs"))
    loose = tmp_path / "loose"
    loose.mkdir()
    Image.new("RGB", (8, 8)).save(loose / "a.png")
    with pytest.raises(UsageError, match="holds images but no manifest"):
        open_set(loose, manifest)


def test_damaged_manifests_are_named(model: ServedModel, tmp_path: Path) -> None:
    open_set(tmp_path, _manifest(model))
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
    with pytest.raises(UsageError, match="no manifest of psctl"):
        read_manifest(tmp_path)


def test_items_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="ids of the text-image pairs must differ"):
        make_items([("a", "x"), ("a", "y")], SIZES)
    with pytest.raises(UsageError, match="0 prompts"):
        make_items([], SIZES)
    with pytest.raises(UsageError, match="may be at most"):
        make_items([("a", "x"), ("b", "y")], SIZES, seed=2**63 - 1)


def test_failed_images_are_counted_and_the_others_kept(model: ServedModel, tmp_path: Path) -> None:
    manifest = _manifest(model, 3)
    # A broken link is no image yet, and a folder that cannot be made is where it points.
    write_json(tmp_path / "manifest.json", manifest.to_json())
    (tmp_path / "file").touch()
    (tmp_path / "001.png").symlink_to(tmp_path / "file" / "inside.png")
    with pytest.raises(RunError, match=r"1 of 3 images failed.*001\.png"):
        generate_set(model, tmp_path, manifest)
    assert (tmp_path / "002.png").is_file()
    (failed,) = generate_set(model, tmp_path, manifest, max_bad=1)
    assert failed.startswith("001.png: ")


# Features


class _Colours(nn.Module):
    """A feature network that can be followed by hand: the mean of each colour."""

    num_features = 3

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return images.float().mean((2, 3))


def _folder(path: Path, count: int, *, seed: int = 0, sizes: tuple[tuple[int, int], ...] = ((40, 32),)) -> Path:
    rng = np.random.default_rng(seed)
    path.mkdir()
    for i in range(count):
        width, height = sizes[i % len(sizes)]
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path / f"{i:03}.png")
    return path


def test_features_are_kept_by_content(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "a", 7, sizes=((8, 8), (12, 8)))
    cache = tmp_path / "cache"
    network = _Colours()
    seen: list[int] = []
    found = features_of(open_folder(folder), network, "w1", cache, on_images=seen.append)
    expected = [np.asarray(Image.open(path)).mean((0, 1)) for path in sorted(folder.glob("*.png"))]
    assert np.allclose(found.numpy(), expected, atol=1e-3)
    assert sum(seen) == 7
    calls = network.num_calls
    assert calls > 0
    assert torch.equal(features_of(open_folder(folder), network, "w1", cache), found)
    assert network.num_calls == calls
    # Other weights, or another image, are computed.
    features_of(open_folder(folder), network, "w2", cache)
    assert network.num_calls == 2 * calls
    Image.new("RGB", (8, 8), (1, 2, 3)).save(folder / "002.png")
    changed = features_of(open_folder(folder), network, "w1", cache)
    assert changed[2].tolist() == [1, 2, 3]
    assert torch.equal(changed[3:], found[3:])
    # A damaged file of the cache is replaced.
    for file in cache.iterdir():
        file.write_bytes(b"x")
    assert torch.equal(features_of(open_folder(folder), network, "w1", cache), changed)


def test_bad_images_are_counted_and_such_features_not_kept(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "a", 4)
    (folder / "001.png").write_bytes(b"no image")
    cache = tmp_path / "cache"
    with pytest.raises(UsageError, match=r"001\.png"):
        features_of(open_folder(folder), _Colours(), "w", cache)
    bad = BadEntries("a", 1)
    assert features_of(open_folder(folder), _Colours(), "w", cache, bad=bad).shape == (3, 3)
    assert len(bad) == 1
    assert not cache.exists()


# Metrics of sources


def test_pairs_are_measured_one_by_one_in_any_mix_of_sizes(tmp_path: Path) -> None:
    sizes = ((40, 32), (32, 40), (40, 32), (16, 16))
    one, other = (
        open_folder(_folder(tmp_path / name, 6, seed=seed, sizes=sizes)) for name, seed in (("a", 0), ("b", 1))
    )
    (tmp_path / "b" / "004.png").write_bytes((tmp_path / "a" / "004.png").read_bytes())
    results, values = measure_pairs(("psnr", "ssim"), one, other)
    arrays = [[np.asarray(folder.open_image(name)) for name in folder.ids] for folder in (one, other)]
    for name, image, reference in zip(one.ids, *arrays, strict=True):
        assert values["psnr"][name] == min(100.0, psnr(image, reference))
        stacked = [torch.from_numpy(each.copy()).permute(2, 0, 1)[None] for each in (image, reference)]
        assert values["ssim"][name] == pytest.approx(float(ssim(*stacked)), abs=1e-9)
    assert results["psnr"].value == pytest.approx(np.mean(list(values["psnr"].values())))
    assert (results["psnr"].n, results["psnr"].unit, results["psnr"].direction) == (6, "dB", "higher")
    assert results["psnr"].details["num_identical"] == 1
    Image.new("RGB", (8, 40)).save(tmp_path / "b" / "003.png")
    with pytest.raises(UsageError, match=r"003\.png: the image is 16x16, but its reference 8x40"):
        measure_pairs(("psnr",), one, other)
    (tmp_path / "b" / "003.png").write_bytes(b"x")
    bad = BadEntries("a against b", 1)
    results, _ = measure_pairs(("psnr",), one, other, bad=bad)
    assert (results["psnr"].n, len(bad)) == (5, 1)
    with pytest.raises(UsageError, match="1 images have no partner"):
        measure_pairs(("psnr",), one, open_folder(_folder(tmp_path / "c", 5)))


def test_sets_warn_of_few_images_and_refuse_one() -> None:
    rng = np.random.default_rng(0)
    one, other = (torch.from_numpy(rng.normal(size=(40, 8))) for _ in range(2))
    results, warnings = measure_sets(("fid", "kid"), one, other, details={"weights": "w"})
    assert len(warnings) == 1
    assert "FID of 40 images is biased" in warnings[0]
    fid = results["fid"]
    assert fid.details["weights"] == "w"
    assert fid.details["finite_sample_bias"] == pytest.approx(fid.value - fid.details["fid_infinity"])
    assert fid.low is not None
    assert fid.high is not None
    assert fid.low < fid.value < fid.high
    assert results["kid"].details["subset_size"] == 40
    assert measure_sets(("kid",), one[:2], other)[0]["kid"].low is None
    with pytest.raises(UsageError, match="40 reference and 1 generated"):
        measure_sets(("fid",), one[:1], other)


# Whole evaluations. The judge of text is the bundled CLIP; Inception runs in test_eval_cli only, it takes a while.


def test_a_model_is_evaluated_and_the_same_again_is_quick(model: ServedModel, tmp_path: Path) -> None:
    pytest.importorskip("resvg_py", reason="reference pictures are drawn with psctl[train]")
    options = EvalOptions(("clip", "psnr", "ssim"), num_prompts=4, seed=3)
    plan = plan_eval(options, model.defaults, tmp_path)
    root = Workspace(tmp_path).for_model("tiny", "cpu")
    phases: dict[str, int] = {}

    def start_phase(what: str, total: int):
        phases[what] = 0

        def advance(count: int) -> None:
            phases[what] += count

        return advance

    outcome = evaluate_model(model, plan, options, Judges(), root, shared_root=tmp_path, start_phase=start_phase)
    assert phases == {"denoising steps": 8, "CLIP score": 4, "pairs": 4}
    results = EvalResults.load(outcome.run_dir)
    assert results == outcome.results
    assert set(results.metrics) == {"clip[emoji-clip]", "psnr", "ssim"}
    for name, metric in results.metrics.items():
        assert metric.n == 4
        assert metric.value == pytest.approx(np.mean(list(results.per_image[name].values())))
        assert metric.details["resolutions"] == ["32x32", "48x32"]
    assert len(results.metrics["clip[emoji-clip]"].details["weights_sha256"]) == 64
    assert results.settings["engine"] == "patched"
    assert results.settings["num_inference_steps"] == 2
    # The reference of each pair is the data set's own picture, scaled to the size that was drawn.
    item = plan.items[1]
    from patchedserve.data.datasets.loading import fitted

    real = fitted(plan.sample.open_image(item.id), Resolution(48, 32), "center-square")
    image = Image.open(outcome.images_dir / item.file)
    assert results.per_image["psnr"][item.id] == pytest.approx(psnr(image, real))
    again = evaluate_model(model, plan, options, Judges(), root, shared_root=tmp_path, start_phase=start_phase)
    assert phases["denoising steps"] == 0
    assert again.images_dir == outcome.images_dir
    assert again.run_dir != outcome.run_dir
    assert again.results.metrics == results.metrics


def test_patched_against_plain_differs_by_rounding_only(model: ServedModel, model_dir: Path, tmp_path: Path) -> None:
    plain = load_model(str(model_dir), "cpu", "float32", EngineOptions("plain"))
    folders = []
    for name, served in (("plain", plain), ("patched", model)):
        folders.append(tmp_path / name)
        generate_set(served, folders[-1], _manifest(served))
    found = compare(folders[0], folders[1], ("psnr", "ssim", "clip"), Judges())
    assert found.changed["engine"] == ("plain", "patched")
    # Eight-bit images of float32 latents that agree to 1e-5: nearly all pixels are equal, none is off by more than 1.
    assert found.metrics["psnr"].value > 60
    assert found.metrics["ssim"].value > 0.9999
    clip = found.differences["clip[emoji-clip]"]
    assert abs(clip.difference) < 0.05
    assert clip.n == 5
    # Other images are told apart.
    other = tmp_path / "other"
    generate_set(model, other, _manifest(model, guidance_scale=9.0))
    worse = compare(folders[1], other, ("psnr",), Judges())
    assert worse.metrics["psnr"].value < found.metrics["psnr"].value - 10
    assert worse.changed == {"guidance_scale": (3.0, 9.0)}
    with pytest.raises(UsageError, match="fid compares with real images"):
        compare(folders[0], folders[1], ("fid",), Judges())
    with pytest.raises(UsageError, match="must be some of psnr"):
        compare(folders[0], folders[1], ("sharpness",), Judges())
    with pytest.raises(UsageError, match="neither a folder of images"):
        compare(folders[0], tmp_path, ("psnr",), Judges())


def test_results_are_compared_if_they_are_of_the_same_prompts(tmp_path: Path) -> None:
    from patchedserve.eval.results import MetricResult

    def save(name: str, values: list[float], digest: str) -> Path:
        per_image = {"psnr": {f"{i}": value for i, value in enumerate(values)}}
        metrics = {"psnr": MetricResult("psnr", float(np.mean(values)), None, None, len(values), direction="higher")}
        (tmp_path / name).mkdir()
        EvalResults(metrics, per_image, {"prompts_digest": digest, "policy": name}).save(
            tmp_path / name / "results.json"
        )
        return tmp_path / name

    one, two = save("one", [30, 31, 32], "x"), save("two", [31, 32, 32.5], "x")
    found = compare(one, two, (), Judges())
    assert found.differences["psnr"].difference == pytest.approx(2.5 / 3)
    assert found.differences["psnr"].win_rate == 1
    assert found.changed == {"policy": ("one", "two")}
    with pytest.raises(UsageError, match="other prompts"):
        compare(one, save("three", [1, 2, 3], "y"), (), Judges())


def test_folders_need_partners_of_one_size(tmp_path: Path) -> None:
    generated, reference = _folder(tmp_path / "g", 3), _folder(tmp_path / "r", 3, seed=1)
    options = EvalOptions(("psnr",))
    workspace = Workspace(tmp_path / "ws").for_model("g", "cpu")
    outcome = evaluate_folders(generated, reference, options, Judges(), workspace, shared_root=tmp_path / "ws")
    assert outcome.results.metrics["psnr"].n == 3
    arguments: tuple[Any, ...] = (options, Judges(), workspace)
    with pytest.raises(UsageError, match="psnr compare with reference images"):
        evaluate_folders(generated, None, *arguments, shared_root=tmp_path)
    with pytest.raises(UsageError, match=r"holds no manifest\.json, so its prompts"):
        evaluate_folders(generated, None, EvalOptions(("clip",)), *arguments[1:], shared_root=tmp_path)
    Image.new("RGB", (8, 8)).save(reference / "001.png")
    with pytest.raises(UsageError, match="1 of 3 pairs differ in size"):
        evaluate_folders(generated, reference, *arguments, shared_root=tmp_path)
    (reference / "002.png").unlink()
    with pytest.raises(UsageError, match=r"3 images and .* 2"):
        evaluate_folders(generated, reference, *arguments, shared_root=tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"metrics": ("sharpness",)}, "must be some of fid"),
        ({"metrics": ()}, "metrics are none"),
        ({"num_prompts": 1}, "at least 2 images, but --num-prompts is 1"),
        ({"num_prompts": 0}, "--num-prompts is 0"),
        ({"max_bad": -1}, "--max-bad is -1"),
        ({"policy": "magic"}, "policy is 'magic'"),
    ],
)
def test_options_out_of_range(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EvalOptions(**given)
    assert EvalOptions(("clip",), num_prompts=1).num_prompts == 1


def test_captions_alone_allow_the_clip_score_alone(model: ServedModel, tmp_path: Path) -> None:
    (tmp_path / "captions.csv").write_text("caption\na hat\na cat\na dog\n")
    spec = f"captions:{tmp_path / 'captions.csv'}"
    with pytest.raises(UsageError, match="captions only, but psnr need reference images"):
        plan_eval(EvalOptions(("psnr", "clip"), dataset=spec, num_prompts=3), model.defaults, tmp_path)
    plan = plan_eval(EvalOptions(("clip",), dataset=spec, num_prompts=3, resolutions="64"), model.defaults, tmp_path)
    assert {(item.width, item.height) for item in plan.items} == {(64, 64)}
    assert sorted(item.prompt for item in plan.items) == ["a cat", "a dog", "a hat"]
