"""Earliest deadline first, with continuous batching: the classical real-time order, which looks at no prediction."""

from collections.abc import Sequence
from heapq import merge
from itertools import islice
from typing import ClassVar

from ...core.request_state import RequestView
from .base import Decision, StepLatencyPredictor, free_places
from .waiting import groups_by_deadline


class EdfPolicy:
    """Fills every free place at any step, the earliest deadline first (Liu & Layland 1973). Never drops.

    Equal deadlines go by arrival; requests without one come last. Under overload it is known to do badly: it spends its
    time on the requests that are about to be lost.
    """

    name: ClassVar[str] = "edf"
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
        if not num_free or not waiting:
            return Decision()
        in_order = merge(*groups_by_deadline(waiting))
        return Decision(admit=tuple(request_id for _, _, request_id, _ in islice(in_order, num_free)))
