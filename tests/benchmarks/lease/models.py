"""Models of a lease, of published shapes, with random weights that are drawn on the device and not stored."""

from collections.abc import Callable
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import nn

from patchedserve.serving.core.denoiser import denoiser_of
from patchedserve.serving.models.build import build_model
from patchedserve.serving.models.defaults import ModelDefaults
from patchedserve.serving.models.placement import quiet_libraries
from patchedserve.serving.models.served import ServedModel
from patchedserve.tests.benchmarks.make_random_model import build
from patchedserve.tests.support.model_sizes import CONFIGS, TINY

from .scale import Scale

_AROUND: dict[str, dict[str, Any]] = TINY | {"flux-dev": TINY["flux-dev"] | {"joint_attention_dim": 4096}}
"""Small denoising models for which text encoders have the widths of the published ones."""
_TINIEST: dict[str, Any] = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "transformer_layers_per_block": 1,
    "attention_head_dim": (1, 2),
}
"""SDXL of two levels: a rehearsal only checks that all parts run."""
_SDXL_VAE: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
    "sample_size": 1024,
    "scaling_factor": 0.13025,
}
_TINY_VAE = _SDXL_VAE | {"block_out_channels": (8, 8, 16, 16), "norm_num_groups": 4, "layers_per_block": 1}


def drawn_model(name: str, scale: Scale) -> ServedModel:
    """Return a model on the patch engine, eager. SDXL has the autoencoder of its published configuration; text encoders
    and FLUX's autoencoder have few layers.
    """
    quiet_libraries()
    torch.manual_seed(0)
    device, dtype = torch.device(scale.device), getattr(torch, scale.dtype(name))
    pipe = build(name, TINY if scale.is_rehearsal else _AROUND)
    component = "unet" if name == "sdxl" else "transformer"
    smaller = {"sdxl": _TINIEST}.get(name, TINY[name]) if scale.is_rehearsal else {}
    config, kind = CONFIGS[name] | smaller, type(denoiser_of(pipe))
    pipe.register_modules(**{component: drawn(lambda: kind(**config), device, dtype)})
    if name == "sdxl":
        pipe.register_modules(vae=drawn_autoencoder(scale, dtype))
    pipe = pipe.to(device=device, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            part.eval().requires_grad_(False)
    defaults = ModelDefaults(max_sequence_length=None if name == "sdxl" else scale.max_text_tokens)
    return build_model(pipe, name=f"random-{name}", defaults=defaults)


def drawn_autoencoder(scale: Scale, dtype: torch.dtype) -> AutoencoderKL:
    """Return SDXL's autoencoder."""
    config = _TINY_VAE if scale.is_rehearsal else _SDXL_VAE
    return drawn(lambda: AutoencoderKL(**config), torch.device(scale.device), dtype)


def drawn(make: Callable[[], Any], device: torch.device, dtype: torch.dtype) -> Any:
    """Return a network whose weights are drawn on the device, which is faster than moving them."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return make().eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(usual)
