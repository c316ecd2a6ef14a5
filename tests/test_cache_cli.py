"""The patch cache from the command line, on a tiny model: profile, predictor, serving, bench, and bad input."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from patchedserve.data.errors import UsageError
from patchedserve.data.resolution import parse_list
from patchedserve.data.table_streams import read_batches, read_facts
from patchedserve.data.tables import BLOCKS
from patchedserve.data.workspace import Workspace
from patchedserve.eval.cache_bench import CacheBenchSettings, Setting, run_cache_bench
from patchedserve.profiling.block_profile import BlockProfileSettings, run_block_profile
from patchedserve.profiling.combinations import Combination
from patchedserve.serving.cache.options import CacheOptions
from patchedserve.serving.loading import load_model
from patchedserve.serving.stepper import EngineOptions

from .conftest import RunPsctl
from .helpers import save_tiny, tiny_sd3, tiny_sdxl

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


def profile_of(model: Any, tables: Path, **options: Any) -> Path:
    settings = BlockProfileSettings(num_prompts=4, batch_size=2, max_lag=LAGS)
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


def test_from_profile_to_serving(run_psctl: RunPsctl, environment: dict[str, str], tmp_path: Path) -> None:
    done = run_psctl("generate", "a", "--cache", "patch", **environment)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("train one with: psctl train-predictor cache")

    done = run_psctl(*PROFILE, "--num-prompts", 4, "--batch-size", 4, "--json", **environment)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    rows = rows_of(Path(said["table"]))
    # From step 1 on with one lag, then two; 7 blocks; 4 patches of the small and 9 of the larger, two requests each.
    assert len(rows["step"]) == said["num_rows"] == (1 + 4 * 2) * 7 * (2 * 4 + 2 * 9)
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

    done = run_psctl("generate", "a", "--cache", "patch", **environment | {"PSCTL_MAX_REUSE": "3"})
    assert done.returncode == 2
    assert "--max-reuse is 3, but the predictor has learnt from 2 steps in a row" in done.stderr

    other = environment | {"PSCTL_CACHE_PATCH_SIZE": "8"}
    done = run_psctl("generate", "a", "-r", "64", "--cache", "patch", **other)
    assert done.returncode == 2
    assert "was trained for patches of 4 latent pixels" in done.stderr


def test_threshold_0_draws_the_same_images(run_psctl: RunPsctl, environment: dict[str, str], tmp_path: Path) -> None:
    for name, options in (("plain", ()), ("cached", ("--cache", "patch", "--cache-threshold", "0"))):
        done = run_psctl("generate", "a", "b", "-r", "64", "-r", "96", "-o", tmp_path / name, *options, **environment)
        assert done.returncode == 0, done.stderr
    for number in ("000.png", "001.png"):
        assert (tmp_path / "plain" / number).read_bytes() == (tmp_path / "cached" / number).read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--cache", "patch", "--cache-threshold", "0", "-r", "80"), "latents of 10x10 cannot be cut"),
        (("--cache", "accumulated"), "--cache accumulated needs --cache-threshold"),
        (("--cache", "patch", "--engine", "plain", "--cache-threshold", "1"), "belong to --engine patched"),
        (("--cache", "interval", "--cache-interval", "1"), "cache interval is 1, but it must be 2 or more"),
        (("--cache", "patch", "--cache-predictor", "no.safetensors"), "there is no cache predictor no.safetensors"),
    ],
)
def test_bad_options_are_one_line(
    run_psctl: RunPsctl, environment: dict[str, str], options: tuple[str, ...], message: str
) -> None:
    done = run_psctl("generate", "a", *options, **environment)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_an_interrupted_profile_goes_on(environment: dict[str, str], tmp_path: Path) -> None:
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
            BlockProfileSettings(4, 2, LAGS),
            num_inference_steps=STEPS,
            guidance_scale=3.0,
        )
    assert first.stat().st_mtime_ns == written
    again = rows_of(profile_of(cached(environment), tmp_path / "cut"))
    assert not (tmp_path / "cut" / "blocks.parts").exists()
    for name, values in whole.items():
        assert (values == again[name]).all(), name


@pytest.mark.parametrize("make", [tiny_sdxl, tiny_sd3])
def test_bench_compares_with_the_engine_without_cache(make: Any, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", make(), guidance_scale=3.0, resolutions=list(SIZES))
    model = load_model(str(tmp_path / "model"), "cpu", "float32")
    combination = Combination(parse_list(",".join(SIZES)), (1, 2))
    base: dict[str, Any] = {"patch_size": 4, "warmup_steps": 1}
    settings = [
        Setting("never", "patch", CacheOptions("patch", 0.0, **base)),
        Setting("always", "patch", CacheOptions("patch", 1e9, **base)),
        Setting("interval", "interval", CacheOptions("interval", interval=2, **base)),
        Setting("accumulated", "accumulated", CacheOptions("accumulated", 1e9, max_reuse=2, **base)),
    ]
    workspace = Workspace(tmp_path / "w").for_model("tiny", "cpu")
    bench = CacheBenchSettings(rounds=2, num_inference_steps=STEPS)
    result, images = run_cache_bench(model, combination, settings, workspace, bench, clip=None, lpips=None)
    rows = {row["label"]: row for row in result["rows"]}
    assert list(rows) == ["off", "never", "always", "interval", "accumulated"]
    assert {label: len(found) for label, found in images.items()} == dict.fromkeys(rows, 6)
    assert rows["never"]["saved_computation"] == 0
    assert (rows["never"]["ssim_min"], rows["never"]["psnr_db"]) == (1.0, 100.0)
    # All but the first and the last step are reused.
    assert rows["always"]["saved_computation"] == pytest.approx(4 / 6)
    assert rows["accumulated"]["saved_computation"] == pytest.approx(3 / 6)
    num_blocks = len(rows["interval"]["saved_by_block"])
    assert rows["interval"]["saved_computation"] == pytest.approx(2 / 6 * (num_blocks - 2) / num_blocks)
    assert rows["always"]["ssim"] < 1
