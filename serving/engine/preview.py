"""Partial images at a hundredth of the decoder's cost: a linear map learnt from images that it has decoded."""

import threading
from typing import TYPE_CHECKING

import torch
from diffusers.image_processor import VaeImageProcessor
from torch.nn import functional as F

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_IMAGES, _MIN_IMAGES = 64, 4
_MAX_POSITIONS = 1024
_TIMES_UNKNOWNS = 4
_RIDGE = 1e-3


class Preview:
    """Approximate decoder: maps each position of the latents, with its eight neighbours, linearly to its pixels.

    The map is the least-squares fit to final latents and the images that the model's decoder has made of them, so that
    it suits any autoencoder. It learns from the first images that are decoded, including those of a warm-up.

    Decoding a partial image takes as long as decoding the final one: with three for every request, the decoder would
    have four times the work.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_images = self._num_positions = 0
        # X^T X and X^T Y of the normal equations, and their solution; None: not solved yet.
        self._gram = self._moments = torch.zeros(0)
        self._map: torch.Tensor | None = None

    @torch.inference_mode()
    def learn(self, latents: torch.Tensor, image: "Image") -> None:
        """Learn from an image and its final latents (1, channels, height, width); does nothing after 64 images."""
        if self._num_images >= _MAX_IMAGES:
            return
        pixels = VaeImageProcessor.numpy_to_pt(VaeImageProcessor.pil_to_numpy(image))
        scale = pixels.shape[-1] // latents.shape[-1]
        inputs, outputs = _inputs_of(latents), F.pixel_unshuffle(pixels, scale)[0].flatten(1).T
        chosen = torch.linspace(0, len(inputs) - 1, min(len(inputs), _MAX_POSITIONS)).long()
        inputs, outputs = inputs[chosen].double(), outputs[chosen].double()
        with self._lock:
            if self._num_images == 0:
                self._gram = torch.zeros(inputs.shape[1], inputs.shape[1], dtype=torch.float64)
                self._moments = torch.zeros(inputs.shape[1], outputs.shape[1], dtype=torch.float64)
            self._gram += inputs.T @ inputs
            self._moments += inputs.T @ outputs
            self._num_images += 1
            self._num_positions += len(inputs)
            self._map = None

    @torch.inference_mode()
    def draw(self, latents: torch.Tensor) -> "Image | None":
        """Return the image of latents (1, channels, height, width).

        None if too few images have been learnt, or if the pixels are not finite.
        """
        with self._lock:
            enough = _TIMES_UNKNOWNS * len(self._gram)
            if self._num_images < _MIN_IMAGES or self._num_positions < enough:
                return None
            chosen = self._map
            if chosen is None:
                ridge = _RIDGE * self._gram.diagonal().mean() * torch.eye(len(self._gram), dtype=torch.float64)
                chosen = self._map = torch.linalg.solve(self._gram + ridge, self._moments).float()
        height, width = latents.shape[-2:]
        pixels = (_inputs_of(latents) @ chosen).T.unflatten(1, (height, width))[None]
        if not bool(pixels.isfinite().all()):
            return None
        scale = round((pixels.shape[1] / 3) ** 0.5)
        shown = F.pixel_shuffle(pixels, scale).clamp(0, 1)
        return VaeImageProcessor.numpy_to_pil(VaeImageProcessor.pt_to_numpy(shown))[0]


def _inputs_of(latents: torch.Tensor) -> torch.Tensor:
    """Return for each position the latents of its 3 x 3 neighbourhood, and a 1: (positions, 9 channels + 1)."""
    padded = F.pad(latents.float().cpu(), (1, 1, 1, 1), mode="replicate")
    inputs = F.unfold(padded, 3)[0].T
    return F.pad(inputs, (0, 1), value=1.0)
