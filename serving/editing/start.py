"""The start of an edit: latents of its image, the noise, and the first latents, as diffusers' pipelines draw them."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from ...data.edits import EditSpec, latent_mask
from ..core.prepared import KnownArea, PreparedRequest
from ..samplers.single import SamplerState

_MASKED_GREY = 0.0
"""What an image holds inside the mask, in pixels from -1 to 1, where only the rest of it is encoded."""


def begin_edit(
    edit: EditSpec,
    encode: Callable[[Tensor, torch.Generator], Tensor],
    state: SamplerState,
    generator: torch.Generator,
    *,
    factor: int,
    scales_noise: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Tensor, KnownArea]:
    """Draw what an edit starts from. With a template, the image's latents and all noise outside the mask are drawn from
    the template's seed: so every edit of the image is the same there.

    Args:
        edit: what is wanted.
        encode: turns images (n, 3, height, width) from -1 to 1 into latents, drawn from the autoencoder's posterior.
        state: of the request, at its first step.
        generator: of the request.
        factor: pixels on a side of a latent.
        scales_noise: whether pure noise is scaled by the scheduler's `init_noise_sigma`.
        device: of the model.
        dtype: of the noise.

    Returns:
        The first latents (1, channels, height, width), and what the edit keeps of its image.

    Raises:
        UsageError: no latent lies in the mask.
    """
    mask = latent_mask(edit.mask, factor)
    may_change = torch.from_numpy(np.ascontiguousarray(mask))[None, None].to(device)
    pixels = torch.from_numpy(edit.image.astype(np.float32)).permute(2, 0, 1)[None].to(device) / 127.5 - 1.0
    own = generator if edit.template is None else torch.Generator("cpu").manual_seed(edit.template.seed)
    clean = encode(pixels, own)
    noise = randn_tensor(clean.shape, generator=own, device=device, dtype=dtype).float()
    if edit.template is None:
        # The pipelines encode the rest of the image, too, for models of nine channels. What is drawn for that is not
        # used by others, but the noise of later steps follows it.
        kept = torch.from_numpy(~edit.mask).to(device)
        encode(torch.where(kept, pixels, _MASKED_GREY), generator)
        first = noise
    else:
        drawn = randn_tensor(clean.shape, generator=generator, device=device, dtype=dtype).float()
        first = torch.where(may_change, drawn, noise)
    clean, levels = clean.float(), state.noising()
    if edit.strength < 1:
        of_clean, of_noise = levels[0].tolist()
        latents = clean * of_clean + first * of_noise
    else:
        latents = first * state.scheduler.init_noise_sigma if scales_noise else first
    return latents, KnownArea(may_change, clean, noise, levels)


def noised_steps(first: PreparedRequest) -> list[PreparedRequest]:
    """An edit of a whole image at each of its steps, as if it had become the image so far: over its latents as they are
    noised there. What they share is the same memory.

    Args:
        first: prepared, no step taken, of strength 1.
    """
    known = first.known
    assert known is not None, "only edits have an image"
    steps = [first]
    for index in range(1, first.state.num_steps):
        of_clean, of_noise = known.levels[index].tolist()
        latents = known.clean * of_clean + known.noise * of_noise
        # No step is taken, so what a multistep sampler has seen before may be anything.
        state, history = replace(first.state, steps_done=index), latents.repeat(1, first.state.num_kept, 1, 1)
        steps.append(replace(first, latents=latents, state=state, history=history if first.state.num_kept else None))
    return steps
