"""Slack scheduling that passes over who does not fit, and what those do that look at nothing but who is too late."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...core.request_state import RequestView
from .base import Decision, StepLatencyPredictor, free_places, require_predictor
from .in_order import ContinuousPolicy, EdfPolicy, InOrderPolicy
from .outlook import Outlook
from .slack import TOO_LATE, slack
from .waiting import WaitingQueue, as_queue


@dataclass(frozen=True, slots=True)
class FittingPolicy:
    """Admits the most urgent waiting request of those that fit: in time themselves, and making nobody late.

    Where Algorithm 1 (`slack`) stops at the first request that would make an active one late, and discards at once who
    would be late in the merged batch, this one passes over both: the batch stays full, and who was passed over joins
    when others have left. Discarded is only who would be late even with all to itself.

    * Of those who fit, the one of least slack joins, again and again, each time with the batch as it is then.
    * Steps of a batch are taken to last `margin` longer than predicted, as one of many is slow, and who was admitted
      with nothing to spare is late then. A request that would be alone starts without it.
    * Without a deadline a request comes last, but not for ever: when it has waited for `patience` times its standalone
      latency, nobody is admitted before it.

    Complexity: within one kind the first that fits is found by its deadline: O(kinds) for each request admitted, plus
    the active requests.

    Attributes:
        margin: share by which steps may last longer.
        patience: standalone latencies that a request without a deadline waits for others.
    """

    margin: float = 0.05
    patience: float = 20.0

    name: ClassVar[str] = "slack-fitting"
    requires_one_resolution: ClassVar[bool] = False
    requires_predictor: ClassVar[bool] = True

    def decide(
        self,
        now_s: float,
        waiting: Sequence[RequestView],
        active: Sequence[RequestView],
        max_batch_size: int,
        predictor: StepLatencyPredictor | None = None,
        decoder_free_s: float = 0.0,
    ) -> Decision:
        """See `Policy.decide`. Raises UsageError without a predictor."""
        num_free = free_places(active, max_batch_size)
        predictor = require_predictor(self, predictor)
        if not num_free or not waiting:
            return Decision()

        outlook = Outlook(now_s, waiting, active, predictor, decoder_free_s, margin=self.margin)
        places, drop = _too_late(outlook, now_s)
        admit: list[int] = []
        while num_free:
            found = self._patient(outlook, places, now_s)
            if found is None:
                found = _most_urgent(outlook, places, now_s)
            elif outlook.batch and outlook.makes_late(found[0]):
                break
            if found is None:
                break
            kind, place = found
            deadline_s, _, request_id, _ = outlook.groups[kind][place]
            admit.append(request_id)
            # Those before it do not fit into a larger batch either.
            places[kind] = place + 1
            num_free -= 1
            outlook.join(kind, deadline_s)
        return Decision(tuple(admit), drop)

    def _patient(self, outlook: Outlook, places: Sequence[int], now_s: float) -> tuple[int, int] | None:
        """Kind and place of the request without a deadline that has waited for too long, and longest."""
        waited = []
        for kind, group in enumerate(outlook.groups):
            place = bisect_left(group, (math.inf,), lo=places[kind])
            if place < len(group):
                _, arrival_s, request_id, _ = group[place]
                if now_s - arrival_s > self.patience * outlook.kinds[kind].unit_s:
                    waited.append((arrival_s, request_id, kind, place))
        return min(waited)[2:] if waited else None


def _too_late(outlook: Outlook, now_s: float) -> tuple[list[int], tuple[tuple[int, str], ...]]:
    """Of each kind the first that would be in time with all to itself, and those before it with the reason."""
    places = [bisect_left(group, (now_s + outlook.needs_alone_s(kind),)) for kind, group in enumerate(outlook.groups)]
    late = sorted(one[:3] for group, place in zip(outlook.groups, places, strict=True) for one in group[:place])
    return places, tuple((request_id, TOO_LATE) for _, _, request_id in late)


def _most_urgent(outlook: Outlook, places: Sequence[int], now_s: float) -> tuple[int, int] | None:
    """Kind and place of the request of least slack that fits."""
    fitting = []
    for kind, group in enumerate(outlook.groups):
        needs_s = outlook.needs_s(kind)
        place = bisect_left(group, (now_s + needs_s,), lo=places[kind])
        if place < len(group) and not outlook.makes_late(kind):
            deadline_s, arrival_s, request_id, _ = group[place]
            score = slack(deadline_s - now_s - needs_s, outlook.kinds[kind].unit_s)
            fitting.append((score, arrival_s, request_id, kind, place))
    return min(fitting)[3:] if fitting else None


class DroppingPolicy(InOrderPolicy):
    """A policy that fills places in its order, and discards who would be late even with all to itself."""

    requires_predictor: ClassVar[bool] = True

    def decide(
        self,
        now_s: float,
        waiting: Sequence[RequestView],
        active: Sequence[RequestView],
        max_batch_size: int,
        predictor: StepLatencyPredictor | None = None,
        decoder_free_s: float = 0.0,
    ) -> Decision:
        """See `Policy.decide`. Raises UsageError without a predictor."""
        predictor = require_predictor(self, predictor)
        if not free_places(active, max_batch_size) or not waiting:
            return Decision()
        _, drop = _too_late(Outlook(now_s, waiting, active, predictor, decoder_free_s), now_s)
        dropped = {request_id for request_id, _ in drop}
        left = WaitingQueue([view for view in as_queue(waiting) if view.request_id not in dropped])
        return Decision(super().decide(now_s, left, active, max_batch_size).admit, drop)


class ContinuousDropPolicy(DroppingPolicy, ContinuousPolicy):
    """Continuous batching in order of arrival that discards who would be late."""

    name: ClassVar[str] = "continuous-drop"


class EdfDropPolicy(DroppingPolicy, EdfPolicy):
    """Continuous batching by deadline that discards who would be late."""

    name: ClassVar[str] = "edf-drop"
