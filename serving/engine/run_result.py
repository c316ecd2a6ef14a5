"""The result of a run of the engine."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.request_state import RequestRecord
from ..core.step_row import StepRow
from .collectors import Collector, InMemory

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class RunResult:
    """Outcome of a run of the engine, and the contents of its collector.

    The properties need an `InMemory` collector, which is the default; with any other they raise RuntimeError.

    Attributes:
        duration_s: seconds from the engine's start until the last request ended.
        was_interrupted: whether Ctrl-C or `abort` ended the run; unfinished requests are then "cancelled".
        max_prepared: largest number of requests that held encoded text and latents at the same time, before decoding.
        collector: collector of the run.
    """

    duration_s: float
    was_interrupted: bool
    max_prepared: int
    collector: Collector

    @property
    def in_memory(self) -> InMemory:
        """The collector that keeps everything in memory."""
        if not isinstance(self.collector, InMemory):
            raise RuntimeError(f"this run kept nothing in memory: its collector is {type(self.collector).__name__}")
        return self.collector

    @property
    def records(self) -> list[RequestRecord]:
        """One record per submitted request, by id, all in a final status."""
        return sorted(self.in_memory.records, key=lambda record: record.request_id)

    @property
    def steps(self) -> list[StepRow]:
        """One row per denoising iteration."""
        return self.in_memory.steps

    @property
    def decision_times_s(self) -> list[float]:
        """Seconds that each decision of the policy took."""
        return self.in_memory.decision_times_s

    @property
    def images(self) -> "dict[int, Image]":
        """Images by request id, if the collector keeps them."""
        return self.in_memory.images

    @property
    def latents(self) -> "dict[int, torch.Tensor]":
        """Final latents (1, channels, height / 8, width / 8) by request id, if the collector keeps them."""
        return self.in_memory.latents
