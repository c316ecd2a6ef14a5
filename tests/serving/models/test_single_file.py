"""Single-file checkpoints draw the images of a diffusers folder with the same weights, or are refused in one line."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from patchedserve.data.errors import MissingExtraError, RunError, UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.models.loading import fingerprint_of, load_model, model_defaults
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.parallel.options import ParallelOptions

from ...support.original_checkpoint import save_original
from ...support.plain import plain_latents
from ...support.tiny_families import tiny_flux
from ...support.tiny_models import save_tiny, tiny_sd, tiny_sdxl

pytest.importorskip("accelerate", reason="the extra single-file is not installed")

REQUEST = Request(0, "a car", Resolution(64, 32), 2, guidance_scale=3.0, seed=1)


def sdxl() -> Any:
    return tiny_sdxl(widths=(24, 40))


def saved(build: Callable[[], Any], folder: Path) -> tuple[Path, Path, Any]:
    """Save a pipeline; return a checkpoint, a folder with the configuration only, and the pipeline."""
    pipe = build()
    config = save_tiny(folder / "config", pipe, num_inference_steps=7)
    for weights in config.rglob("*.safetensors"):
        weights.unlink()
    return save_original(pipe, folder / "model.safetensors"), config, pipe


def assert_same(loaded: Any, pipe: Any, *parts: str) -> None:
    for part in parts:
        found, expected = getattr(loaded, part).state_dict(), getattr(pipe, part).state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected), part
        # Weights are mapped from the file, where they may be unaligned, and some processors round differently then.
        for weight in getattr(loaded, part).parameters():
            weight.data = weight.data.clone()
    assert torch.equal(plain_latents(loaded, REQUEST), plain_latents(pipe, REQUEST))


@pytest.mark.parametrize("build", [tiny_sd, sdxl])
def test_single_file_equals_the_folder(build: Callable[[], Any], tmp_path: Path) -> None:
    file, config, pipe = saved(build, tmp_path)
    model = load_model(f"{file}@{config}", "cpu", "float32")
    assert model.defaults.num_inference_steps == 7
    encoders = ("text_encoder", "text_encoder_2") if build is sdxl else ("text_encoder",)
    assert_same(model.pipe, pipe, "unet", "vae", *encoders)
    assert model.fingerprint == fingerprint_of(f"{file}@{config}")


def test_dtype_applies_to_a_single_file(tmp_path: Path) -> None:
    file, config, _ = saved(tiny_sd, tmp_path)
    pipe = load_model(f"{file}@{config}", "cpu", "bfloat16").pipe
    assert {pipe.unet.dtype, pipe.vae.dtype, pipe.text_encoder.dtype} == {torch.bfloat16}


def test_missing_parts_come_from_the_folder(tmp_path: Path) -> None:
    """For FLUX, published files mostly hold the transformer only."""
    pipe, other = tiny_flux(0), tiny_flux(1)
    config, file = save_tiny(tmp_path / "config", pipe), tmp_path / "finetuned.safetensors"
    save_file(other.transformer.state_dict(), file)
    pipe.register_modules(transformer=other.transformer)
    assert_same(load_model(f"{file}@{config}", "cpu", "float32").pipe, pipe, "transformer", "vae", "text_encoder_2")
    (config / "text_encoder_2" / "model.safetensors").unlink()
    with pytest.raises(RunError, match=r"missing weights: no .safetensors file in .*text_encoder_2"):
        load_model(f"{file}@{config}", "cpu", "float32")


def test_fingerprint_depends_on_the_file(tmp_path: Path) -> None:
    file, config, _ = saved(tiny_sd, tmp_path)
    before = fingerprint_of(f"{file}@{config}")
    file.rename(tmp_path / "renamed.safetensors")
    file = tmp_path / "renamed.safetensors"
    assert fingerprint_of(f"{file}@{config}") == before
    tensors = load_file(file)
    tensors["model.diffusion_model.out.2.bias"] += 1
    save_file(tensors, file)
    assert fingerprint_of(f"{file}@{config}") != before


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ("model.diffusion_model.out.2.", r"lacks tensors of the StableDiffusionPipeline that .*config describes"),
        ("first_stage_model.decoder.conv_in.", r"lacks tensors of the StableDiffusionPipeline that .*config describes"),
        (
            "cond_stage_model.transformer.text_model.final_",
            r"lacks tensors of the StableDiffusionPipeline that .*config",
        ),
        ("first_stage_model.", r"missing weights: no .safetensors file in .*vae"),
    ],
)
def test_file_without_required_tensors_is_refused(tmp_path: Path, prefix: str, message: str) -> None:
    file, config, _ = saved(tiny_sd, tmp_path)
    save_file({name: value for name, value in load_file(file).items() if not name.startswith(prefix)}, file)
    with pytest.raises(RunError, match=message) as caught:
        load_model(f"{file}@{config}", "cpu", "float32")
    assert "\n" not in str(caught.value)


def test_other_architecture_and_truncated_file_are_refused(tmp_path: Path) -> None:
    file, config, _ = saved(tiny_sd, tmp_path)
    other = save_tiny(tmp_path / "other", tiny_flux())
    with pytest.raises(RunError, match=r"lacks tensors of the FluxPipeline that .*other describes") as caught:
        load_model(f"{file}@{other}", "cpu", "float32")
    assert "\n" not in str(caught.value)
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(RunError, match=r"model.safetensors is truncated"):
        load_model(f"{file}@{config}", "cpu", "float32")


def test_invalid_uses_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, config, _ = saved(tiny_sd, tmp_path)
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    with pytest.raises(
        RunError, match=r"tensors of stable-diffusion-v1-5/.*cannot be fetched.*: give --model-config DIR"
    ):
        model_defaults(str(file))
    with pytest.raises(UsageError, match=r"unknown model '.*nowhere.safetensors@"):
        load_model(f"{tmp_path}/nowhere.safetensors@{config}")
    parallel = EngineOptions("parallel", parallel=ParallelOptions("2"))
    with pytest.raises(
        UsageError, match=r"--parallel does not work with a single file .*: ranks load a diffusers directory"
    ):
        load_model(f"{file}@{config}", "cpu", "float32", parallel)
    save_file({"lora.up": torch.zeros(2)}, tmp_path / "lora.safetensors")
    with pytest.raises(UsageError, match=r"lora.safetensors is not a checkpoint of a model that diffusers knows"):
        load_model(str(tmp_path / "lora.safetensors"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"accelerate is not installed; .*psctl\[single-file\]"):
        load_model(f"{file}@{config}", "cpu", "float32")
