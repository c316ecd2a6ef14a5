"""Generations that leave records for edits of their images, at no extra pass (InstGenIE section 3.1)."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from ...data.edits import EditSpec, latent_mask
from ..core.prepared import KnownArea, Seen
from ..samplers.single import SamplerState
from .records import END, LATENTS, content_of, file_of, read_step


class Trajectory:
    """What one generation leaves: at each step its latents, and what operators have seen. Files hold it meanwhile.

    Args:
        folder: for the files, which exists and is empty.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def note(self, step: int, latents: Tensor, rows: Sequence[Seen]) -> None:
        """Take over a step, or take it again: the latents before it (1, channels, h, w), and of each row what operators
        have seen. Raises OSError: the file cannot be written.
        """
        first, *others = rows
        content = content_of([{**first, LATENTS: latents.float()}, *others])
        (self._folder / file_of(step)).write_bytes(content)

    def steps(self, end: Tensor) -> Iterator[Sequence[Seen]]:
        """The record, step by step; `end` are the final latents (1, channels, h, w)."""
        paths = sorted(self._folder.iterdir())
        for path in paths:
            rows = read_step(path)
            if path == paths[-1]:
                rows[0][END] = end.float().cpu()
            yield rows


def begin_on(
    trajectory: Tensor,
    edit: EditSpec,
    state: SamplerState,
    generator: torch.Generator,
    *,
    factor: int,
    scales_noise: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, KnownArea]:
    """Draw what an edit of a generated image starts from: inside the mask noise of its own seed, around it the latents
    of the generation.

    Args:
        trajectory: (steps + 1, channels, h, w) float32, the generation's latents before each of the edit's steps and at
            the end.
        edit, state, generator, factor, scales_noise, dtype: as of `begin_edit`.

    Returns:
        As `begin_edit`.

    Raises:
        UsageError: no latent lies in the mask.
    """
    may_change = torch.from_numpy(latent_mask(edit.mask, factor).copy())[None, None].to(trajectory.device)
    clean = trajectory[-1:]
    drawn = randn_tensor(clean.shape, generator=generator, device=clean.device, dtype=dtype).float()
    if edit.strength < 1:
        of_clean, of_noise = state.noising()[0].tolist()
        inside = clean * of_clean + drawn * of_noise
    else:
        inside = drawn * state.scheduler.init_noise_sigma if scales_noise else drawn
    levels = torch.tensor([[1.0, 0.0]]).repeat(len(trajectory), 1)
    known = KnownArea(may_change, clean, torch.zeros_like(clean), levels, trajectory)
    return torch.where(may_change, inside, trajectory[:1]), known
