"""Continuous batching: iteration-level scheduling in order of arrival, as in ORCA (Yu et al., OSDI 2022)."""

from collections.abc import Sequence
from typing import ClassVar

from ...core.request_state import RequestView
from .base import Decision, StepLatencyPredictor, free_places


class ContinuousPolicy:
    """Fills every free place in order of arrival, at any step. Never drops.

    Resolutions may mix in the active queue. What that means is the engine's business: the patch engine runs them in one
    forward pass, the plain engine runs one pass for each resolution. Places go strictly by arrival, so nobody is
    overtaken and nobody starves.
    """

    name: ClassVar[str] = "continuous"
    requires_one_resolution: ClassVar[bool] = False
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
        return Decision(admit=tuple(view.request_id for view in waiting[:num_free]))
