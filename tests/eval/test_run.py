"""Evaluations and comparisons from end to end on tiny models."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from patchedserve.data.errors import UsageError
from patchedserve.data.resolution import Resolution
from patchedserve.data.workspace import Workspace
from patchedserve.eval.compare.run import compare
from patchedserve.eval.measurer import Measurer
from patchedserve.eval.metrics.judges import Judges
from patchedserve.eval.metrics.psnr import psnr
from patchedserve.eval.options import EvalOptions, plan_eval
from patchedserve.eval.result_files import EvalResults
from patchedserve.eval.run import evaluate_folders, evaluate_model
from patchedserve.eval.sets.drawers import EngineDrawer
from patchedserve.eval.sets.generate import generate_set
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions

from ..support.eval_cases import image_folder, manifest_of, save_eval_model

pytest.importorskip("torchmetrics", reason="the extra `eval` is not installed")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_eval_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def model(model_dir: Path) -> ServedModel:
    return load_model(str(model_dir), "cpu", "float32")


# Whole evaluations. The judge of text is the bundled CLIP; the slow Inception runs in test_eval_cli only.


@pytest.mark.exhaustive
@pytest.mark.slow
def test_repeated_evaluation_reuses_images_and_features(model: ServedModel, tmp_path: Path) -> None:
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

    outcome = evaluate_model(
        EngineDrawer(model), plan, options, Measurer.of(options, Judges(), tmp_path, start_phase), root
    )
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
    again = evaluate_model(
        EngineDrawer(model), plan, options, Measurer.of(options, Judges(), tmp_path, start_phase), root
    )
    assert phases["denoising steps"] == 0
    assert again.images_dir == outcome.images_dir
    assert again.run_dir != outcome.run_dir
    assert again.results.metrics == results.metrics


@pytest.mark.slow
def test_patched_against_plain_differs_by_rounding_only(model: ServedModel, model_dir: Path, tmp_path: Path) -> None:
    plain = load_model(str(model_dir), "cpu", "float32", EngineOptions("plain"))
    folders = []
    for name, served in (("plain", plain), ("patched", model)):
        folders.append(tmp_path / name)
        generate_set(EngineDrawer(served), folders[-1], manifest_of(served))
    found = compare(folders[0], folders[1], ("psnr", "ssim", "clip"), Measurer(Judges()))
    assert found.changed["engine"] == ("plain", "patched")
    # Eight-bit images of float32 latents that agree to 1e-5: nearly all pixels are equal, none is off by more than 1.
    assert found.metrics["psnr"].value > 60
    assert found.metrics["ssim"].value > 0.9999
    clip = found.differences["clip[emoji-clip]"]
    assert abs(clip.difference) < 0.05
    assert clip.n == 5
    # Different images are recognised as such.
    other = tmp_path / "other"
    generate_set(EngineDrawer(model), other, manifest_of(model, guidance_scale=9.0))
    worse = compare(folders[1], other, ("psnr",), Measurer(Judges()))
    assert worse.metrics["psnr"].value < found.metrics["psnr"].value - 10
    assert worse.changed == {"guidance_scale": (3.0, 9.0)}
    with pytest.raises(UsageError, match="fid compares with real images"):
        compare(folders[0], folders[1], ("fid",), Measurer(Judges()))
    with pytest.raises(UsageError, match="must be some of psnr"):
        compare(folders[0], folders[1], ("sharpness",), Measurer(Judges()))
    with pytest.raises(UsageError, match="neither a folder of images"):
        compare(folders[0], tmp_path, ("psnr",), Measurer(Judges()))


def test_results_are_compared_only_for_the_same_prompts(tmp_path: Path) -> None:
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
    found = compare(one, two, (), Measurer(Judges()))
    assert found.differences["psnr"].difference == pytest.approx(2.5 / 3)
    assert found.differences["psnr"].win_rate == 1
    assert found.changed == {"policy": ("one", "two")}
    # If one evaluation left out a bad image, its pair is left out, too.
    (tmp_path / "fewer").mkdir()
    content = EvalResults.load(two)
    del content.per_image["psnr"]["1"]
    content.save(tmp_path / "fewer" / "results.json")
    fewer = compare(one, tmp_path / "fewer", (), Measurer(Judges()))
    assert (fewer.differences["psnr"].n, fewer.differences["psnr"].difference) == (2, pytest.approx(1.5 / 2))
    assert fewer.warnings == ["psnr: 1 images were measured on one side only and left out; the first: 1"]
    # Without a record that both have the same prompts, different names mean different sets.
    content.settings["prompts_digest"] = None
    content.save(tmp_path / "fewer" / "results.json")
    with pytest.raises(UsageError, match="1 are on one side only"):
        compare(one, tmp_path / "fewer", (), Measurer(Judges()))
    with pytest.raises(UsageError, match="other prompts"):
        compare(one, save("three", [1, 2, 3], "y"), (), Measurer(Judges()))


def test_image_folders_must_match_in_names_and_sizes(tmp_path: Path) -> None:
    generated, reference = image_folder(tmp_path / "g", 3), image_folder(tmp_path / "r", 3, seed=1)
    options = EvalOptions(("psnr",))
    workspace = Workspace(tmp_path / "ws").for_model("g", "cpu")
    outcome = evaluate_folders(generated, reference, options, Measurer(Judges(), tmp_path / "ws"), workspace)
    assert outcome.results.metrics["psnr"].n == 3
    arguments: tuple[Any, ...] = (options, Measurer(Judges(), tmp_path), workspace)
    with pytest.raises(UsageError, match="psnr compares with reference images"):
        evaluate_folders(generated, None, *arguments)
    with pytest.raises(UsageError, match=r"holds no manifest\.json, so its prompts"):
        evaluate_folders(generated, None, EvalOptions(("clip",)), *arguments[1:])
    Image.new("RGB", (8, 8)).save(reference / "001.png")
    with pytest.raises(UsageError, match="1 of 3 pairs differ in size"):
        evaluate_folders(generated, reference, *arguments)
    (reference / "002.png").unlink()
    with pytest.raises(UsageError, match=r"3 images and .* 2"):
        evaluate_folders(generated, reference, *arguments)


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
def test_options_out_of_range_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EvalOptions(**given)
    assert EvalOptions(("clip",), num_prompts=1).num_prompts == 1


def test_captions_alone_allow_only_the_clip_score(model: ServedModel, tmp_path: Path) -> None:
    (tmp_path / "captions.csv").write_text("caption\na hat\na cat\na dog\n")
    spec = f"captions:{tmp_path / 'captions.csv'}"
    with pytest.raises(UsageError, match="captions only, but psnr need reference images"):
        plan_eval(EvalOptions(("psnr", "clip"), dataset=spec, num_prompts=3), model.defaults, tmp_path)
    plan = plan_eval(EvalOptions(("clip",), dataset=spec, num_prompts=3, resolutions="64"), model.defaults, tmp_path)
    assert {(item.width, item.height) for item in plan.items} == {(64, 64)}
    assert sorted(item.prompt for item in plan.items) == ["a cat", "a dog", "a hat"]
