"""Discriminators: they learn differences, their confidences are calibrated, files of other models are refused."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from patchedserve.data.errors import UsageError
from patchedserve.training.cascade.discriminator import (
    Discriminator,
    DiscriminatorAbout,
    calibration_error,
    load_discriminator,
    thumbnail,
)
from patchedserve.training.cascade.fitting import Examples, fit_discriminator, fitted_temperature
from patchedserve.training.cascade.nets import SIDE, NetName, new_net

LIGHT = {"model": "emoji-xl", "fingerprint": "aa", "num_steps": 4, "guidance_scale": 4.0}
HEAVY = LIGHT | {"num_steps": 50}
ABOUT = DiscriminatorAbout("resnet", "gt", LIGHT, HEAVY)
CPU = torch.device("cpu")


def images(count: int, seed: int, contrast: float) -> Tensor:
    """Return blocks of random colours, whose contrast mostly separates real from drawn images."""
    rng = np.random.default_rng(seed)
    strength = np.clip(rng.normal(contrast, 0.12, (count, 1, 1, 1)), 0, 1)
    blocks = rng.uniform(-1, 1, (count, 3, 8, 8)) * strength
    return torch.from_numpy((127.5 * (1 + blocks)).astype(np.uint8)).repeat_interleave(12, 2).repeat_interleave(12, 3)


EXAMPLES = Examples(images(150, 0, 0.85), images(150, 1, 0.4))


@pytest.mark.parametrize("name", get_args(NetName))
def test_networks_are_small_and_score_images_independently(name: NetName) -> None:
    torch.manual_seed(0)
    net = new_net(name).eval()
    assert sum(parameter.numel() for parameter in net.parameters()) <= 600_000
    batch = torch.randn(3, 3, SIDE, SIDE)
    with torch.inference_mode():
        logits = net(batch)
        assert logits.shape == (3, 2)
        torch.testing.assert_close(net(batch[1:2]), logits[1:2], atol=1e-5, rtol=1e-4)


@pytest.mark.exhaustive
def test_discriminator_learns_the_difference_and_is_calibrated(tmp_path: Path) -> None:
    found = fit_discriminator(EXAMPLES, ABOUT, tmp_path, CPU, steps=40)
    fit = found.about.fit
    assert fit["auc"] > 0.8, fit
    assert fit["parameters"] < 600_000
    # With 60 held-out images, no better calibration can be shown.
    assert fit["ece"] < 0.2
    fresh = [found.confidences(images(100, seed, contrast)).mean() for seed, contrast in ((7, 0.85), (8, 0.4))]
    assert fresh[0] > fresh[1] + 0.2
    # After saving and loading it is the same to the last bit.
    found.save(tmp_path / "d.safetensors")
    again = load_discriminator(tmp_path / "d.safetensors")
    assert (again.about, again.digest) == (found.about, found.digest)
    assert torch.equal(again.confidences(EXAMPLES.real[:5]), found.confidences(EXAMPLES.real[:5]))
    # The confidence does not depend on the other images of a batch.
    assert found.confidences(EXAMPLES.real[:5])[2] == found.confidences(EXAMPLES.real[2:3])[0]
    array = EXAMPLES.real[0].permute(1, 2, 0).numpy()
    assert found.confidence(Image.fromarray(array)) == found.confidence(array)
    assert found.confidence(array) == pytest.approx(float(found.confidences(EXAMPLES.real[:1])[0]))
    again.require_models(LIGHT, HEAVY)
    with pytest.raises(UsageError, match=r"images of emoji-xl in 4 steps \(aa\) as light model, but emoji-3"):
        again.require_models(LIGHT | {"model": "emoji-3"}, HEAVY)
    with pytest.raises(UsageError, match="as heavy model"):
        again.require_models(LIGHT, HEAVY | {"num_steps": 30})


@pytest.mark.exhaustive
def test_interrupted_training_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    def stop(step: int, figures: dict[str, float]) -> None:
        if step == 3:
            raise KeyboardInterrupt

    few = Examples(EXAMPLES.real[:30], EXAMPLES.drawn[:30])
    unbroken = fit_discriminator(few, ABOUT, tmp_path / "one", CPU, steps=5)
    with pytest.raises(KeyboardInterrupt):
        fit_discriminator(few, ABOUT, tmp_path / "two", CPU, steps=5, on_step=stop)
    resumed = fit_discriminator(few, ABOUT, tmp_path / "two", CPU, steps=5)
    assert resumed.about == unbroken.about
    assert torch.equal(resumed.confidences(EXAMPLES.real[:3]), unbroken.confidences(EXAMPLES.real[:3]))


def test_too_few_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least 10 of each"):
        fit_discriminator(Examples(EXAMPLES.real, EXAMPLES.drawn[:5]), ABOUT, tmp_path, CPU, steps=1)


def test_damaged_and_foreign_files_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "d.safetensors"
    Discriminator(new_net("resnet"), replace(ABOUT, net="resnet")).save(path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(UsageError, match="cannot be read as a discriminator"):
        load_discriminator(path)
    path.write_bytes(content[:-4] + b"\x00\x00\x80?")
    with pytest.raises(UsageError, match="damaged or was edited"):
        load_discriminator(path)
    with pytest.raises(UsageError, match="there is no such file"):
        load_discriminator(tmp_path / "none")


def test_temperature_and_calibration_error() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 2, 20_000))
    is_real = torch.from_numpy(rng.random(20_000)) < torch.sigmoid(logits)
    assert fitted_temperature(logits, is_real) == pytest.approx(1.0, abs=0.05)
    # A net that is overconfident by a factor of three.
    assert fitted_temperature(3 * logits, is_real) == pytest.approx(3.0, abs=0.15)
    assert calibration_error(torch.sigmoid(logits).float(), is_real) < 0.02
    assert calibration_error(torch.sigmoid(3 * logits).float(), is_real) > 0.1
    assert calibration_error(torch.ones(10), torch.arange(10) < 7) == pytest.approx(0.3)


def test_thumbnails_show_the_whole_image() -> None:
    wide = Image.new("RGB", (64, 32), (255, 0, 0))
    small = thumbnail(wide)
    assert small.shape == (3, SIDE, SIDE)
    assert small.dtype == torch.uint8
    assert small[0].min() == 255
    assert small[1:].max() == 0
