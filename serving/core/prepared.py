"""A request between its prepare and postprocess stages, as both engines hold it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ...data.requests import Request
from ..samplers.single import SamplerState


@dataclass(frozen=True, slots=True)
class KnownArea:
    """What one edit keeps of its image.

    Attributes:
        mask: (1, 1, h, w) bool, true where latents may change.
        clean: (1, channels, h, w) float32, the latents of the image.
        noise: shaped so, float32; what the image is noised with.
        levels: (num_steps + 1, 2) float32 on the CPU: the factors of image and noise before each step and at the end.
        trajectory: (num_steps + 1, channels, h, w) float32: the latents to keep at each of these times, in place of the
            image and its noise; None: those are kept.
    """

    mask: torch.Tensor
    clean: torch.Tensor
    noise: torch.Tensor
    levels: torch.Tensor
    trajectory: torch.Tensor | None = None


Seen = Mapping[str, torch.Tensor]
"""What operators have seen of one row, by the operator's name: [cells, entries of a cell, ...]."""


class Template(Protocol):
    """The record of a template: what masked passes read in place of what they do not compute."""

    def seen(self, step: int, units: Sequence[str]) -> Sequence[Seen]:
        """At a step of the whole schedule, of each row of a request, by the operator's name; on the model's device.
        Only operators of these units (`data.templates.unit_of`) are asked for, in this order; each is waited for then.
        """
        ...

    def expect(self, step: int, units: Sequence[str]) -> None:
        """Say what `seen` will be asked soon; beyond the last step that is nothing."""
        ...


OnPass = Callable[[int, torch.Tensor, Sequence[Seen]], None]
"""Told of a step: its number, the latents before it (1, channels, h, w), and of each row what operators have seen."""


@dataclass(slots=True)
class PreparedRequest:
    """A request between its prepare and postprocess stages.

    Attributes:
        request: what was asked for.
        latents: current latents, (1, channels, height / 8, width / 8); in the model's dtype on the plain engine, in
            float32 on the patch engine.
        conditioning: the family's tensors; 2 rows (unconditional, conditional) if `is_guided`, else 1.
        state: the request's own place in its denoising schedule.
        is_guided: whether classifier-free guidance is applied.
        history: what the next step of a batched multistep sampler reads of those before, (1, k * channels, ...).
        key: what a stepper that keeps things of requests knows it by; no other request of it has the same.
        known: what an edit keeps of its image; None for a new image.
        template: whose record an edit reads outside its mask, after its first `full_steps`; None where all of it is
            computed.
        on_pass: told of each of its passes, which are recorded; None where they are not.
        guided_norm, neutral_scale: see `Family`.
        steps_reused: how many of its steps have reused anything, from the cache or from the record of a template.
    """

    request: Request
    latents: torch.Tensor
    conditioning: dict[str, torch.Tensor]
    state: SamplerState
    is_guided: bool
    history: torch.Tensor | None = None
    key: int = -1
    known: KnownArea | None = None
    template: Template | None = None
    on_pass: OnPass | None = None
    guided_norm: Callable[[torch.Tensor], torch.Tensor] | None = None
    neutral_scale: float = 1.0
    steps_reused: int = 0

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the latents."""
        return self.latents.shape[2], self.latents.shape[3]

    @property
    def is_masked(self) -> bool:
        """Whether its next step reads the template's record, and computes the rest."""
        edit = self.request.edit
        return self.template is not None and edit is not None and self.state.steps_done >= edit.full_steps

    @property
    def num_rows(self) -> int:
        """Rows that the request takes in a forward pass."""
        return 2 if self.is_guided else 1


def describe(stage: str, error: Exception) -> str:
    """Return one line that says which stage failed and why."""
    lines = str(error).strip().splitlines()
    return f"{stage}: {type(error).__name__}" + (f": {lines[0]}" if lines else "")
