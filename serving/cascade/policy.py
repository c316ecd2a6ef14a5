"""Which requests of a worker's queue are drawn next, none that would be late: a batch of one model that is run to
completion, or light and heavy images that share a batch.
"""

from collections.abc import Callable, Mapping
from typing import ClassVar

from ...data.resolution import Resolution
from ..scheduling.policies.base import Decision, Policy, Snapshot
from ..scheduling.policies.waiting import by_deadline

BatchSeconds = Callable[[Resolution, int], float]
"""e(b): seconds of a batch of so many requests of a resolution, with all stages."""


class CascadePolicy(Policy):
    """DiffServe's workers (section 3.1): who has the earliest deadline leads, and others of its resolution go along.

    The paper has one resolution, where that is the request that came first. SLOs of small images are shorter, though,
    and behind a batch of large ones that came before them they would be late.

    A batch runs to completion: the next one begins when its last image is decoded. Otherwise images would pile up
    before the decoder, where no plan sees them, as soon as steps are shorter than decoding. Whoever would be late in a
    batch is dropped before it starts, and the batch is formed anew without him.

    Args:
        batch_s: of the model.
    """

    name: ClassVar[str] = "cascade"
    requires_one_resolution: ClassVar[bool] = True
    requires_predictor: ClassVar[bool] = False

    def __init__(self, batch_s: BatchSeconds) -> None:
        self._batch_s = batch_s

    def decide(self, snapshot: Snapshot) -> Decision:
        """Decide as `Policy.decide` says."""
        # While a batch runs, the size of the next one may be below its own.
        if snapshot.active or snapshot.decoder_free_s > snapshot.now_s:
            return Decision()
        queue = sorted(snapshot.waiting, key=by_deadline)
        dropped = list[tuple[int, str]]()
        while queue:
            kind = queue[0].resolution, queue[0].num_steps
            batch = [view for view in queue if (view.resolution, view.num_steps) == kind][: snapshot.max_batch_size]
            end_s = snapshot.now_s + self._batch_s(queue[0].resolution, len(batch))
            late = {view.request_id for view in batch if view.deadline_s is not None and end_s > view.deadline_s}
            if not late:
                return Decision(tuple(view.request_id for view in batch), tuple(dropped))
            reason = f"it would be late in a batch of {len(batch)}"
            dropped += [(view.request_id, reason) for view in batch if view.request_id in late]
            queue = [view for view in queue if view.request_id not in late]
        return Decision((), tuple(dropped))


class SharedPolicy(Policy):
    """Light and heavy images of one model in one batch, which requests of all sizes join at any step.

    Light images go first: they are few steps, and until one is scored nobody knows whether a heavy one is to follow.
    Of each kind, who has the earliest deadline goes first.

    Args:
        batch_s: of each model, by its number of steps.
    """

    name: ClassVar[str] = "cascade-shared"
    requires_one_resolution: ClassVar[bool] = False
    requires_predictor: ClassVar[bool] = False

    def __init__(self, batch_s: Mapping[int, BatchSeconds]) -> None:
        self._batch_s = batch_s

    def decide(self, snapshot: Snapshot) -> Decision:
        """Decide as `Policy.decide` says."""
        num_free = snapshot.num_free
        joining, dropped = list[int](), list[tuple[int, str]]()
        order = sorted(snapshot.waiting, key=lambda view: (view.num_steps, by_deadline(view))) if num_free else []
        for view in order:
            if len(joining) == num_free:
                break
            count = len(snapshot.active) + len(joining) + 1
            end_s = snapshot.now_s + self._batch_s[view.num_steps](view.resolution, count)
            if view.deadline_s is not None and end_s > view.deadline_s:
                dropped.append((view.request_id, f"it would be late in a batch of {count}"))
            else:
                joining.append(view.request_id)
        return Decision(tuple(joining), tuple(dropped))
