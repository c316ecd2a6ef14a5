"""Evaluations with the cache: its effect is reported, and images of another setting are never used."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.files import sha256_of
from patchedserve.data.workspace import Workspace
from patchedserve.eval.measurer import Measurer
from patchedserve.eval.metrics.judges import Judges
from patchedserve.eval.options import EvalOptions, plan_eval
from patchedserve.eval.result_files import EvalResults
from patchedserve.eval.run import EvalOutcome, draw_set, evaluate_folders, evaluate_model
from patchedserve.eval.sets.cache_use import CACHE_USE_FILE, CacheUse, cache_use_of
from patchedserve.eval.sets.drawers import EngineDrawer
from patchedserve.eval.sets.generate import differing_settings
from patchedserve.psctl.app import main
from patchedserve.psctl.options.groups import CACHE as CACHE_FLAGS
from patchedserve.serving.cache.options import CacheOptions
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.patched.patched_model import PatchedModel
from patchedserve.training.cache.fitting import FitSettings, fit_cache_predictor
from patchedserve.training.cache.predictor import CachePredictor
from patchedserve.training.cache.samples import load_samples

from ...support.block_profiles import FACTS, write_profile
from ...support.tiny_models import save_tiny, tiny_sdxl

pytest.importorskip("torchmetrics", reason="the extra `eval` is not installed")
OPTIONS = EvalOptions(("clip",), dataset="", num_prompts=3, seed=2, max_batch_size=4)
# `full_above` of 1: the reuse of a request then does not depend on the other requests in its batch.
CACHE = CacheOptions("patch", threshold=1e9, patch_size=4, warmup_steps=1, max_reuse=2, full_above=1)
BY_NAME = {name: value for name, value in asdict(CACHE).items() if name not in ("grain", "schedule")}
"""The same options as sets of images store them: a grain implies a `full_above`."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    return save_tiny(path, tiny_sdxl(), num_inference_steps=5, guidance_scale=3.0, resolutions=["64", "96"])


@pytest.fixture(scope="module")
def captions(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("captions") / "captions.csv"
    file.write_text("caption\na hat\na cat\na dog\n")
    return f"captions:{file}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> CachePredictor:
    table = write_profile(tmp_path_factory.mktemp("profile") / "blocks.parquet", num_requests=6, num_steps=4)
    samples = load_samples(table, max_rows=10**6, seed=0)[1]
    return fit_cache_predictor(samples, FACTS, FitSettings(threshold=0.01, trees=1))


def served(model_dir: Path, cache: CacheOptions | None = None) -> ServedModel:
    # With a given strategy nothing is measured, so that equal settings draw equal bytes.
    options = EngineOptions(strategy="regroup", cache=cache or CacheOptions())
    return load_model(str(model_dir), "cpu", "float32", options)


def evaluate(
    model: ServedModel, captions: str, root: Path, max_batch_size: int = 4, **more: Any
) -> tuple[EvalOutcome, int]:
    """Run and return the outcome and its number of denoising steps."""
    options = replace(OPTIONS, dataset=captions, max_batch_size=max_batch_size)
    plan = plan_eval(options, model.defaults, root)
    workspace = Workspace(root).for_model("tiny", "cpu")
    steps = 0

    def start_phase(what: str, total: int):
        def advance(count: int) -> None:
            nonlocal steps
            steps += count * (what == "denoising steps")

        return advance

    outcome = evaluate_model(
        EngineDrawer(model), plan, options, Measurer.of(options, Judges(), root, start_phase), workspace, **more
    )
    return outcome, steps


def bytes_of(outcome: EvalOutcome) -> list[bytes]:
    return [path.read_bytes() for path in sorted(outcome.images_dir.glob("*.png"))]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_cache_is_recorded_and_its_images_form_a_separate_set(model_dir: Path, captions: str, tmp_path: Path) -> None:
    off, _ = evaluate(served(model_dir), captions, tmp_path)
    assert off.results.cache_use is None
    assert off.results.settings["cache"]["mode"] == "off"
    assert "cache_use" not in json.loads((off.run_dir / "results.json").read_text())
    assert not (off.images_dir / CACHE_USE_FILE).exists()

    on, steps = evaluate(served(model_dir, CACHE), captions, tmp_path)
    assert steps == 3 * 5
    assert on.images_dir != off.images_dir
    assert bytes_of(on) != bytes_of(off)
    results = EvalResults.load(on.run_dir)
    assert results == on.results
    name = "clip[emoji-clip]"
    assert results.metrics[name].value != off.results.metrics[name].value
    assert results.settings["cache"] == BY_NAME
    # The composition of batches affects these images, too.
    assert results.settings["max_batch_size"] == 4
    # Computed are the first step, one in three after it, and the last: of 5 steps, 1 and 2 are reused, 3 is not.
    use = results.cache_use
    assert use is not None
    assert use["num_images"] == 3
    assert use["saved_computation"] == pytest.approx(2 / 5)
    assert set(use["saved_by_block"]) == {"down0", "down1", "down2", "mid", "up0", "up1", "up2"}
    assert results.warnings == []

    # Repeating the command draws nothing and still reports the savings.
    again, steps = evaluate(served(model_dir, CACHE), captions, tmp_path)
    assert (steps, again.images_dir) == (0, on.images_dir)
    assert again.results.cache_use == use
    # A measurement of the folder reports them as well.
    options = replace(OPTIONS, dataset=captions)
    workspace = Workspace(tmp_path).for_model("folder", "cpu")
    folder = evaluate_folders(on.images_dir, None, options, Measurer.of(options, Judges(), tmp_path), workspace)
    assert folder.results.cache_use == use
    assert folder.results.settings["cache"] == BY_NAME

    other, steps = evaluate(served(model_dir, replace(CACHE, max_reuse=1)), captions, tmp_path)
    assert steps == 3 * 5
    assert other.images_dir not in (on.images_dir, off.images_dir)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_cache_options_have_no_effect_without_a_cache(
    model_dir: Path, captions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One by one and never by the plain model, whose rounding differs: the composition of a batch, and whether it has
    # one resolution, depends on how fast requests are prepared.
    monkeypatch.setattr(PatchedModel, "always_packs", True)
    first, _ = evaluate(served(model_dir), captions, tmp_path, 1)
    # The digest names existing sets of images: that of a set without a cache must not change.
    off = {"mode": "off", "threshold": None, "predictor": None, "patch_size": 8, "interval": 3, "max_reuse": 4}
    assert first.results.settings["cache"] == off | {"warmup_steps": 3, "memory_mb": 2048, "full_above": 0.5}
    again, steps = evaluate(served(model_dir, CacheOptions(patch_size=4, max_reuse=9)), captions, tmp_path, 1)
    assert (steps, again.images_dir) == (0, first.images_dir)
    # A cache that reuses nothing draws the same bytes as none.
    never, steps = evaluate(served(model_dir, replace(CACHE, threshold=0.0)), captions, tmp_path, 1)
    assert steps == 15
    assert bytes_of(never) == bytes_of(first)
    assert never.results.cache_use is not None
    assert never.results.cache_use["saved_computation"] == 0


@pytest.mark.exhaustive
@pytest.mark.slow
def test_changed_predictor_of_the_same_name_starts_a_new_set(
    model_dir: Path, captions: str, trained: CachePredictor, tmp_path: Path
) -> None:
    file = tmp_path / "cache.safetensors"
    cache = replace(CACHE, threshold=None, predictor=file)
    facts = served(model_dir).block_facts(4)
    outcomes = []
    # Votes range from 0 to 1: the first predictor always reuses, the second never does.
    for confidence in (-1.0, 1.0):
        replace(trained, facts=facts, min_confidence=confidence).save(file)
        outcome, steps = evaluate(served(model_dir, cache), captions, tmp_path)
        assert steps == 15
        assert outcome.results.settings["cache"]["predictor"] == f"sha256:{sha256_of(file)}"
        outcomes.append(outcome)
    assert outcomes[0].images_dir != outcomes[1].images_dir
    shares = [outcome.results.cache_use["saved_computation"] for outcome in outcomes]  # type: ignore[index]
    assert shares == [pytest.approx(2 / 5), 0]
    # The name of the file does not matter.
    moved = file.rename(tmp_path / "moved.safetensors")
    again, steps = evaluate(served(model_dir, replace(cache, predictor=moved)), captions, tmp_path)
    assert (steps, again.images_dir) == (0, outcomes[1].images_dir)
    # A named folder is not overwritten.
    replace(trained, facts=facts, min_confidence=0.5).save(moved)
    model = served(model_dir, replace(cache, predictor=moved))
    with pytest.raises(UsageError, match=r"holds another set of images: cache\.predictor is 'sha256:"):
        evaluate(model, captions, tmp_path, images_dir=again.images_dir)


@pytest.mark.slow
def test_images_without_counted_savings_are_reported(model_dir: Path, captions: str, tmp_path: Path) -> None:
    model = served(model_dir, CACHE)
    first, _ = evaluate(model, captions, tmp_path)
    (first.images_dir / CACHE_USE_FILE).unlink()
    again, steps = evaluate(model, captions, tmp_path)
    assert steps == 0
    assert again.results.cache_use is None
    assert again.results.warnings == [
        "the share of computation that the cache saved was counted for 0 of 3 images",
    ]
    (first.images_dir / "001.png").unlink()
    third, _ = evaluate(model, captions, tmp_path)
    assert third.results.cache_use is not None
    # Counts start here, not when the model was loaded.
    assert third.results.cache_use["num_images"] == 1
    assert third.results.cache_use["saved_computation"] == pytest.approx(2 / 5)
    assert len(third.results.warnings) == 1
    (first.images_dir / CACHE_USE_FILE).write_text('{"num_images": 3, "by_block": {"mid": 7}}')
    with pytest.raises(UsageError, match=r"cache-use\.json: is damaged"):
        evaluate(model, captions, tmp_path)


def test_savings_add_up() -> None:
    total = CacheUse(2, {"a": (10, 5), "b": (10, 0)}) + CacheUse(1, {"a": (10, 10), "c": (0, 0)})
    assert total.describe() == {"saved_computation": 0.5, "saved_by_block": {"a": 0.75, "b": 0.0}, "num_images": 3}
    assert CacheUse().saved_computation == 0
    assert cache_use_of(Path("nowhere"), {"cache": {"mode": "off"}}, 3) == (None, [])
    assert cache_use_of(Path("nowhere"), {}, 3) == (None, [])
    nested = {"cache": {"mode": "off", "interval": 3}, "steps": 5}
    assert differing_settings(nested, nested | {"cache": {"mode": "patch", "interval": 3}}) == {
        "cache.mode": ("off", "patch")
    }


@pytest.mark.slow
def test_interrupted_set_keeps_counted_savings(model_dir: Path, captions: str, tmp_path: Path) -> None:
    model = served(model_dir, CACHE)
    options = replace(OPTIONS, dataset=captions, max_batch_size=1)
    plan = plan_eval(options, model.defaults, tmp_path)
    steps = 0

    def start_phase(what: str, total: int):
        def advance(count: int) -> None:
            nonlocal steps
            steps += count
            if steps == 7:
                raise KeyboardInterrupt

        return advance

    arguments = (plan, options, Workspace(tmp_path).for_model("tiny", "cpu"))
    with pytest.raises(KeyboardInterrupt):
        draw_set(EngineDrawer(model), *arguments, images_dir=tmp_path / "set", start_phase=start_phase)
    drawn = len(list((tmp_path / "set").glob("*.png")))
    assert drawn < 3
    done = draw_set(EngineDrawer(model), *arguments, images_dir=tmp_path / "set")
    assert done.failed == ()
    use = CacheUse.read(done.folder)
    assert use is not None
    assert 3 - drawn <= use.num_images <= 3
    assert use.saved_computation > 0.3


# The command line


def test_all_cache_flags_build_one_setting(tmp_path: Path) -> None:
    given = {parameter.name: parameter.default for parameter in CACHE_FLAGS.parameters()}
    assert CACHE_FLAGS.build(dict(given)) == CacheOptions()
    changed = {
        "cache": "patch",
        "cache_predictor": Path("p"),
        "cache_interval": 5,
        "cache_patch_size": 4,
        "max_reuse": 2,
        "warmup_steps": 1,
        "cache_memory": 64,
    }
    assert CACHE_FLAGS.build(given | changed) == CacheOptions("patch", None, Path("p"), 4, 5, 2, 1, 64)
    for mode in ("off", "interval"):
        with pytest.raises(UsageError, match=f"--cache-threshold belongs to .*, not {mode}"):
            CACHE_FLAGS.build(given | {"cache": mode, "cache_threshold": 0.1})


@pytest.mark.exhaustive
@pytest.mark.slow
def test_eval_accepts_cache_flags(
    model_dir: Path,
    captions: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--cache", "interval", "--cache-interval", "2", "--warmup-steps", "1", "--cache-patch-size", "4"]
    common = ["eval", "clip", "--model", str(model_dir), "--dataset", captions, "--num-prompts", "2", "-q"]
    common += ["--dtype", "float32", "--device", "cpu", "--images", "set"]
    assert main([*common, *flags, "--max-reuse", "9"]) == 0
    said = capsys.readouterr().out
    assert "cache interval: " in said
    assert "% of computation saved (2 images)" in said
    assert json.loads(Path("set", "manifest.json").read_text())["settings"]["cache"]["interval"] == 2
    assert main(common) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "cache.interval is 3, but its images were drawn with 2" in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cache-threshold", "0.1"], "--cache-threshold belongs to --cache patch, image or accumulated, not off"),
        (["--cache", "accumulated"], "--cache accumulated needs --cache-threshold"),
        (["--cache", "patch", "--cache-threshold", "1", "--cache-predictor", "a"], "not both"),
        (["--cache", "interval", "--cache-predictor", "a"], "--cache-predictor belongs to --cache patch or image"),
        (["--cache", "patch", "--cache-threshold", "1", "--engine", "plain"], "only for --engine patched"),
        (["--cache", "interval", "--generated", "a"], "with --generated nothing is drawn"),
    ],
)
def test_contradicting_flags_give_a_one_line_error(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "clip", *flags, "-q"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
    assert said.err.count("\n") == 1
