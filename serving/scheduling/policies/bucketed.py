"""Same-resolution continuous batching: iteration-level scheduling as in ORCA, the strong baseline without patches."""

from collections.abc import Sequence
from typing import ClassVar

from ...core.request_state import RequestView
from .base import Decision, StepLatencyPredictor, fill_by_arrival


class BucketedPolicy:
    """Fills every free place in order of arrival, at any step. Never drops.

    Resolutions may mix in the active queue; the plain engine then runs one forward pass for each resolution (bucket)
    in every iteration. Places are given strictly by arrival, so nobody is overtaken and nobody starves.
    """

    name: ClassVar[str] = "bucketed"
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
