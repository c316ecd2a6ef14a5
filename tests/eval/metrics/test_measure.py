"""Features and metrics of folders of images."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from patchedserve.data.datasets.base import BadEntries
from patchedserve.data.datasets.folders import open_folder
from patchedserve.data.errors import UsageError
from patchedserve.eval.measurer import Measurer
from patchedserve.eval.metrics.features import features_of
from patchedserve.eval.metrics.judges import Judges
from patchedserve.eval.metrics.measure import measure_paired_fid, measure_sets
from patchedserve.eval.metrics.psnr import psnr
from patchedserve.eval.metrics.ssim import ssim

from ...support.eval_cases import Colours, image_folder

pytest.importorskip("torchmetrics", reason="the extra `eval` is not installed")


def test_features_are_cached_by_content(tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "a", 7, sizes=((8, 8), (12, 8)))
    cache = tmp_path / "cache"
    network = Colours()
    seen: list[int] = []
    found = features_of(open_folder(folder), network, "w1", cache, on_images=seen.append)
    expected = [np.asarray(Image.open(path)).mean((0, 1)) for path in sorted(folder.glob("*.png"))]
    assert np.allclose(found.numpy(), expected, atol=1e-3)
    assert sum(seen) == 7
    calls = network.num_calls
    assert calls > 0
    assert torch.equal(features_of(open_folder(folder), network, "w1", cache), found)
    assert network.num_calls == calls
    # Features of other weights or of a changed image are computed.
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


def test_bad_images_are_counted_and_their_features_not_cached(tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "a", 4)
    (folder / "001.png").write_bytes(b"no image")
    cache = tmp_path / "cache"
    with pytest.raises(UsageError, match=r"001\.png"):
        features_of(open_folder(folder), Colours(), "w", cache)
    bad = BadEntries("a", 1)
    assert features_of(open_folder(folder), Colours(), "w", cache, bad=bad).shape == (3, 3)
    assert len(bad) == 1
    assert not cache.exists()


def test_pairs_of_mixed_sizes_are_measured_individually(tmp_path: Path) -> None:
    sizes = ((40, 32), (32, 40), (40, 32), (16, 16))
    one, other = (
        open_folder(image_folder(tmp_path / name, 6, seed=seed, sizes=sizes)) for name, seed in (("a", 0), ("b", 1))
    )
    (tmp_path / "b" / "004.png").write_bytes((tmp_path / "a" / "004.png").read_bytes())
    measurer = Measurer(Judges())
    results, values, _ = measurer.pairs(("psnr", "ssim"), one, other)
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
        measurer.pairs(("psnr",), one, other)
    (tmp_path / "b" / "003.png").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"003\.png"):
        measurer.pairs(("psnr",), one, other)
    results, _, (warning,) = Measurer(Judges(), max_bad=1).pairs(("psnr",), one, other)
    assert results["psnr"].n == 5
    assert warning.startswith("pair left out: 003.png: ")
    with pytest.raises(UsageError, match="1 images have no partner"):
        measurer.pairs(("psnr",), one, open_folder(image_folder(tmp_path / "c", 5)))


def test_paired_fid_is_resampled_by_pairs_and_not_extrapolated() -> None:
    rng = np.random.default_rng(0)
    one = torch.from_numpy(rng.normal(size=(40, 8)))
    found = measure_paired_fid(one, one + 0.01, details={"weights": "w"})
    assert found.value == pytest.approx(8 * 0.01**2, rel=1e-3)
    assert found.low is not None
    assert found.high is not None
    assert 0 <= found.low <= found.value <= found.high < 2 * found.value
    assert found.details == {"weights": "w", "interval": "bootstrap over pairs, centred"}
    with pytest.raises(UsageError, match="pairs need as many"):
        measure_paired_fid(one, one[:30])


def test_few_images_give_a_warning_and_one_is_refused() -> None:
    rng = np.random.default_rng(0)
    one, other = (torch.from_numpy(rng.normal(size=(40, 8))) for _ in range(2))
    results, warnings = measure_sets(("fid", "kid"), one, other, details={"weights": "w"})
    assert len(warnings) == 1
    assert "FID of 40 images is biased" in warnings[0]
    fid = results["fid"]
    assert fid.details["weights"] == "w"
    assert fid.details["finite_sample_bias"] == pytest.approx(fid.value - fid.details["fid_infinity"])
    assert fid.details["fid_infinity_low"] < fid.details["fid_infinity"] < fid.details["fid_infinity_high"]
    assert warnings[0].endswith(", or see fid_infinity")
    # Fewer images than twice the number of features cannot be extrapolated, which the result states.
    few, (warning,) = measure_sets(("fid",), one[:15], other[:15])
    assert "fid_infinity" not in few["fid"].details
    assert few["fid"].details["fid_infinity_missing"] == "too few images: 15, but 20 are needed"
    assert warning.endswith("of as many images; fid_infinity is missing: too few images: 15, but 20 are needed")
    assert fid.low is not None
    assert fid.high is not None
    assert fid.low < fid.value < fid.high
    assert results["kid"].details["subset_size"] == 40
    assert measure_sets(("kid",), one[:2], other)[0]["kid"].low is None
    with pytest.raises(UsageError, match="40 reference and 1 generated"):
        measure_sets(("fid",), one[:1], other)
