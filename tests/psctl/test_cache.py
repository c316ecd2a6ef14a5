"""The patch cache from the command line, on a tiny model: profile, predictor, serving, bench, and bad input."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import parse_list
from patchedserve.data.tables.schemas import BLOCKS
from patchedserve.data.tables.streams import read_batches, read_facts
from patchedserve.data.workspace import Workspace
from patchedserve.profiling.measure.blocks import BlockProfileSettings, run_block_profile
from patchedserve.profiling.report.tables import run_tables
from patchedserve.profiling.report.words import share
from patchedserve.serving.cache.options import CacheOptions
from patchedserve.serving.cache.store import sampled
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.patched.stepper import PatchedStepper
from patchedserve.training.cache.predictor import CachePredictor

from ..conftest import RunPsctl
from ..support.tiny_models import save_tiny, tiny_sdxl

SIZES = ("64", "96")
STEPS, LAGS = 6, 2
PROFILE = ("profile", "blocks", "--num-inference-steps", STEPS, "--max-lag", LAGS, "--cache-patch-size", 4)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("cache")
    save_tiny(folder / "sdxl", tiny_sdxl(), guidance_scale=3.0, resolutions=list(SIZES), num_inference_steps=STEPS)
    return {
        "PSCTL_MODEL": str(folder / "sdxl"),
        "PSCTL_WORKSPACE": str(folder / "workspace"),
        "PSCTL_DTYPE": "float32",
        "PSCTL_DEVICE": "cpu",
        "PSCTL_CACHE_PATCH_SIZE": "4",
        "PSCTL_WARMUP_STEPS": "1",
        "PSCTL_MAX_REUSE": str(LAGS),
    }


def rows_of(table: Path) -> dict[str, np.ndarray]:
    batches = list(read_batches(table, BLOCKS))
    return {
        name: np.concatenate([batch.column(name).to_numpy(zero_copy_only=False) for batch in batches])
        for name in BLOCKS.names
    }


def profile_of(model: Any, tables: Path, max_rows: int = 10**6, **options: Any) -> Path:
    settings = BlockProfileSettings(num_prompts=4, batch_size=2, max_lag=LAGS, max_rows=max_rows)
    return run_block_profile(
        model,
        ["a hat", "a taco"],
        parse_list(",".join(SIZES)),
        tables,
        settings,
        num_inference_steps=STEPS,
        guidance_scale=3.0,
        **options,
    )


def cached(environment: dict[str, str]) -> Any:
    options = EngineOptions(cache=CacheOptions("patch", 0.0, patch_size=4, warmup_steps=1))
    return load_model(environment["PSCTL_MODEL"], "cpu", "float32", options)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_from_profile_to_serving(run_psctl: RunPsctl, environment: dict[str, str], tmp_path: Path) -> None:
    done = run_psctl("generate", "a", "--cache", "patch", **environment)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("train one with: psctl train-predictor cache")

    done = run_psctl(*PROFILE, "--num-prompts", 4, "--batch-size", 4, "--json", **environment)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    rows = rows_of(Path(said["table"]))
    # One lag at step 1, then two lags; 7 blocks and all blocks as one; two requests of 4 patches and two of 9.
    assert len(rows["step"]) == said["num_rows"] == (1 + 4 * 2) * 8 * (2 * 4 + 2 * 9)
    assert set(rows["lag"]) == {1, 2}
    assert (rows["step"] >= rows["lag"]).all()
    assert Image.open(said["plot"]).width > 600
    facts = read_facts(Path(said["table"]), BLOCKS)
    assert facts["blocks"] == ["down0", "down1", "down2", "mid", "up0", "up1", "up2"]
    assert facts["patch_size"] == 4

    threshold = float(np.median(rows["output_mse_normalised"]))
    done = run_psctl("train-predictor", "cache", "--threshold", threshold, "--json", **environment)
    assert done.returncode == 0, done.stderr

    arguments = ("serve", "--num-prompts", 3, "--request-rate", "inf", "--json", "--cache", "patch")
    done = run_psctl(*arguments, **environment)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["completed_requests"] == 3
    assert "batch_failures" not in summary
    assert 0 < summary["cache"]["saved_computation"] < 1
    assert summary["cache"]["peak_mb"] > 0
    assert re.fullmatch(r"patch, predictor \S+cache\.safetensors", summary["config"]["cache"])
    (whole, _) = run_tables(summary)
    rows = {label.strip(): value for label, value in whole.rows if isinstance(label, str)}
    assert rows["patch cache"] == summary["config"]["cache"]
    assert rows["computation saved"] == share(summary["cache"]["saved_computation"])

    done = run_psctl("generate", "a", "--cache", "patch", **environment | {"PSCTL_MAX_REUSE": "3"})
    assert done.returncode == 2
    assert "--max-reuse is 3, but the predictor has learnt from 2 steps in a row" in done.stderr

    other = environment | {"PSCTL_CACHE_PATCH_SIZE": "8"}
    done = run_psctl("generate", "a", "-r", "64", "--cache", "patch", **other)
    assert done.returncode == 2
    assert "is for patch size 4, but 8 is served; give --cache-patch-size 4" in done.stderr


@pytest.mark.slow
def test_threshold_0_is_exact(run_psctl: RunPsctl, environment: dict[str, str], tmp_path: Path) -> None:
    # Without a cache, the first request runs on plain diffusers until the second joins, in the memory format of the
    # given strategy.
    regroup = ("--strategy", "regroup")
    for name, options in (("plain", regroup), ("cached", (*regroup, "--cache", "patch", "--cache-threshold", "0"))):
        done = run_psctl("generate", "a", "b", "-r", "64", "-r", "96", "-o", tmp_path / name, *options, **environment)
        assert done.returncode == 0, done.stderr
    for number in ("000.png", "001.png"):
        # The second request joins at a different step in each run, which changes rounding.
        plain, cached = (np.asarray(Image.open(tmp_path / side / number), int) for side in ("plain", "cached"))
        assert abs(plain - cached).max() <= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--cache", "patch", "--cache-threshold", "0", "-r", "80"), "latents of 10x10 cannot be cut"),
        (("--cache", "accumulated"), "--cache accumulated needs --cache-threshold"),
        (("--cache", "patch", "--engine", "plain", "--cache-threshold", "1"), "only for --engine patched"),
        (("--cache", "interval", "--cache-interval", "1"), "cache interval is 1, but it must be 2 or more"),
        (("--cache", "patch", "--cache-predictor", "no.safetensors"), "there is no cache predictor no.safetensors"),
    ],
)
def test_bad_options_give_a_one_line_error(
    run_psctl: RunPsctl, environment: dict[str, str], options: tuple[str, ...], message: str
) -> None:
    done = run_psctl("generate", "a", *options, **environment)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_interrupted_profile_resumes(environment: dict[str, str], tmp_path: Path) -> None:
    whole = rows_of(profile_of(cached(environment), tmp_path / "whole"))
    calls = []

    def stop_in_the_second_batch() -> None:
        calls.append(None)
        if len(calls) == STEPS + 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile_of(cached(environment), tmp_path / "cut", on_step=stop_in_the_second_batch)
    assert not (tmp_path / "cut" / "blocks.parquet").exists()
    first = tmp_path / "cut" / "blocks.parts" / "00000.parquet"
    written = first.stat().st_mtime_ns
    with pytest.raises(UsageError, match="unfinished profile with other settings"):
        run_block_profile(
            cached(environment),
            ["another"],
            parse_list("64"),
            tmp_path / "cut",
            BlockProfileSettings(4, 2, LAGS, 10**6),
            num_inference_steps=STEPS,
            guidance_scale=3.0,
        )
    assert first.stat().st_mtime_ns == written
    again = rows_of(profile_of(cached(environment), tmp_path / "cut"))
    assert not (tmp_path / "cut" / "blocks.parts").exists()
    for name, values in whole.items():
        assert (values == again[name]).all(), name


@pytest.mark.exhaustive
@pytest.mark.slow
def test_bounded_profile_samples_the_full_one_evenly(environment: dict[str, str], tmp_path: Path) -> None:
    whole = rows_of(profile_of(cached(environment), tmp_path / "whole"))
    total, wanted = len(whole["step"]), 600
    some = rows_of(profile_of(cached(environment), tmp_path / "some", max_rows=wanted))
    # Patches are sampled step by step, 13 to 26 at a time, with all their blocks and lags.
    assert 0.6 * wanted < len(some["step"]) < 1.4 * wanted < 0.6 * total
    for name in ("step", "block", "request_id", "lag"):
        assert set(some[name]) == set(whole[name]), name
    names = ("request_id", "step", "block_index", "patch", "lag")
    values = ("input_mse_normalised", "output_mse_normalised", "input_mse", "output_mse")

    def by_row(rows: dict[str, np.ndarray]) -> dict[Any, Any]:
        keys = zip(*(rows[name].tolist() for name in names), strict=True)
        return dict(zip(keys, zip(*(rows[name].tolist() for name in values), strict=True), strict=True))

    known = by_row(whole)
    for key, found in by_row(some).items():
        assert known[key] == pytest.approx(found, rel=1e-4), key
    again = rows_of(profile_of(cached(environment), tmp_path / "again", max_rows=wanted))
    assert all((some[name] == again[name]).all() for name in names)


def test_profile_rows_contain_the_changes_of_tensors(environment: dict[str, str], tmp_path: Path) -> None:
    model, size = cached(environment), parse_list("64")
    settings = BlockProfileSettings(num_prompts=1, batch_size=1, max_lag=LAGS)
    rows = rows_of(run_block_profile(model, ["a"], size, tmp_path, settings, num_inference_steps=3, guidance_scale=3.0))
    stepper = cast("PatchedStepper", model.stepper)
    cache = stepper.model.cache
    assert cache is not None
    seen: list[tuple[int, list[Tensor]]] = []

    def on_computed(block: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        kept = [inputs, {id(each): each for each in outputs}.values()]
        seen.append((block, [torch.cat([sampled(each, cache.tables) for each in side], 1).double() for side in kept]))

    cache.on_computed = on_computed
    request = model.prepare(Request(0, "a", size[0], 3, 3.0, seed=0))
    stepper.prepare(request)
    for _ in range(3):
        assert not stepper.step([request])
    first_cell, last_cell = cache.batch.first_cell, cache.batch.last_cell
    for block in range(8):
        steps = [tensors for number, tensors in seen if number == block]
        if block == 7:  # all blocks as one: the input of the first and the output of the last
            ends = ([tensors for number, tensors in seen if number == end] for end in (0, 6))
            steps = [[first[0], last[1]] for first, last in zip(*ends, strict=True)]
        for lag in (1, 2):
            for side, name in enumerate(("input", "output")):
                old, new = steps[2 - lag][side], steps[2][side]
                # The whole model's change is the error of a forecast that extrapolates by half the last change.
                is_forecast = block == 7 and side == 1 and lag == 1
                told = old + (old - steps[0][side]) / 2 if is_forecast else old
                change = ((new - told) ** 2).mean(1)
                for column, values in (("_mse", change), ("_mse_normalised", change / (old**2).mean(1))):
                    of_rows = torch.maximum(values[first_cell], values[last_cell]).numpy()
                    chosen = (rows["step"] == 2) & (rows["block_index"] == block) & (rows["lag"] == lag)
                    assert rows[name + column][chosen] == pytest.approx(of_rows, rel=1e-3)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_predictor_is_trained_for_a_target(run_psctl: RunPsctl, environment: dict[str, str], tmp_path: Path) -> None:
    table, file = profile_of(cached(environment), tmp_path), tmp_path / "cache.safetensors"
    command = ("train-predictor", "cache", "--table", table, "--output-file", file, "--target-prompts", 2, "--trees", 2)
    found = []
    for target in (0.6, 0.95):
        done = run_psctl(*command, "--target-ssim", target, "--json", **environment)
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        images, loaded = said["images"], CachePredictor.load(file)
        assert loaded.report["images"] == images
        assert (loaded.threshold, loaded.min_confidence) == (images["threshold"], images["min_confidence"])
        assert loaded.max_lag == images["max_reuse"] == LAGS
        assert images["ssim"] >= images["target_ssim"] == target
        reaching = [row["saved_computation"] for row in images["tried"] if row["ssim"] >= target]
        assert images["saved_computation"] == max(reaching)
        assert images["patches_refused"] + images["patches_expired"] > 0
        found.append(images)
    assert found[0]["saved_computation"] >= found[1]["saved_computation"]

    done = run_psctl(*command, "--target-ssim", "0.9999999", "--threshold", 10, **environment)
    assert done.returncode == 2
    assert "threshold 10: " in done.stderr
    before = file.read_bytes()
    low = float(np.quantile(rows_of(table)["output_mse_normalised"], 0.5))
    done = run_psctl(*command, "--target-ssim", "0.9999999", "--threshold", low, "-q", **environment)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: no cut reaches SSIM 1; the closest is 0.")
    assert file.read_bytes() == before
    done = run_psctl(*command, "--target-ssim", "1.5", "-q", **environment)
    assert done.returncode == 2
    assert done.stderr == "Error: target-ssim is 1.5, but it must be between 0 and 1\n"


def test_model_folder_may_contain_a_predictor(run_psctl: RunPsctl, tmp_path: Path) -> None:
    """The bundled models include a predictor."""
    common = ("generate", "a hat", "-r", 128, "--num-inference-steps", 6, "-w", tmp_path / "w", "--device", "cpu")
    done = run_psctl(*common, "--cache", "patch", "-o", tmp_path / "hat.png")
    assert done.returncode == 0, done.stderr
    used = "The cache goes by the predictor of the model, as it was shipped: "
    assert [line for line in done.stderr.splitlines() if line.startswith(used) and "emoji-xl" in line]
    done = run_psctl(*common, "--cache", "patch", "--cache-patch-size", 4, "-o", tmp_path / "other.png")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert "is for patch size 8, but 4 is served; give --cache-patch-size 8" in last


@pytest.mark.exhaustive
@pytest.mark.slow
def test_bench_from_the_command_line(run_psctl: RunPsctl, environment: dict[str, str], tmp_path: Path) -> None:
    profile_of(cached(environment), tmp_path)
    arguments = ["bench", "cache", "--table", tmp_path / "blocks.parquet", "--rounds", 1]
    arguments += [
        "--num-inference-steps",
        STEPS,
        "--thresholds",
        "0.3",
        "--image-thresholds",
        "0.3",
        "--max-reuse",
        "1,2",
    ]
    arguments += [
        "--intervals",
        "2",
        "--sums",
        "0.5",
        "--combinations",
        "1,1",
        "--output-file",
        tmp_path / "cache.json",
        "--json",
    ]
    place = Workspace(environment["PSCTL_WORKSPACE"]).for_model(environment["PSCTL_MODEL"], "cpu")
    train = ("train-predictor", "cache", "--table", tmp_path / "blocks.parquet", "--threshold", "0.3", "--trees", 2)
    assert run_psctl(*train, "--output-file", place.predictors / "cache.safetensors", **environment).returncode == 0
    done = run_psctl(*arguments, "--trained", "--lpips", "--fid", "emoji", "--num-real", 8, **environment)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said == json.loads((tmp_path / "cache.json").read_text())
    assert said["clip_judge"] == "emoji-clip"
    sides = said["rows"][0]["sides"]
    assert [side["label"] for side in sides] == [
        *(
            "off",
            "trained, 1 in a row",
            "trained, 2 in a row",
            "patch 0.3, 1 in a row",
            "patch 0.3, 2 in a row",
            "image 0.3, 1 in a row",
        ),
        *("image 0.3, 2 in a row", "interval 2", "accumulated 0.5"),
    ]
    for once, twice in (sides[1:3], sides[3:5]):
        assert (once["max_reuse"], twice["max_reuse"]) == (1, 2)
        assert 0 < once["saved_computation"] <= twice["saved_computation"]
    for side in sides:
        assert side["fid"] > 0
        assert side["fid_to_off"] == pytest.approx(0, abs=1e-3) if side["kind"] == "off" else side["fid_to_off"] >= 0
        assert (side["clip_change"]["mean"] == 0) or side["kind"] != "off"
    assert all(side["lpips"] >= 0 for side in sides[1:])

    for options, message in (
        (("--thresholds", "a"), "--thresholds is 'a', but it must be numbers with commas between"),
        (("--max-reuse", "0"), "--max-reuse is '0', but it must be numbers from 1 with commas between"),
        (("--max-reuse", "3"), "--max-reuse is 3, but the predictor has learnt from 2 steps in a row"),
        (("--combinations", "1"), "has 1 numbers, but it must have 2"),
        (("--fid", "coco:/nowhere"), "/nowhere"),
    ):
        done = run_psctl(*arguments, *options, **environment)
        assert done.returncode == 2, done.stderr
        assert message in done.stderr.splitlines()[-1]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_profile_and_train_predictor_run_without_a_command(
    run_psctl: RunPsctl, environment: dict[str, str], tmp_path: Path
) -> None:
    # Each command reads its own variables as if it had been called by name.
    few = environment | {
        "PSCTL_PROFILE_LATENCY_COMBINATIONS": "30",
        "PSCTL_PROFILE_LATENCY_REPEATS": "1",
        "PSCTL_PROFILE_LATENCY_MAX_BATCH_SIZE": "8",
        "PSCTL_PROFILE_BLOCKS_NUM_PROMPTS": "6",
        "PSCTL_PROFILE_BLOCKS_NUM_INFERENCE_STEPS": str(STEPS),
        "PSCTL_PROFILE_BLOCKS_MAX_LAG": str(LAGS),
    }
    del few["PSCTL_WORKSPACE"]
    shared = ("--workspace", tmp_path / "workspace", "--json")
    done = run_psctl("profile", *shared, **few)
    assert done.returncode == 0, done.stderr
    decoder, text, said = json.JSONDecoder(), done.stdout.strip(), []
    while text:
        found, end = decoder.raw_decode(text)
        said.append(found)
        text = text[end:].strip()
    assert Path(said[1]["table"]).name == "blocks.parquet"
    folder = Path(said[1]["table"]).parents[1]
    assert folder.is_relative_to(tmp_path / "workspace")
    threshold = str(float(np.median(rows_of(folder / "tables" / "blocks.parquet")["output_mse_normalised"])))
    # This test does not judge the error of a table from a busy machine.
    own = {"PSCTL_TRAIN_PREDICTOR_CACHE_THRESHOLD": threshold, "PSCTL_TRAIN_PREDICTOR_LATENCY_FORCE": "1"}
    done = run_psctl("train-predictor", *shared, **few | own)
    assert done.returncode == 0, done.stderr
    found = {path.name for path in (folder / "predictors").glob("*.safetensors")}
    assert found == {"latency.safetensors", "cache.safetensors"}

    done = run_psctl("profile", "--model", "emoji-3", "latency", **few)
    assert done.returncode == 2
    assert "--model comes before latency" in done.stderr
    done = run_psctl("train-predictor", "--workspace", tmp_path / "none", **few)
    assert done.returncode == 2
    assert "no table of step latencies" in done.stderr
