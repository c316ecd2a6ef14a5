"""First come, first served into mixed-resolution batches: "PatchedCache" of PatchedServe section 8."""

from collections.abc import Sequence
from typing import ClassVar

from ...core.request_state import RequestView
from .base import Decision, StepLatencyPredictor, fill_by_arrival


class PatchedFcfsPolicy:
    """Takes all that wait, in order of arrival, up to the batch size, at any step. Never drops.

    It decides as `bucketed` does; what differs is the engine that runs the batch: the patch engine takes all
    resolutions in one forward pass. The paper's ablation of its scheduler.
    """

    name: ClassVar[str] = "patched-fcfs"
    requires_one_resolution: ClassVar[bool] = False
    requires_predictor: ClassVar[bool] = False
    num_steps_scale: ClassVar[float] = 1.0

    def decide(
        self,
        now_s: float,
        waiting: Sequence[RequestView],
        active: Sequence[RequestView],
        max_batch_size: int,
        predictor: StepLatencyPredictor | None = None,
    ) -> Decision:
        """See `Policy.decide`."""
        return fill_by_arrival(waiting, active, max_batch_size)
