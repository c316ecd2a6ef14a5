"""What policies that look ahead know of a batch: when its requests will end, alone and with one more."""

import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import ClassVar, NamedTuple

from ....data.resolution import Resolution
from ....data.work import Work
from ...core.request_state import RequestView
from .base import Decision, EndPredictor, Lately, Policy, Snapshot, StepLatencyPredictor, require_predictor
from .waiting import as_queue


class Demand(NamedTuple):
    """What a request of one kind takes.

    Attributes:
        work: of a step.
        steps: in all.
        decode_s: seconds of the decoder.
        beyond_s: seconds of what else is beyond the steps.
        unit_s: its standalone latency, which its slack is measured in.
    """

    work: Resolution | Work
    steps: int
    decode_s: float
    beyond_s: float
    unit_s: float


class Run(NamedTuple):
    """A request in the batch.

    Attributes:
        steps: left.
        decode_s: seconds of the decoder.
        by_s: from now until when the decoder must be done; infinity without a deadline.
    """

    steps: int
    decode_s: float
    by_s: float = math.inf


class Outlook:
    """The batch at one decision, and what would become of it if requests of a kind joined.

    All remaining steps of everybody are taken to last as long as one of the batch does now: who leaves is followed by
    others. The decoder takes one request at a time, in the order in which they end their steps. A request waits for
    those that it has been given already and for those of the batch that end before it or with it, each for as long as
    the decoder lately had for its resolution (`EndPredictor`). Until one of the resolution has ended, what the
    standalone latency has beyond the steps alone stands for it; that holds the preparation, too, which errs on the safe
    side. Without a measured standalone latency the predicted steps alone stand for it.

    Args:
        snapshot: what the policy decides from.
        predictor: of step latencies; that of the snapshot.
        margin: share by which steps of a batch are taken to last longer than predicted.

    Attributes:
        now_s, active: of the snapshot.
        groups: the requests of each kind that wait, in order of deadline.
        kinds: what one of each takes.
        batch: works of all in the batch, sorted.
        step_s: seconds of its next step; 0 if there is nobody.
    """

    def __init__(self, snapshot: Snapshot, predictor: StepLatencyPredictor, *, margin: float = 0.0) -> None:
        self.active = active = tuple(snapshot.active)  # views are made only when they are asked for
        self.now_s, self._predict, self._longer = snapshot.now_s, predictor.step_latency_s, 1 + margin
        self._learnt = predictor if isinstance(predictor, EndPredictor) else None
        self.groups = as_queue(snapshot.waiting).groups
        firsts = [group[0][3] for group in self.groups]
        self._alone_s: dict[Resolution | Work, float] = {}
        for view in (*firsts, *(view for view in active if view.deadline_s is not None)):
            if view.work not in self._alone_s:
                self._alone_s[view.work] = self._predict((view.work,))
        self.kinds = [self._demand(view) for view in firsts]
        # In the order in which the decoder gets them.
        self._running = sorted(map(self._run, active), key=attrgetter("steps"))
        self._decoder_s = 0.0 if self._learnt is None else max(0.0, snapshot.decoder_free_s - self.now_s)
        self.batch = tuple(sorted(view.work for view in active))
        self.step_s = self._predict(self.batch) * self._longer if self.batch else 0.0
        # Of the merged batch: its step by the work of who joins, and when one of each kind would end.
        self._merged_s: dict[Resolution | Work, float] = {}
        self._ends_s: dict[int, float] = {}

    def alone_s(self, kind: int) -> float:
        """Seconds of one step of a request of this kind alone."""
        return self._alone_s[self.kinds[kind].work]

    def merged_s(self, kind: int) -> float:
        """Seconds of one step of the batch with one of this kind."""
        work = self.kinds[kind].work
        if work not in self._merged_s:
            longer = self._longer if self.batch else 1.0
            self._merged_s[work] = self._predict(tuple(sorted((*self.batch, work)))) * longer
        return self._merged_s[work]

    def needs_s(self, kind: int) -> float:
        """Seconds from now until one of this kind has its image, if it joins now."""
        if kind not in self._ends_s:
            _, steps, decode_s, beyond_s, _ = self.kinds[kind]
            ahead = [run for run in self._running if run.steps <= steps]
            self._ends_s[kind] = beyond_s + self._ends([*ahead, Run(steps, decode_s)], self.merged_s(kind))[-1]
        return self._ends_s[kind]

    def takes_alone_s(self, kind: int, decoder_s: float = 0.0) -> float:
        """Seconds of a request of this kind on an idle machine, whose decoder is free in `decoder_s`."""
        _, steps, decode_s, beyond_s, _ = self.kinds[kind]
        return beyond_s + max(decoder_s, steps * self.alone_s(kind)) + decode_s

    def needs_alone_s(self, kind: int) -> float:
        """Seconds from now until one of this kind has its image, if it has all to itself."""
        return self.takes_alone_s(kind, self._decoder_s)

    def bears_step_s(self, view: RequestView, share: float) -> float:
        """Seconds that a step may last for a request with a deadline, if it is to be done in this share of the time
        between its arrival and its deadline; infinity where that is too little even alone.
        """
        assert view.deadline_s is not None
        demand = self._demand(view)
        left_s = share * (view.deadline_s - view.arrival_s) - demand.decode_s - demand.beyond_s
        return left_s / demand.steps if left_s >= demand.steps * self._alone_s[view.work] else math.inf

    def makes_late(self, kind: int) -> bool:
        """Whether a request of the batch would miss its deadline if one of this kind joined, and would not without."""
        merged, place = self._merged(kind, math.inf)
        later_s = self._ends(merged, self.merged_s(kind))
        del later_s[place]
        before_s = self._ends(self._running, self.step_s)
        return any(
            before <= run.by_s < later for run, before, later in zip(self._running, before_s, later_s, strict=True)
        )

    def join(self, kind: int, deadline_s: float) -> None:
        """One of this kind joins the batch; `deadline_s` is on the clock of `now_s`, infinity without one."""
        self._running, _ = self._merged(kind, deadline_s - self.now_s - self.kinds[kind].beyond_s)
        self.step_s = self.merged_s(kind)
        self.batch = tuple(sorted((*self.batch, self.kinds[kind].work)))
        self._merged_s.clear()
        self._ends_s.clear()

    def _merged(self, kind: int, by_s: float) -> tuple[list[Run], int]:
        """The batch with one of this kind, and its place."""
        _, steps, decode_s, _, _ = self.kinds[kind]
        place = bisect_right(self._running, steps, key=attrgetter("steps"))
        return [*self._running[:place], Run(steps, decode_s, by_s), *self._running[place:]], place

    def _ends(self, running: Sequence[Run], step_s: float) -> list[float]:
        """Seconds from now until the decoder is done with each of them, in their order."""
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
    """Chooses by an `Outlook`, where there is a place and somebody waits for it.

    Attributes:
        margin: see `Outlook`.
    """

    margin: ClassVar[float] = 0.0
    requires_one_resolution: ClassVar[bool] = False
    requires_predictor: ClassVar[bool] = True

    def decide(self, snapshot: Snapshot) -> Decision:
        """Decide as `Policy.decide` says. Raises UsageError without a predictor."""
        num_free = snapshot.num_free
        predictor = require_predictor(self, snapshot.predictor)
        if not num_free or not snapshot.waiting:
            return Decision()
        return self.choose(Outlook(snapshot, predictor, margin=self.margin), num_free, snapshot.lately)

    @abstractmethod
    def choose(self, outlook: Outlook, num_free: int, lately: Lately) -> Decision:
        """Choose who joins, as many as there are places, and who is dropped."""
