"""ControlNets of tiny pipelines, and images for them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import ControlNetModel
from torch import nn

from patchedserve.data.controls import Control
from patchedserve.data.resolution import Resolution
from patchedserve.serving.options import ModelOptions

from .tiny_models import save_tiny


def net_of(pipe: Any, seed: int, **config: Any) -> ControlNetModel:
    """Return a ControlNet of a pipeline's U-Net that has an effect, which a new one has not."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net: Any = ControlNetModel.from_unet(pipe.unet)
        net.register_to_config(**config)
        last = [*net.controlnet_down_blocks, net.controlnet_mid_block, net.controlnet_cond_embedding.conv_out]
        for weight in [weight for module in last for weight in module.parameters()]:
            nn.init.normal_(weight, std=0.1)
    return net.eval()


def control(name: str, size: Resolution, seed: int, *numbers: float) -> Control:
    image = np.random.default_rng(seed).integers(0, 256, (size.height, size.width, 3), dtype=np.uint8)
    return Control(name, image, *numbers)


def save(folder: Path, pipe: Any, nets: Mapping[str, ControlNetModel]) -> ModelOptions:
    """Save a pipeline and its nets; return the options that name these."""
    save_tiny(folder / "model", pipe)
    for name, net in nets.items():
        net.save_pretrained(folder / name)
    return ModelOptions(controlnet=[f"{name}={folder / name}" for name in nets])
