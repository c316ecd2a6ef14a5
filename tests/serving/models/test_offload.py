"""`--offload text`: conditioning is bit-identical, and memory is free between texts."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CLIPTextConfig, CLIPTextModel

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.models.build import as_plain
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.offload import TextOffload
from patchedserve.serving.options import EngineOptions, ModelOptions

from ...support.plain import plain_latents
from ...support.tiny_families import tiny_aura, tiny_chroma, tiny_flux, tiny_lumina2, tiny_pixart
from ...support.tiny_models import save_tiny, tiny_sd, tiny_sd3, tiny_sdxl
from ...support.tiny_qwen import tiny_qwen

BUILDS = (tiny_sd, tiny_sdxl, tiny_sd3, tiny_flux, tiny_aura, tiny_chroma, tiny_pixart, tiny_lumina2, tiny_qwen)
OFFLOAD = EngineOptions(offload="text", prompt_cache_mb=0)
REQUEST = Request(0, "a car", Resolution(64, 64), 2, guidance_scale=3.0, seed=1, negative_prompt="b")


def encoders_of(pipe: Any) -> list[torch.nn.Module]:
    return [part for name, part in pipe.components.items() if name.startswith("text_encoder") and part is not None]


def num_bytes(modules: list[torch.nn.Module]) -> int:
    return sum(weight.nbytes for module in modules for weight in module.parameters())


@pytest.mark.product(most=2)
@pytest.mark.parametrize("build", BUILDS)
def test_texts_are_bit_equal(build: Callable[[], Any], tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, build())
    usual, offloaded = (load_model(str(folder), "cpu", "float32", options) for options in (None, OFFLOAD))
    for request in (REQUEST, REQUEST):
        expected, found = usual.prepare(request).conditioning, offloaded.prepare(request).conditioning
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert num_bytes(encoders_of(offloaded.pipe)) == 0
    assert offloaded.offload is not None
    facts = offloaded.offload.to_json(offloaded.pipe)
    encoders = encoders_of(usual.pipe)
    whole = num_bytes([part for part in usual.pipe.components.values() if isinstance(part, torch.nn.Module)])
    assert facts["weight_bytes_without_offload"] == whole
    assert facts["weight_bytes"] == whole - num_bytes(encoders)
    assert facts["weight_bytes_while_encoding"] == facts["weight_bytes"] + max(num_bytes([each]) for each in encoders)
    assert facts["num_moves"] >= 2 * len(encoders)


def test_offload_does_not_change_pipeline_and_baseline(tmp_path: Path) -> None:
    pipe = tiny_sdxl()
    model = load_model(str(save_tiny(tmp_path, pipe)), "cpu", "float32", OFFLOAD)
    assert torch.equal(plain_latents(model.pipe, REQUEST), plain_latents(pipe, REQUEST))
    assert torch.equal(
        as_plain(model).prepare(REQUEST).conditioning["text"], model.prepare(REQUEST).conditioning["text"]
    )


def test_weights_return_unchanged_from_the_host(tmp_path: Path) -> None:
    """As on a GPU, here on the CPU, weights are not read again from files, so changed weights stay changed."""
    pipe, usual = tiny_sdxl(), tiny_sdxl()
    for each in (pipe, usual):
        each.text_encoder.get_input_embeddings().weight.data += 1
    TextOffload().offload_encoders(pipe)
    assert num_bytes(encoders_of(pipe)) == 0
    assert torch.equal(plain_latents(pipe, REQUEST), plain_latents(usual, REQUEST))
    assert num_bytes(encoders_of(pipe)) == 0


def test_failing_text_leaves_no_weights_on_the_device(tmp_path: Path) -> None:
    model = load_model(str(save_tiny(tmp_path, tiny_sd())), "cpu", "float32", OFFLOAD)
    with pytest.raises(IndexError):
        model.pipe.text_encoder(torch.full((1, 4), 10**6))
    assert num_bytes(encoders_of(model.pipe)) == 0


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_memory_is_released_between_texts(tmp_path: Path) -> None:
    pipe, megabytes = tiny_sd(), 1 << 20
    config = pipe.text_encoder.config
    wide = {**config.to_dict(), "intermediate_size": 1 << 19}  # two matrices of 64 MB a layer
    pipe.register_modules(text_encoder=CLIPTextModel(CLIPTextConfig(**wide)))
    folder, weights = str(save_tiny(tmp_path, pipe)), num_bytes([pipe.text_encoder])
    del pipe
    assert weights > 300 * megabytes
    before = resident_bytes()
    model = load_model(folder, "cpu", "float32", OFFLOAD)
    model.prepare(REQUEST)
    assert resident_bytes() - before < 100 * megabytes
    usual = load_model(folder, "cpu", "float32")
    usual.prepare(REQUEST)
    assert resident_bytes() - before > 300 * megabytes


def test_invalid_uses_are_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", tiny_sd())
    (tmp_path / "style.safetensors").write_bytes((folder / "vae/diffusion_pytorch_model.safetensors").read_bytes())
    changed = EngineOptions(offload="text", model=ModelOptions(lora=[str(tmp_path / "style.safetensors")]))
    with pytest.raises(
        UsageError, match="--offload text on a CPU does not work with --lora: text encoders are read again"
    ):
        load_model(str(folder), "cpu", "float32", changed)
    beside = EngineOptions(offload="text", model=ModelOptions(adapter=[f"ink={tmp_path / 'style.safetensors'}"]))
    with pytest.raises(
        UsageError, match="--offload text on a CPU does not work with --adapter: text encoders are read again"
    ):
        load_model(str(folder), "cpu", "float32", beside)
    with pytest.raises(UsageError, match=r"offload is 'all', but it must be one of none, text"):
        EngineOptions(offload="all")  # type: ignore[arg-type]
