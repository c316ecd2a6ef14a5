"""FLUX.2: encoding of images to latents, default settings from its model cards, and its tokenizer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from patchedserve.data.errors import RunError
from patchedserve.data.resolution import Resolution
from patchedserve.serving.models.build import build_model
from patchedserve.serving.models.defaults import read_defaults
from patchedserve.serving.models.loading import load_model

from ...support.patched_models import relative_error
from ...support.tiny_families import tiny_flux2, tiny_klein, tiny_klein_base
from ...support.tiny_models import save_tiny

BUILDS = {"dev": tiny_flux2, "Klein": tiny_klein, "Klein base": tiny_klein_base}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS.keys())
def test_image_latents_equal_those_of_the_pipeline(build: Callable[[], Any]) -> None:
    pipe = build()
    pixels = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(0)) * 2 - 1
    model = build_model(pipe, name="tiny")
    with torch.inference_mode():
        found = model.family.encode(pixels, torch.Generator().manual_seed(1))
        expected = pipe._encode_vae_image(pixels, torch.Generator().manual_seed(2))
    assert found.shape == (1, 8, *model.family.geometry.latent_size(Resolution(96, 64))) == (1, 8, 4, 6)
    assert relative_error([found[0]], [expected[0]]) <= 1e-6


@pytest.mark.parametrize(("name", "settings"), [("dev", (50, 4.0)), ("Klein", (4, 1.0)), ("Klein base", (50, 4.0))])
def test_default_settings_equal_those_of_the_cards(name: str, settings: tuple[int, float], tmp_path: Path) -> None:
    defaults = read_defaults(save_tiny(tmp_path, BUILDS[name]()))
    assert (defaults.num_inference_steps, defaults.guidance_scale) == settings
    assert defaults.default_resolution == Resolution(1024, 1024)


def test_missing_tokenizer_requirement_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchedserve.serving.models.checkpoint.find_spec", lambda name: None)
    index = save_tiny(tmp_path, tiny_flux2()) / "model_index.json"
    published = json.loads(index.read_text()) | {"tokenizer": ["transformers", "PixtralProcessor"]}
    index.write_text(json.dumps(published))
    with pytest.raises(RunError, match="its PixtralProcessor reads images, too, and needs torchvision: install it"):
        load_model(str(tmp_path), "cpu", "float32")
