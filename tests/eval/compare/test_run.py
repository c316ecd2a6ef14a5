"""`psctl eval compare` with real images: the results that a report needs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from patchedserve.data.errors import UsageError
from patchedserve.data.files import write_json
from patchedserve.data.resolution import Resolution
from patchedserve.eval.compare.comparison import FID_TO_FIRST, Comparison
from patchedserve.eval.compare.run import compare
from patchedserve.eval.measurer import Measurer
from patchedserve.eval.metrics.fid import frechet_distance
from patchedserve.eval.sets.generate import Manifest, make_items
from patchedserve.eval.sets.image_sets import ground_truth_of
from patchedserve.serving.cache.options import CacheOptions

from ...support.report_cases import CLIP, DRAWN, FakeJudges, image_set, settings_of


def features_of_folder(folder: Path) -> torch.Tensor:
    arrays = [np.asarray(Image.open(path)).mean((0, 1)) for path in sorted(folder.glob("*.png"))]
    return torch.from_numpy(np.array(arrays))


def test_comparison_contains_everything_a_report_needs(tmp_path: Path) -> None:
    pytest.importorskip("torchmetrics", reason="the extra `eval` is not installed")
    cache = CacheOptions("interval")
    one = image_set(tmp_path / "one", settings_of("plain"))
    other = image_set(tmp_path / "other", settings_of("patched", cache), shift=4)
    real = image_set(tmp_path / "real", settings_of("plain"), shift=9, count=6)
    (real / "manifest.json").unlink()
    write_json(other / "cache-use.json", {"num_images": 4, "by_block": {"mid": [8, 2]}})
    found = compare(one, other, ("psnr", "clip", "fid"), Measurer(FakeJudges()), reference=real)
    features = {folder.name: features_of_folder(folder) for folder in (one, other, real)}
    for side, name in ((found.first, "one"), (found.second, "other")):
        assert side.metrics["fid"].value == pytest.approx(frechet_distance(features["real"], features[name]), rel=1e-3)
        assert side.metrics["fid"].details["reference"] == str(real)
        assert side.metrics["fid"].details["weights_sha256"] == "made up"
        assert side.metrics[CLIP].n == 4
        assert len(side.metrics[CLIP].details["weights_sha256"]) == 64
    to_first = frechet_distance(features["one"], features["other"])
    assert found.metrics[FID_TO_FIRST].value == pytest.approx(to_first, rel=1e-3)
    assert found.metrics[FID_TO_FIRST].name == FID_TO_FIRST
    assert found.metrics[FID_TO_FIRST].details["interval"] == "bootstrap over pairs, centred"
    assert not [name for name in found.metrics[FID_TO_FIRST].details if name.startswith("fid_infinity")]
    difference = found.second.metrics["fid"].value - found.first.metrics["fid"].value
    assert found.differences["fid"].difference == pytest.approx(difference, rel=1e-3)
    assert found.per_image["psnr"].keys() == {"p0", "p1", "p2", "p3"}
    assert found.second.cache_use == {"saved_computation": 0.25, "saved_by_block": {"mid": 0.25}, "num_images": 4}
    assert found.changed["cache.mode"] == ("off", "interval")
    assert len([warning for warning in found.warnings if "biased upwards" in warning]) == 1
    found.save(tmp_path / "compare.json")
    assert Comparison.load(tmp_path) == found


def test_bad_images_drop_only_their_pairs(tmp_path: Path) -> None:
    pytest.importorskip("torchmetrics", reason="the extra `eval` is not installed")
    one = image_set(tmp_path / "one", settings_of("plain"), count=7)
    other = image_set(tmp_path / "other", settings_of("patched"), shift=4, count=7)
    real = image_set(tmp_path / "real", settings_of("plain"), shift=9, count=6)
    (real / "manifest.json").unlink()
    features = {folder.name: features_of_folder(folder) for folder in (one, other, real)}
    # One image is missing on the first side, one is damaged on the second, one is bad on both.
    (one / "001.png").unlink()
    (other / "004.png").write_bytes(b"no image")
    for folder in (one, other):
        (folder / "006.png").write_bytes(b"")
    (real / "000.png").write_bytes(b"")
    with pytest.raises(UsageError, match=r"2 bad entries so far, but at most 1 allowed \(--max-bad\)"):
        compare(one, other, ("fid",), Measurer(FakeJudges(), max_bad=1), reference=real)
    with pytest.raises(UsageError, match=r"3 bad entries so far, but at most 2 allowed \(--max-bad\)"):
        compare(one, other, ("fid",), Measurer(FakeJudges(), max_bad=2), reference=real)
    found = compare(one, other, ("psnr", "clip", "fid"), Measurer(FakeJudges(), max_bad=3), reference=real)
    kept = [0, 2, 3, 5]
    truth = features["real"][1:]
    for side, name in ((found.first, "one"), (found.second, "other")):
        assert side.metrics["fid"].value == pytest.approx(frechet_distance(truth, features[name][kept]), rel=1e-3)
        assert side.metrics["fid"].details["num_generated"] == 4
    to_first = frechet_distance(features["one"][kept], features["other"][kept])
    assert found.metrics[FID_TO_FIRST].value == pytest.approx(to_first, rel=1e-3)
    assert (found.metrics["psnr"].n, found.metrics[FID_TO_FIRST].n, found.differences["fid"].n) == (4, 4, 4)
    # CLIP scores of a side cover all its images; the difference covers the pairs.
    assert (found.first.metrics[CLIP].n, found.differences[CLIP].n) == (5, 4)
    left_out = [warning for warning in found.warnings if warning.startswith("pair left out: ")]
    assert [warning.split(": ")[1] for warning in left_out] == ["p1", "p4", "p6"]
    assert [warning for warning in found.warnings if "real image left out: 000.png: " in warning]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ground_truth_is_the_data_sets_images(tmp_path: Path) -> None:
    pytest.importorskip("resvg_py", reason="reference pictures are drawn with psctl[train]")
    from patchedserve.data.datasets.registry import open_dataset
    from patchedserve.data.datasets.sampling import sample_pairs

    sample = sample_pairs(open_dataset("emoji"), 3, 7)
    items = make_items(list(zip(sample.ids, sample.captions, strict=True)), [Resolution(48, 32)], 7)
    truth = ground_truth_of(Manifest(items, DRAWN))
    assert tuple(truth.ids) == sample.ids
    assert truth.open_image(sample.ids[1]).size == (48, 32)
    # A set of images stores the options of its data set.
    larger = DRAWN | {"dataset": "emoji?resolution=64&data_seed=1"}
    with pytest.raises(UsageError, match=r"emoji \(heldout, 64x64\): gives other pairs now"):
        ground_truth_of(Manifest(items, larger))
    with pytest.raises(UsageError, match="gives other pairs now"):
        ground_truth_of(Manifest(make_items([("a", "x"), ("b", "y")], [Resolution(48, 32)], 7), DRAWN))
    (tmp_path / "captions.csv").write_text("caption\na\nb\n")
    with pytest.raises(UsageError, match="holds captions only; fid compares with real images"):
        ground_truth_of(Manifest(items[:2], DRAWN | {"dataset": f"captions:{tmp_path / 'captions.csv'}"}))
    with pytest.raises(UsageError, match="give --reference DIR"):
        ground_truth_of(Manifest(items, {}))
