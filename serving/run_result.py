"""What a run of the engine leaves: one record per request, one row per denoising iteration."""

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from .lifecycle import RequestRecord

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class StepRow:
    """One denoising iteration; its fields are the columns of the steps table (`data.tables.STEPS`).

    Attributes:
        step: number of the iteration, from 0.
        start_s, duration_s: when the step started on the engine's clock and how long it took, in seconds.
        active, waiting: number of requests in the batch, and of requests that have arrived and are not in it.
        resolutions: number of active requests of each resolution, by its name ("128x128").
        schedule_s: how long the policy took since the step before, in seconds.
    """

    step: int
    start_s: float
    duration_s: float
    active: int
    waiting: int
    resolutions: dict[str, int]
    schedule_s: float = 0.0

    def to_row(self) -> dict[str, Any]:
        """One row of the steps table."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(slots=True)
class RunResult:
    """What a run leaves.

    Attributes:
        records: one record per submitted request, by id, all in a final status.
        steps: one row per denoising iteration.
        duration_s: from the engine's start until the last request ended, in seconds.
        was_interrupted: whether Ctrl-C ended the run; unfinished requests are then "cancelled".
        images: images by request id, if the engine was asked to keep them.
        latents: final latents by request id, (1, channels, height / 8, width / 8), likewise.
        decision_times_s: how long each decision of the policy took, in seconds.
        max_prepared: largest number of requests that held encoded text and latents at the same time, before decoding.
    """

    records: list[RequestRecord]
    steps: list[StepRow]
    duration_s: float
    was_interrupted: bool
    images: "dict[int, Image]" = field(default_factory=dict)
    latents: "dict[int, torch.Tensor]" = field(default_factory=dict)
    decision_times_s: list[float] = field(default_factory=list)
    max_prepared: int = 0
