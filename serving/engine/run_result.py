"""The result of a run of the engine."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..core.request_state import RequestRecord
from ..core.step_row import StepRow

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image


@dataclass(slots=True)
class RunResult:
    """The result of a run of the engine.

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

    records: list[RequestRecord] = field(default_factory=list)
    steps: list[StepRow] = field(default_factory=list)
    duration_s: float = 0.0
    was_interrupted: bool = False
    images: "dict[int, Image]" = field(default_factory=dict)
    latents: "dict[int, torch.Tensor]" = field(default_factory=dict)
    decision_times_s: list[float] = field(default_factory=list)
    max_prepared: int = 0
