"""Predicted end times of the requests in a batch, with and without one more, for policies that look ahead."""

import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import ClassVar, NamedTuple

from ....data.resolution import Resolution
from ....data.work import Work
from ...core.request_state import RequestView
from .base import Decision, EndPredictor, Policy, RecentAttainment, Snapshot, StepLatencyPredictor, require_predictor
from .waiting import as_queue


class Demand(NamedTuple):
    """Cost of a request of one kind.

    Attributes:
        work: work of one step.
        steps: total number of steps.
        decode_s: seconds in the decoder.
        beyond_s: seconds of everything else besides the steps.
        unit_s: standalone latency, the unit of its slack.
    """

    work: Resolution | Work
    steps: int
    decode_s: float
    beyond_s: float
    unit_s: float


class Run(NamedTuple):
    """A request in the batch.

    Attributes:
        steps: number of remaining steps.
        decode_s: seconds in the decoder.
        by_s: seconds from now by which the decoder must be done; infinity without a deadline.
    """

    steps: int
    decode_s: float
    by_s: float = math.inf


class Outlook:
    """The batch at one decision, and how its end times would change if requests of a kind joined.

    All remaining steps of all requests are assumed to last as long as one step of the current batch, since requests
    that leave are replaced by others. The decoder takes one request at a time, in the order in which requests end
    their steps. A request waits for the requests that the decoder already has and for those of the batch that end
    before it or with it; each takes as long as the decoder recently took for its resolution (`EndPredictor`). Until a
    request of the resolution has ended, the estimate is the standalone latency minus the steps alone; that includes
    the preparation, too, which errs on the safe side. Without a measured standalone latency, the predicted latency of
    the steps alone replaces it.

    Args:
        snapshot: inputs of the policy's decision.
        predictor: step latencies, from the snapshot.
        margin: share by which the steps of a batch are assumed to exceed their prediction.

    Attributes:
        now_s, active: fields of the snapshot.
        groups: waiting requests of each kind, in order of deadline.
        kinds: cost of one request of each kind.
        batch: works of all requests in the batch, sorted.
        step_s: seconds of its next step; 0 if the batch is empty.
    """

    def __init__(self, snapshot: Snapshot, predictor: StepLatencyPredictor, *, margin: float = 0.0) -> None:
        self.active = active = tuple(snapshot.active)  # `ActiveViews` creates views at every access
        self.now_s, self._predict, self._longer = snapshot.now_s, predictor.step_latency_s, 1 + margin
        self._learnt = predictor if isinstance(predictor, EndPredictor) else None
        self.groups = as_queue(snapshot.waiting).groups
        firsts = [group[0][3] for group in self.groups]
        self._alone_s: dict[Resolution | Work, float] = {}
        for view in (*firsts, *(view for view in active if view.deadline_s is not None)):
            if view.work not in self._alone_s:
                self._alone_s[view.work] = self._predict((view.work,))
        self.kinds = [self._demand(view) for view in firsts]
        # In the order in which the decoder receives them.
        self._running = sorted(map(self._run, active), key=attrgetter("steps"))
        self._decoder_s = 0.0 if self._learnt is None else max(0.0, snapshot.decoder_free_s - self.now_s)
        self.batch = tuple(sorted(view.work for view in active))
        self.step_s = self._predict(self.batch) * self._longer if self.batch else 0.0
        # For the merged batch: step latency by the work of the joining request, and end time by its kind.
        self._merged_s: dict[Resolution | Work, float] = {}
        self._ends_s: dict[int, float] = {}

    def alone_s(self, kind: int) -> float:
        """Return the seconds of one step of a request of this kind alone."""
        return self._alone_s[self.kinds[kind].work]

    def merged_s(self, kind: int) -> float:
        """Return the seconds of one step of the batch with one request of this kind added."""
        work = self.kinds[kind].work
        if work not in self._merged_s:
            longer = self._longer if self.batch else 1.0
            self._merged_s[work] = self._predict(tuple(sorted((*self.batch, work)))) * longer
        return self._merged_s[work]

    def completion_s(self, kind: int) -> float:
        """Return the seconds from now until a request of this kind has its image, if it joins now."""
        if kind not in self._ends_s:
            _, steps, decode_s, beyond_s, _ = self.kinds[kind]
            ahead = [run for run in self._running if run.steps <= steps]
            self._ends_s[kind] = beyond_s + self._ends([*ahead, Run(steps, decode_s)], self.merged_s(kind))[-1]
        return self._ends_s[kind]

    def alone_duration_s(self, kind: int, decoder_s: float = 0.0) -> float:
        """Return the seconds that a request of this kind takes on an idle machine whose decoder is free in `decoder_s`
        seconds.
        """
        _, steps, decode_s, beyond_s, _ = self.kinds[kind]
        return beyond_s + max(decoder_s, steps * self.alone_s(kind)) + decode_s

    def alone_completion_s(self, kind: int) -> float:
        """Return the seconds from now until a request of this kind would have its image with the batch to itself."""
        return self.alone_duration_s(kind, self._decoder_s)

    def longest_step_s(self, view: RequestView, share: float) -> float:
        """Return the longest step, in seconds, with which a request ends within this share of the time between its
        arrival and its deadline; infinity if that time is too short even for the request alone.
        """
        assert view.deadline_s is not None
        demand = self._demand(view)
        left_s = share * (view.deadline_s - view.arrival_s) - demand.decode_s - demand.beyond_s
        return left_s / demand.steps if left_s >= demand.steps * self._alone_s[view.work] else math.inf

    def makes_late(self, kind: int) -> bool:
        """Return whether a request of this kind, by joining, would make a request of the batch miss its deadline."""
        merged, place = self._merged(kind, math.inf)
        later_s = self._ends(merged, self.merged_s(kind))
        del later_s[place]
        before_s = self._ends(self._running, self.step_s)
        return any(
            before <= run.by_s < later for run, before, later in zip(self._running, before_s, later_s, strict=True)
        )

    def join(self, kind: int, deadline_s: float) -> None:
        """Add a request of this kind to the batch; `deadline_s` is on the clock of `now_s`, infinity for none."""
        self._running, _ = self._merged(kind, deadline_s - self.now_s - self.kinds[kind].beyond_s)
        self.step_s = self.merged_s(kind)
        self.batch = tuple(sorted((*self.batch, self.kinds[kind].work)))
        self._merged_s.clear()
        self._ends_s.clear()

    def _merged(self, kind: int, by_s: float) -> tuple[list[Run], int]:
        """Return the batch with one request of this kind added, and the index of that request."""
        _, steps, decode_s, _, _ = self.kinds[kind]
        place = bisect_right(self._running, steps, key=attrgetter("steps"))
        return [*self._running[:place], Run(steps, decode_s, by_s), *self._running[place:]], place

    def _ends(self, running: Sequence[Run], step_s: float) -> list[float]:
        """Return the seconds from now until the decoder is done with each request, in the given order."""
        free_s, ends_s = self._decoder_s, []
        for run in running:
            free_s = max(free_s, run.steps * step_s) + run.decode_s
            ends_s.append(free_s)
        return ends_s

    def _demand(self, view: RequestView) -> Demand:
        steps_s = view.num_steps * self._alone_s[view.work]
        unit_s = steps_s if view.standalone_s is None else view.standalone_s
        decode_s = None if self._learnt is None else self._learnt.after_steps_s(view.resolution)
        if decode_s is None:
            return Demand(view.work, view.num_steps, 0.0, max(0.0, unit_s - steps_s), unit_s)
        return Demand(view.work, view.num_steps, decode_s, 0.0, unit_s)

    def _run(self, view: RequestView) -> Run:
        left = view.num_steps - view.steps_done
        if view.deadline_s is None:
            return Run(left, 0.0 if self._learnt is None else self._learnt.after_steps_s(view.resolution) or 0.0)
        demand = self._demand(view)
        return Run(left, demand.decode_s, view.deadline_s - self.now_s - demand.beyond_s)


class LookAheadPolicy(Policy):
    """Decides from an `Outlook` whenever there is a free place and a waiting request.

    Attributes:
        margin: share by which the steps of a batch are assumed to exceed their prediction.
    """

    margin: ClassVar[float] = 0.0
    requires_one_resolution: ClassVar[bool] = False
    requires_predictor: ClassVar[bool] = True

    def decide(self, snapshot: Snapshot) -> Decision:
        """Choose from an `Outlook`, if a place is free and a request waits. Raises UsageError without a predictor."""
        num_free = snapshot.num_free
        predictor = require_predictor(self, snapshot.predictor)
        if not num_free or not snapshot.waiting:
            return Decision()
        return self.choose(Outlook(snapshot, predictor, margin=self.margin), num_free, snapshot.attainment)

    @abstractmethod
    def choose(self, outlook: Outlook, num_free: int, attainment: RecentAttainment) -> Decision:
        """Choose the requests that join, at most `num_free`, and the requests that are dropped."""
