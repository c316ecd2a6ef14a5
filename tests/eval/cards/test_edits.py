"""Figures of edits by reference: true pictures are done and kept, untouched ones are kept and not done."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL

from patchedserve.data.emoji.edits import KIND_WEIGHTS
from patchedserve.data.models.bundled import bundled_model_path
from patchedserve.eval.cards.cards import measure_generator, num_denoising_steps, sample_grid
from patchedserve.eval.cards.drawing import SIZES, CardOptions, shares
from patchedserve.eval.cards.edits import heldout_edits
from patchedserve.eval.cards.text import card_text
from patchedserve.eval.metrics.clip import load_clip
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.training.bundled.edit_model import new_edit_transformer
from patchedserve.training.bundled.edit_text import new_clip, new_t5, train_edit_tokenizers
from patchedserve.training.bundled.export import export_emoji_edit


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """An untrained model of emoji-edit's classes, which draws noise."""
    torch.manual_seed(0)
    folder: Path = tmp_path_factory.mktemp("models") / "emoji-edit"
    vae = AutoencoderKL.from_pretrained(bundled_model_path("emoji-3") / "vae", torch_dtype=torch.float32)
    clip, t5 = train_edit_tokenizers(num_texts=500)
    export_emoji_edit(folder, new_edit_transformer(), vae, (clip, new_clip(clip)), (t5, new_t5(t5)))
    return load_model(str(folder), "cpu", "float32")


def test_pictures_are_spread_evenly() -> None:
    assert [number for _, number in shares(8)] == [3, 3, 2]
    assert [size for size, _ in shares(8)] == list(SIZES)


def test_edits_change_some_pixels_and_keep_others() -> None:
    for true in heldout_edits(24):
        assert true.before.shape == true.after.shape == (true.resolution.height, true.resolution.width, 3)
        assert 0 < true.changed.mean() < 1, true.edit.instruction
        assert np.abs(true.before.astype(int) - true.after)[~true.changed].max() <= 12


@pytest.mark.slow
def test_truth_is_done_and_what_is_left_alone_is_not(model: ServedModel) -> None:
    options = CardOptions(num_generated=24, num_fid=0, num_encoded=3, num_inference_steps=1)
    steps: list[int] = []
    figures = measure_generator(model, load_clip("emoji-clip"), options, on_step=steps.append)
    assert sum(steps) == num_denoising_steps(model, options) == 3 * 24
    assert figures["num_edits"] == 24
    done = figures["edits_done"]
    assert set(done["truth"]) == {*KIND_WEIGHTS, "all", "rest_kept_ssim", *map(str, SIZES)}
    assert done["truth"]["all"] >= 0.95
    assert done["truth"]["rest_kept_ssim"] == pytest.approx(1)
    assert done["input"]["all"] <= 0.05
    assert done["input"]["rest_kept_ssim"] >= 0.99
    assert done["edited"]["all"] <= 0.3, "noise is no edit"
    assert done["edited"]["rest_kept_ssim"] < 0.9
    text = card_text("emoji-edit", figures, "psctl models card emoji-edit")
    assert "max_sequence_length=24).images[0]" in text
    assert f"| truth | {done['truth']['background']:.4g} |" in text
    grid = sample_grid(model, CardOptions(num_inference_steps=1), cell_px=16)
    assert grid.width > 8 * 16
    assert grid.height > 6 * 16
