"""The start of an edit: latents of its image, noise, and first latents, drawn as diffusers' pipelines draw them."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from diffusers.utils.torch_utils import randn_tensor
from numpy.typing import NDArray
from torch import Tensor

from ...data.edits import EditSpec
from ..core.prepared import KnownArea, PreparedRequest
from ..samplers.single import SamplerState

_MASKED_GREY = 0.0
"""Pixel value, from -1 to 1, that fills the mask when only the rest of an image is encoded."""


def begin_edit(
    edit: EditSpec,
    encode: Callable[[Tensor, torch.Generator], Tensor],
    state: SamplerState,
    generator: torch.Generator,
    *,
    mask: NDArray[np.float32],
    scales_noise: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Tensor, KnownArea]:
    """Draw the first latents of an edit.

    With a template, the image's latents and all noise outside the mask are drawn from the template's seed, so that
    all edits of the image are equal there.

    Args:
        edit: the edit.
        encode: maps images (n, 3, height, width) from -1 to 1 to latents, sampled from the autoencoder's posterior.
        state: sampler state of the request, at its first step.
        generator: generator of the request.
        mask: how much of each latent may change, (height, width), as `Geometry.mask_weights`.
        scales_noise: whether pure noise is scaled by the scheduler's `init_noise_sigma`.
        device: device of the model.
        dtype: dtype of the noise.

    Returns:
        The first latents (1, channels, height, width), and the area of the image that the edit keeps.
    """
    weights = torch.from_numpy(mask)[None, None].to(device)
    pixels = pixels_of(edit.image, device)
    own = generator if edit.template is None else torch.Generator("cpu").manual_seed(edit.template.seed)
    clean = encode(pixels, own)
    noise = randn_tensor(clean.shape, generator=own, device=device, dtype=dtype).float()
    if edit.template is None:
        if not edit.is_whole:
            # Inpainting pipelines also encode the rest of the image, for models of nine channels. Other models do not
            # use the result, but drawing it advances the generator for the noise of later steps.
            kept = torch.from_numpy(~edit.mask).to(device)
            encode(torch.where(kept, pixels, _MASKED_GREY), generator)
        first = noise
    else:
        drawn = randn_tensor(clean.shape, generator=generator, device=device, dtype=dtype).float()
        first = torch.where(weights > 0, drawn, noise)
    clean, levels = clean.float(), state.noising()
    if edit.strength < 1 or edit.is_whole:
        of_clean, of_noise = levels[0].tolist()
        latents = clean * of_clean + first * of_noise
    else:
        latents = first * state.scheduler.init_noise_sigma if scales_noise else first
    return latents, KnownArea(weights, mask > 0, clean, noise, levels)


def pixels_of(image: NDArray[np.uint8], device: torch.device) -> Tensor:
    """(height, width, 3) uint8 -> (1, 3, height, width) from -1 to 1, as `Family.encode` takes them."""
    return torch.from_numpy(image.astype(np.float32)).permute(2, 0, 1)[None].to(device) / 127.5 - 1.0


def noised_steps(first: PreparedRequest) -> list[PreparedRequest]:
    """Return an edit of a whole image at each of its steps, with latents that are the image noised to that step.

    The results share memory.

    Args:
        first: prepared request of strength 1, before its first step.
    """
    known = first.known_area
    assert known is not None, "only edits have an image"
    steps = [first]
    for index in range(1, first.state.num_steps):
        of_clean, of_noise = known.levels[index].tolist()
        latents = known.clean * of_clean + known.noise * of_noise
        # No step is taken, so the history of a multistep sampler may hold any values.
        state, history = replace(first.state, steps_done=index), latents.repeat(1, first.state.num_history, 1, 1)
        steps.append(replace(first, latents=latents, state=state, history=history if first.state.num_history else None))
    return steps
