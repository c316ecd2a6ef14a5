"""`psctl bench edit` on tiny models: what each method draws, its reported figures, and bad input."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.resolution import parse_list
from patchedserve.data.workspace import Workspace
from patchedserve.profiling.measure.edit_throughput import (
    CROP_CONTEXT,
    WAYS,
    EditBench,
    EditBenchSettings,
    crop_of,
    edit_experiment,
)
from patchedserve.serving.models.build import build_model

from ..conftest import RunPsctl
from ..support.tiny_models import save_tiny, tiny_sd3, tiny_sdxl

SETTINGS = EditBenchSettings(parse_list("64,128"), (0.05, 0.9), 3, 3.0, 5, 2, 3, 1)


def test_masks_have_the_requested_area_and_templates_repeat() -> None:
    requests = SETTINGS.requests(0.05)
    assert [str(request.resolution) for request in requests] == ["64x64", "64x64", "128x128", "128x128", "64x64"]
    images = [request.edit.image for request in requests if request.edit is not None]
    assert np.array_equal(images[0], images[4])
    assert not np.array_equal(images[0], images[1])
    for request in requests:
        assert request.edit is not None
        assert request.edit.mask_ratio == pytest.approx(0.05, rel=0.02)
    other = replace(SETTINGS, seed=1).requests(0.05)
    assert [request.seed for request in other] == [1, 2, 3, 4, 5]
    masks = [(one.edit.mask != two.edit.mask).any() for one, two in zip(requests, other, strict=True)]  # type: ignore[union-attr]
    assert all(masks)


def test_crop_is_the_mask_with_context_in_whole_cells() -> None:
    geometry = build_model(tiny_sdxl(), name="tiny").family.geometry
    grain = geometry.cell * geometry.latent_factor
    for request in SETTINGS.requests(0.05):
        cropped, (down, across) = crop_of(geometry, request)
        assert request.edit is not None
        assert cropped.edit is not None
        assert cropped.resolution == (across.stop - across.start, down.stop - down.start)
        assert not any(side % grain for side in (*cropped.resolution, down.start, across.start))
        assert cropped.edit.mask.sum() == request.edit.mask.sum(), "all of the mask is in the crop"
        rows = np.flatnonzero(request.edit.mask.any(axis=1))
        wanted = CROP_CONTEXT * (rows[-1] + 1 - rows[0])
        assert down.start <= max(0, rows[0] - wanted)
        assert down.stop >= min(request.resolution.height, rows[-1] + 1 + wanted)
        assert np.array_equal(cropped.edit.image, request.edit.image[down, across])


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", [tiny_sdxl, tiny_sd3])
def test_every_side_draws_the_same_edits(make: Any, tmp_path: Path) -> None:
    model = build_model(make(), name="tiny")
    place = Workspace(tmp_path).for_model("tiny", "cpu")
    started: list[float] = []
    with edit_experiment(model, replace(SETTINGS, mask_ratios=(0.05,)), place) as experiment:
        outcome = experiment.run(place, on_start=started.append)
    assert started == [0.05]
    assert model.reuse.store is None
    result = json.loads((outcome.run_dir / "edit.json").read_text())
    (row,) = result["rows"]
    assert (row["edits"], row["mask_ratio"], list(row["sides"])) == (5, 0.05, list(WAYS))
    assert 0 < row["active_share"] < 0.6
    assert 0 < row["read_a_record"] <= 5
    for side in row["sides"].values():
        assert len(side["seconds"]) == 1
        assert side["edits_per_minute"] == pytest.approx(300 / side["seconds"][0])
    sides = row["sides"]
    assert (sides["diffusers"]["speedup"], sides["reuse"]["reuse_gain"]) == (1.0, 1.0)
    assert sides["exact"]["speedup"] == sides["diffusers"]["seconds"][0] / sides["exact"]["seconds"][0]
    # The fast path is compared with diffusers in the run that times it.
    assert sides["exact"]["difference"] <= 0.01
    assert sides["crop"]["difference"] > 0
    assert sides["reuse"]["difference"] > 0
    assert (sides["frozen"]["difference"] == sides["reuse"]["difference"]) is (make is tiny_sd3), "it has no GroupNorm"
    assert result["figures"]["mask 0.05.exact.speedup"]["value"] == sides["exact"]["speedup"]
    assert {path.name for path in place.tables.parent.iterdir()} == {"tables", "runs"}, "records are gone"
    (table,) = experiment.tables(result)
    assert [line[1] for line in table.rows] == list(WAYS)


def test_masks_that_leave_nothing_to_read_are_refused(tmp_path: Path) -> None:
    place = Workspace(tmp_path).for_model("tiny", "cpu")
    bench = EditBench(build_model(tiny_sdxl(), name="tiny"), SETTINGS, place)
    with pytest.raises(UsageError, match="masks over 90% of an image touch at least 100% of its cells"):
        bench.measure(0.9, tmp_path)
    with pytest.raises(UsageError, match="cache threshold is -1"):
        EditBench(bench.model, replace(SETTINGS, threshold=-1.0), place)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("edits")
    save_tiny(folder / "sdxl", tiny_sdxl(), guidance_scale=3.0, num_inference_steps=3, resolutions=["64", "128"])
    return {
        "PSCTL_MODEL": str(folder / "sdxl"),
        "PSCTL_WORKSPACE": str(folder / "workspace"),
        "PSCTL_DTYPE": "float32",
        "PSCTL_DEVICE": "cpu",
    }


@pytest.mark.exhaustive
@pytest.mark.slow
def test_bench_edit_from_the_command_line(run_psctl: RunPsctl, environment: dict[str, str], tmp_path: Path) -> None:
    few = ("--mask-ratios", "0.05", "--num-edits", "3", "--templates", "1", "--repeats", "1")
    done = run_psctl("bench", "edit", *few, "--json", "--output-file", str(tmp_path / "edit.json"), **environment)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert json.loads((tmp_path / "edit.json").read_text()) == result
    assert result["settings"]["num_inference_steps"] == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--mask-ratios", "0.1,much"), "--mask-ratios is '0.1,much', but it must be numbers with commas between"),
        (("--mask-ratios", ""), "--mask-ratios is '', but each must be above 0 and at most 1"),
        (("--mask-ratios", "0.1,1.5"), "--mask-ratios is '0.1,1.5', but each must be above 0 and at most 1"),
        (("--mask-ratios", "nan"), "--mask-ratios is 'nan', but each must be above 0 and at most 1"),
        (("--resolutions", "72"), "for a record of the image, width and height must be multiples of 32"),
        (("--resolutions", "32"), "resolution 32x32 is a single cell of"),
    ],
)
def test_bad_usage_gives_a_one_line_error(
    run_psctl: RunPsctl, environment: dict[str, str], arguments: tuple[str, ...], said: str
) -> None:
    done = run_psctl("bench", "edit", *arguments, "--quiet", **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
