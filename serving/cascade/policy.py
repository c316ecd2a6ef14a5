"""Which requests of a worker's queue are its next batch: run to completion, one resolution, none that would be late."""

from collections.abc import Callable, Sequence
from typing import ClassVar

from ...data.resolution import Resolution
from ..core.request_state import RequestView
from ..scheduling.policies.base import Decision, Policy, StepLatencyPredictor


class CascadePolicy(Policy):
    """DiffServe's workers (section 3.1): the request that came first leads, with it go those of its resolution.

    Whoever would be late in this batch is dropped before it starts, and the batch is formed anew without him.

    Args:
        batch_s: e(b): seconds of a batch of so many requests of a resolution, with all stages.
    """

    name: ClassVar[str] = "cascade"
    requires_one_resolution: ClassVar[bool] = True
    requires_predictor: ClassVar[bool] = False

    def __init__(self, batch_s: Callable[[Resolution, int], float]) -> None:
        self._batch_s = batch_s

    def decide(
        self,
        now_s: float,
        waiting: Sequence[RequestView],
        active: Sequence[RequestView],
        max_batch_size: int,
        predictor: StepLatencyPredictor | None = None,
        decoder_free_s: float = 0.0,
    ) -> Decision:
        """See `Policy.decide`."""
        # Of a batch that has begun, nobody cares how large the next one may be.
        if active:
            return Decision()
        queue, dropped = list(waiting), list[tuple[int, str]]()
        while queue:
            kind = queue[0].resolution, queue[0].num_steps
            batch = [view for view in queue if (view.resolution, view.num_steps) == kind][:max_batch_size]
            end_s = now_s + self._batch_s(queue[0].resolution, len(batch))
            late = {view.request_id for view in batch if view.deadline_s is not None and end_s > view.deadline_s}
            if not late:
                return Decision(tuple(view.request_id for view in batch), tuple(dropped))
            reason = f"it would be late in a batch of {len(batch)}"
            dropped += [(view.request_id, reason) for view in batch if view.request_id in late]
            queue = [view for view in queue if view.request_id not in late]
        return Decision((), tuple(dropped))
