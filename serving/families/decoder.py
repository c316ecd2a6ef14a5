"""Decoding of latents to images, with a check that images are finite."""

import copy
from typing import Any

import torch
from torch import Tensor

from ...data.errors import RunError
from . import Decode


class FiniteDecoder:
    """Decodes latents, and decodes again in float32 if the image is not finite and would come out black or grey.

    Args:
        vae: diffusers' autoencoder.
        decode: decodes in place of the autoencoder; None for the autoencoder itself.
    """

    def __init__(self, vae: Any, decode: Decode | None = None) -> None:
        self._vae, self._decode = vae, decode or _decode_of(vae)
        self._in_float32: Decode | None = None

    def __call__(self, latents: Tensor) -> Tensor:
        """Decode latents. Raises RunError: the latents are not finite, or the image is not even in float32."""
        image = self._decode(latents)
        if _is_finite(image):
            return image
        dtype = str(latents.dtype).removeprefix("torch.")
        if not _is_finite(latents):
            raise RunError(f"the latents are not finite: denoising has overflowed in {dtype}, or weights are damaged")
        if latents.dtype != torch.float32:
            if self._in_float32 is None:
                # Kept: an autoencoder that overflows once does so again.
                self._in_float32 = _decode_of(copy.deepcopy(self._vae).float())
            image = self._in_float32(latents.float())
            if _is_finite(image):
                return image
        tried = dtype if latents.dtype == torch.float32 else f"{dtype}, nor in float32"
        raise RunError(f"the image is not finite in {tried}: the autoencoder overflows, or its weights are damaged")


def _decode_of(vae: Any) -> Decode:
    return lambda latents: vae.decode(latents, return_dict=False)[0]


def _is_finite(values: Tensor) -> bool:
    return bool(values.isfinite().all())
