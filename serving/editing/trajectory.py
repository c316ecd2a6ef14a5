"""Records of generations, made for later edits of their images without an extra pass (InstGenIE section 3.1)."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers.utils.torch_utils import randn_tensor
from numpy.typing import NDArray
from torch import Tensor

from ...data.edits import EditSpec
from ..core.prepared import KnownArea, RecordedRow
from ..samplers.single import SamplerState
from .records import END, LATENTS, content_of, file_of, read_step


class Trajectory:
    """Record of one generation in temporary files: the latents and recorded tensors of each step.

    Args:
        folder: existing, empty folder for the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def note(self, step: int, latents: Tensor, rows: Sequence[RecordedRow]) -> None:
        """Record a step, or record it again.

        Args:
            step: number of the step.
            latents: (1, channels, h, w), the latents before the step.
            rows: recorded tensors of each row, by operator name.

        Raises:
            OSError: the file cannot be written.
        """
        first, *others = rows
        content = content_of([{**first, LATENTS: latents.float()}, *others])
        (self._folder / file_of(step)).write_bytes(content)

    def steps(self, end: Tensor) -> Iterator[Sequence[RecordedRow]]:
        """Yield the rows of each step; `end` holds the final latents (1, channels, h, w), added to the last step."""
        paths = sorted(self._folder.iterdir())
        for path in paths:
            rows = read_step(path)
            if path == paths[-1]:
                rows[0][END] = end.float().cpu()
            yield rows


def begin_on_trajectory(
    trajectory: Tensor,
    edit: EditSpec,
    state: SamplerState,
    generator: torch.Generator,
    *,
    mask: NDArray[np.float32],
    scales_noise: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, KnownArea]:
    """Draw the first latents of an edit of a generated image.

    They are noise of the edit's own seed inside the mask, and the latents of the generation around it.

    Args:
        trajectory: (steps + 1, channels, h, w) float32, the generation's latents before each of the edit's steps and at
            the end.
        edit, state, generator, mask, scales_noise, dtype: arguments of `begin_edit`.

    Returns:
        The first latents (1, channels, height, width), and the area of the image that the edit keeps.
    """
    weights = torch.from_numpy(mask)[None, None].to(trajectory.device)
    clean = trajectory[-1:]
    drawn = randn_tensor(clean.shape, generator=generator, device=clean.device, dtype=dtype).float()
    if edit.strength < 1:
        of_clean, of_noise = state.noising()[0].tolist()
        inside = clean * of_clean + drawn * of_noise
    else:
        inside = drawn * state.scheduler.init_noise_sigma if scales_noise else drawn
    levels = torch.tensor([[1.0, 0.0]]).repeat(len(trajectory), 1)
    known = KnownArea(weights, mask > 0, clean, torch.zeros_like(clean), levels, trajectory)
    return torch.where(weights > 0, inside, trajectory[:1]), known
