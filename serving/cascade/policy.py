"""Policies of a cascade's workers: batches of one model that run to completion, or batches of light and heavy images.

Both drop requests that would miss their deadline.
"""

from collections.abc import Callable, Mapping
from typing import ClassVar

from ...data.resolution import Resolution
from ..scheduling.policies.base import Decision, Policy, Snapshot
from ..scheduling.policies.waiting import by_deadline

BatchSeconds = Callable[[Resolution, int], float]
"""e(b): seconds that a batch of a resolution and a number of requests takes, with all stages."""


class CascadePolicy(Policy):
    """DiffServe's workers (section 3.1): the request with the earliest deadline leads a batch of its resolution.

    The paper has one resolution, so that the leader is the oldest request. With several resolutions, small images have
    shorter SLOs, and would be late behind a batch of older, larger images.

    A batch runs to completion: the next one begins when its last image is decoded. Otherwise images would pile up
    before the decoder, where no plan accounts for them, as soon as steps are shorter than decoding. A request that
    would be late in a batch is dropped before the batch starts, and the batch is formed again without it.

    Args:
        batch_s: e(b) of the model.
    """

    name: ClassVar[str] = "cascade"
    requires_one_resolution: ClassVar[bool] = True
    requires_predictor: ClassVar[bool] = False

    def __init__(self, batch_s: BatchSeconds) -> None:
        self._batch_s = batch_s

    def decide(self, snapshot: Snapshot) -> Decision:
        """Admit the next batch when the worker is idle, and drop requests that would be late in it."""
        # While a batch runs, the size limit of the next one may already be below its own size.
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

    Light images go first: they take few steps, and their scores decide whether heavy images follow. Images of the same
    kind go in the order of their deadlines.

    Args:
        batch_s: e(b) of each model, by its number of steps.
    """

    name: ClassVar[str] = "cascade-shared"
    requires_one_resolution: ClassVar[bool] = False
    requires_predictor: ClassVar[bool] = False

    def __init__(self, batch_s: Mapping[int, BatchSeconds]) -> None:
        self._batch_s = batch_s

    def decide(self, snapshot: Snapshot) -> Decision:
        """Fill the free places of the batch, and drop requests that would be late in it."""
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
