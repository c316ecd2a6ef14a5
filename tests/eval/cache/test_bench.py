"""`psctl bench cache`: the sides serve the same batches, together or one by one, and Ctrl-C keeps finished rounds."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from patchedserve.data.resolution import parse_list
from patchedserve.data.workspace import Workspace
from patchedserve.eval.cache.bench import Arrivals, CacheBenchSettings, cache_experiment
from patchedserve.eval.cache.quality import QualityOptions
from patchedserve.eval.cache.sides import CacheSetting
from patchedserve.eval.metrics.judges import Judges
from patchedserve.profiling.steps.combinations import Combination
from patchedserve.serving.cache.options import CacheOptions
from patchedserve.serving.models.loading import load_model

from ...support.tiny_models import save_tiny, tiny_sd3, tiny_sdxl

SIZES = ("64", "96")
STEPS = 6


def model_of(pipe: Any, folder: Path) -> Any:
    save_tiny(folder / "model", pipe, guidance_scale=3.0, resolutions=list(SIZES))
    return load_model(str(folder / "model"), "cpu", "float32")


def bench_of(
    model: Any, folder: Path, counts: list[tuple[int, int]], arrivals: Arrivals = "together", **options: Any
) -> Any:
    sizes = parse_list(",".join(SIZES))
    base: dict[str, Any] = {"patch_size": 4, "warmup_steps": 1}
    settings = [
        CacheSetting("never", "patch", CacheOptions("patch", 0.0, **base)),
        CacheSetting("always", "patch", CacheOptions("patch", 1e9, **base)),
        CacheSetting("interval", "interval", CacheOptions("interval", interval=2, **base)),
        CacheSetting("accumulated", "accumulated", CacheOptions("accumulated", 1e9, max_reuse=2, **base)),
    ]
    workspace = Workspace(folder).for_model("tiny", "cpu")
    experiment = cache_experiment(
        model,
        [Combination(sizes, each) for each in counts],
        settings,
        workspace,
        CacheBenchSettings(rounds=2, num_inference_steps=STEPS, arrivals=arrivals),
        QualityOptions(clip=False),
        Judges(),
        **options,
    )
    return experiment.run(workspace)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_bench_serves_requests_at_different_steps(tmp_path: Path) -> None:
    outcome = bench_of(model_of(tiny_sdxl(), tmp_path), tmp_path / "w", [(1, 2)], "staggered")
    assert CacheBenchSettings(num_inference_steps=STEPS, arrivals="staggered").join_steps(3) == [0, 2, 4, 6, 8, 10]
    [row] = outcome.result["rows"]
    rows = {side["label"]: side for side in row["sides"]}
    # Three more requests follow the first three in both rounds.
    assert {side["num_images"] for side in row["sides"]} == {2 * 6}
    # Without a cache, the plain model runs batches of one resolution, with different rounding.
    assert rows["never"]["ssim_min"] > 0.99999
    assert rows["never"]["psnr_db"] > 75
    # Every request reuses all but its first and last step, regardless of the steps of the others.
    assert rows["always"]["saved_computation"] == pytest.approx(4 / 6)
    assert rows["always"]["blocks_rows"] > 0


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("make", [tiny_sdxl, tiny_sd3])
def test_bench_compares_with_the_engine_without_cache(make: Any, tmp_path: Path) -> None:
    model = model_of(make(), tmp_path)
    outcome = bench_of(model, tmp_path / "w", [(1, 2), (0, 1)])
    assert [row["label"] for row in outcome.result["rows"]] == ["SLL", "L"]
    assert json.loads((outcome.run_dir / "cache.json").read_text()) == outcome.result
    assert Image.open(outcome.run_dir / "cache.png").width > 500
    assert Image.open(outcome.run_dir / "cache-saved.png").width > 500
    # Five sides with the three images of the first batch.
    assert Image.open(outcome.run_dir / "cache-images.png").size == (3 * (128 + 10) + 10, 5 * (128 + 30 + 10) + 10)
    for row, count in zip(outcome.result["rows"], (3, 1), strict=True):
        rows = {side["label"]: side for side in row["sides"]}
        assert list(rows) == ["off", "never", "always", "interval", "accumulated"]
        assert {side["num_images"] for side in row["sides"]} == {2 * count}
        assert rows["never"]["saved_computation"] == 0
        assert (rows["never"]["ssim_min"], rows["never"]["psnr_db"]) == (1.0, 100.0)
        # All but the first and the last step are reused.
        assert rows["always"]["saved_computation"] == pytest.approx(4 / 6)
        assert rows["accumulated"]["saved_computation"] == pytest.approx(3 / 6)
        num_blocks = len(rows["interval"]["saved_by_block"])
        assert rows["interval"]["saved_computation"] == pytest.approx(2 / 6 * (num_blocks - 2) / num_blocks)
        assert rows["always"]["ssim"] < 1
        for side in row["sides"][1:]:
            low, high = side["intervals"]["ssim"]
            assert low <= side["ssim"] <= high
            # Two rounds are too few for the spread of a median.
            assert side["intervals"]["speedup"] is None


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("at_batch", "labels", "rounds"), [(5 + 7, ["SLL"], [1]), (15 + 5 + 8, ["SLL", "L"], [2, 1])])
def test_interrupted_bench_keeps_finished_rounds(
    tmp_path: Path, at_batch: int, labels: list[str], rounds: list[int]
) -> None:
    model = model_of(tiny_sdxl(), tmp_path)
    seen = []

    def stop(label: str) -> None:
        seen.append(label)
        if len(seen) == at_batch:
            raise KeyboardInterrupt

    outcome = bench_of(model, tmp_path, [(1, 2), (0, 1)], on_batch=stop)
    assert outcome.was_interrupted
    assert [row["label"] for row in outcome.result["rows"]] == labels
    assert [row["rounds"] for row in outcome.result["rows"]] == rounds
    last = outcome.result["rows"][-1]
    assert {side["num_images"] for side in last["sides"]} == {rounds[-1] * (3 if labels[-1] == "SLL" else 1)}
    assert json.loads((outcome.run_dir / "cache.json").read_text())["was_interrupted"]

    seen[:] = [""] * (at_batch - 5)
    with pytest.raises(KeyboardInterrupt):
        bench_of(model, tmp_path / "early", [(1, 2), (0, 1)], on_batch=stop)
