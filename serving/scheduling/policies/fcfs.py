"""First come, first served, one at a time: what plain diffusers does with a queue of single calls."""

from collections.abc import Sequence
from typing import ClassVar

from ...core.request_state import RequestView
from .base import Decision, StepLatencyPredictor, free_places


class FcfsPolicy:
    """Admits the request that arrived first once nothing is active. Never batches, never drops."""

    name: ClassVar[str] = "fcfs"
    requires_one_resolution: ClassVar[bool] = True
    requires_predictor: ClassVar[bool] = False

    def decide(
        self,
        now_s: float,
        waiting: Sequence[RequestView],
        active: Sequence[RequestView],
        max_batch_size: int,
        predictor: StepLatencyPredictor | None = None,
    ) -> Decision:
        """See `Policy.decide`."""
        free_places(active, max_batch_size)
        if active or not waiting:
            return Decision()
        return Decision(admit=(waiting[0].request_id,))
