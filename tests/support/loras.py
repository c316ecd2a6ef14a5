"""Adapters (LoRA) with random weights, saved as diffusers saves them, and the fused pipeline as the reference."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from patchedserve.data.requests import Request

from .plain import plain_latents, short_texts

_LAYERS = {"unet": "to_k to_q to_v to_out.0", "transformer": "to_k to_q to_v to_out.0", "text_encoder": "q_proj v_proj"}


def save_lora(
    path: Path, pipe: Any, *parts: str, seed: int = 0, rank: int = 4, layers: str | None = None, **options: Any
) -> Path:
    """Save an adapter of these parts of a pipeline (`unet`, `transformer`, `text_encoder`), which are not changed.

    `layers` is a regular expression for layers of the denoising model, by default those of attention; `options` are
    peft's.
    """
    states = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for part in parts:
            model = copy.deepcopy(getattr(pipe, part))
            names = layers if layers and part in ("unet", "transformer") else _LAYERS[part].split()
            config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names, init_lora_weights=False, **options)
            model.add_adapter(config)
            states[f"{part}_lora_layers"] = get_peft_model_state_dict(model)
    type(pipe).save_lora_weights(path.parent, weight_name=path.name, **states)
    return path


def fused(pipe: Any, loras: Sequence[tuple[Path, float]]) -> Any:
    """Return the pipeline itself, with these adapters fused at their scales, as in diffusers' guide."""
    names = [path.stem for path, _ in loras]
    for path, _ in loras:
        pipe.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name=path.stem)
    pipe.set_adapters(names, adapter_weights=[scale for _, scale in loras])
    parts = [name for name in ("unet", "transformer", "text_encoder") if getattr(pipe, name, None) is not None]
    pipe.fuse_lora(components=parts, adapter_names=names)
    return pipe


def alone(pipe: Any, loras: Mapping[str, Path], requests: Sequence[Request]) -> list[torch.Tensor]:
    """Return the final latents of the pipeline for each request alone, with its adapters set and short texts."""
    for name, path in loras.items():
        pipe.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name=name)
    found = []
    for request in requests:
        if request.adapters:
            pipe.enable_lora()
            names, scales = zip(*request.adapters, strict=True)
            pipe.set_adapters(list(names), adapter_weights=list(scales))
        else:
            pipe.disable_lora()
        found.append(plain_latents(pipe, request, **short_texts(pipe)))
    return found
