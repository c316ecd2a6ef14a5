"""A request between its prepare and postprocess stages, as all steppers hold it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray

from ...data.requests import Request
from ..layout.patch_layout import References
from ..samplers.single import SamplerState


@dataclass(frozen=True, slots=True)
class KnownArea:
    """Area of an image that an edit keeps.

    Attributes:
        weights: (1, 1, h, w) float32: how much of each latent may change, from 0 to 1 (`Geometry.mask_weights`).
        is_touched: (h, w), in the host's memory: which latents may change at all.
        clean: (1, channels, h, w) float32, the latents of the image.
        noise: (1, channels, h, w) float32, the noise added to the image.
        levels: (num_steps + 1, 2) float32 on the CPU: the factors of image and noise before each step and at the end.
        trajectory: (num_steps + 1, channels, h, w) float32: the latents to keep at each of these times, in place of the
            noised image; None to keep the noised image.
    """

    weights: torch.Tensor
    is_touched: NDArray[np.bool_]
    clean: torch.Tensor
    noise: torch.Tensor
    levels: torch.Tensor
    trajectory: torch.Tensor | None = None

    @classmethod
    def nothing(cls, latents: torch.Tensor, num_steps: int) -> Self:
        """Return the known area of a new image, of which all may change."""
        zeros, everywhere = torch.zeros_like(latents), np.ones(latents.shape[2:], dtype=bool)
        return cls(torch.ones_like(latents[:, :1]), everywhere, zeros, zeros, torch.zeros(num_steps + 1, 2))


@dataclass(frozen=True, slots=True)
class PreparedControl:
    """What one ControlNet sees for a request.

    Attributes:
        embedding: (1, channels, height / 8, width / 8), what the net makes of the image before its first block.
        scale: factor of what the net adds.
        first, last: timesteps of the first and last step in which it adds anything; without such a step, first < last.
    """

    embedding: torch.Tensor
    scale: float
    first: float
    last: float


RecordedRow = Mapping[str, torch.Tensor]
"""Recorded tensors of one row, by operator name: [cells, entries of a cell, ...]."""


class Template(Protocol):
    """Record of a template, which masked passes read in place of the values that they do not compute."""

    def read_rows(self, step: int, units: Sequence[str]) -> Sequence[RecordedRow]:
        """Return the recorded tensors of a step of the whole schedule for each row of a request, on the model's device.

        Only operators of these units (`data.templates.unit_of`) are read, in this order. Waits until each has loaded.
        """
        ...

    def expect(self, step: int, units: Sequence[str]) -> None:
        """Announce the next call of `read_rows`, so that it can be loaded ahead; ignored beyond the last step."""
        ...


OnPass = Callable[[int, torch.Tensor, Sequence[RecordedRow]], None]
"""Called with a step's number, the latents before it (1, channels, h, w), and the recorded tensors of each row."""


@dataclass(slots=True)
class PreparedRequest:
    """A request between its prepare and postprocess stages.

    Attributes:
        request: the request.
        latents: current latents, (1, channels, height / 8, width / 8); in the model's dtype on the plain engine, in
            float32 on the patch engine.
        conditioning: the family's tensors; 2 rows (unconditional, conditional) if `is_guided`, else 1.
        state: the request's own place in its denoising schedule.
        is_guided: whether classifier-free guidance is applied.
        history: values of earlier steps that the next step of a batched multistep sampler reads,
            (1, k * channels, ...).
        key: unique key under which a stepper keeps state of the request.
        known_area: area of the image that an edit keeps; None for a new image.
        template: record that an edit reads outside its mask, after its first `full_steps`; None if the whole image is
            computed.
        on_pass: called with each pass of a request that is being recorded; None for all others.
        guided_norm, neutral_scale: as in `Family`.
        text_tokens: number of text tokens that count, see `patched.text.count_tokens`; None until it is known.
        steps_reused: number of its steps that have reused anything, from the cache or from the record of a template.
        references: latents (1, channels, height, width) of each reference.
        controls: its controls by the names of their nets.
    """

    request: Request
    latents: torch.Tensor
    conditioning: dict[str, torch.Tensor]
    state: SamplerState
    is_guided: bool
    history: torch.Tensor | None = None
    key: int = -1
    known_area: KnownArea | None = None
    template: Template | None = None
    on_pass: OnPass | None = None
    guided_norm: Callable[[torch.Tensor], torch.Tensor] | None = None
    neutral_scale: float = 1.0
    text_tokens: int | None = None
    steps_reused: int = 0
    references: tuple[torch.Tensor, ...] = ()
    controls: Mapping[str, PreparedControl] = field(default_factory=dict)

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the latents."""
        return self.latents.shape[2], self.latents.shape[3]

    @property
    def shape(self) -> tuple[tuple[int, int], References]:
        """Size of its latents, and of those of its references."""
        return self.size, tuple((each.shape[2], each.shape[3]) for each in self.references)

    @property
    def is_masked(self) -> bool:
        """Whether its next step reads the template's record and computes only the rest."""
        edit = self.request.edit
        return self.template is not None and edit is not None and self.state.steps_done >= edit.full_steps

    @property
    def num_rows(self) -> int:
        """Rows that the request takes in a forward pass."""
        return 2 if self.is_guided else 1


def work_of(requests: Sequence[PreparedRequest]) -> int:
    """Return the pixels of all rows of requests, by which the memory of their pass grows."""
    return sum(each.request.pixels_seen * each.num_rows for each in requests)


def describe(stage: str, error: Exception) -> str:
    """Return a one-line message with the stage that failed and the reason."""
    lines = str(error).strip().splitlines()
    return f"{stage}: {type(error).__name__}" + (f": {lines[0]}" if lines else "")
