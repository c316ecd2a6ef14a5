"""What the pipelines of flow-matching transformers (`sd3`, `flux`) have in common."""

from collections.abc import Sequence
from typing import Any

import torch
from PIL.Image import Image

from . import Decode
from .encoder import ImageEncoder


def decode_shifted(pipe: Any, latents: torch.Tensor, decode: Decode) -> Sequence[Image]:
    """See `Family.decode`."""
    config = pipe.vae.config
    image = decode((latents / config.scaling_factor) + config.shift_factor)
    return pipe.image_processor.postprocess(image, output_type="pil")


def encode_shifted(config: Any, encode: ImageEncoder, pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """See `Family.encode`; `config` is the autoencoder's."""
    return (encode(pixels, generator) - config.shift_factor) * config.scaling_factor
