"""Encoding of images to latents, for edits."""

from typing import Any

import torch
from torch import Tensor


class ImageEncoder:
    """Encodes images as diffusers' pipelines do, by sampling from the autoencoder's posterior.

    Args:
        vae: diffusers' `AutoencoderKL`.
        draws: whether latents are sampled; otherwise they are the posterior's mode.
        upcasts: whether images are encoded in float32 whatever the autoencoder's dtype. This takes a copy of the
            weights, because another thread may decode at the same time.
    """

    def __init__(self, vae: Any, *, draws: bool = True, upcasts: bool = False) -> None:
        self._vae, self._draws, self._upcasts = vae, draws, upcasts
        self._twin: Any = None

    def __call__(self, pixels: Tensor, generator: torch.Generator) -> Tensor:
        """Encode images (n, 3, height, width) from -1 to 1 to unscaled latents in the autoencoder's dtype."""
        vae = self._vae
        if self._upcasts and vae.dtype != torch.float32:
            vae = self._twin = self._twin or _encoder_in_float32(vae)
        posterior = vae.encode(pixels.to(vae.dtype)).latent_dist
        return (posterior.sample(generator) if self._draws else posterior.mode()).to(self._vae.dtype)


def _encoder_in_float32(vae: Any) -> Any:
    with torch.device("meta"):
        twin = type(vae).from_config(vae.config)
    del twin.decoder
    weights = {name: value.float() for name, value in vae.state_dict().items() if not name.startswith("decoder.")}
    twin.load_state_dict(weights, assign=True)
    return twin.eval()
