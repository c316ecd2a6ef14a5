"""Static batching: what one diffusers call with a list of prompts does, which can draw only one resolution."""

from collections.abc import Sequence
from itertools import islice
from typing import ClassVar

from ...core.request_state import RequestView
from .base import Decision, StepLatencyPredictor, free_places


class StaticPolicy:
    """Starts a batch when nothing is active, and lets nobody join until all of it has left.

    The request that arrived first always leads the next batch, so nobody starves; with it go the waiting requests of
    its resolution and number of steps, in order of arrival, up to the batch size. A batch starts at once: it does not
    wait to fill up. Never drops.
    """

    name: ClassVar[str] = "static"
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
        num_free = free_places(active, max_batch_size)
        if active or not waiting:
            return Decision()
        head = waiting[0]
        mates = (
            view.request_id
            for view in waiting
            if view.resolution == head.resolution and view.num_steps == head.num_steps
        )
        return Decision(admit=tuple(islice(mates, num_free)))
