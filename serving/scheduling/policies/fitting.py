"""Slack scheduling that passes over who does not fit, and policies that look at nothing but who is too late."""

import math
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from heapq import merge, nsmallest
from itertools import chain, islice
from operator import itemgetter
from typing import ClassVar

from .base import Decision
from .outlook import LookAheadPolicy, Outlook
from .slack import TOO_LATE, slack
from .waiting import ByDeadline


class FittingPolicy(LookAheadPolicy):
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

    margin: ClassVar[float] = 0.05
    patience: ClassVar[float] = 20.0
    name: ClassVar[str] = "slack-fitting"

    def choose(self, outlook: Outlook, num_free: int) -> Decision:
        """Admit those who fit."""
        places, drop = _too_late(outlook)
        admit: list[int] = []
        while num_free:
            found = self._patient(outlook, places)
            if found is None:
                found = _most_urgent(outlook, places)
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

    def _patient(self, outlook: Outlook, places: Sequence[int]) -> tuple[int, int] | None:
        """Kind and place of the request without a deadline that has waited for too long, and longest."""
        waited = []
        for kind, group in enumerate(outlook.groups):
            place = bisect_left(group, (math.inf,), lo=places[kind])
            if place < len(group):
                _, arrival_s, request_id, _ = group[place]
                if outlook.now_s - arrival_s > self.patience * outlook.kinds[kind].unit_s:
                    waited.append((arrival_s, request_id, kind, place))
        return min(waited)[2:] if waited else None


def _too_late(outlook: Outlook) -> tuple[list[int], tuple[tuple[int, str], ...]]:
    """The places of the first of each kind that would be in time with all to itself; those before, with the reason."""
    now_s = outlook.now_s
    places = [bisect_left(group, (now_s + outlook.needs_alone_s(kind),)) for kind, group in enumerate(outlook.groups)]
    late = sorted(one[:3] for group, place in zip(outlook.groups, places, strict=True) for one in group[:place])
    return places, tuple((request_id, TOO_LATE) for _, _, request_id in late)


def _most_urgent(outlook: Outlook, places: Sequence[int]) -> tuple[int, int] | None:
    """Kind and place of the request of least slack that fits."""
    fitting = []
    for kind, group in enumerate(outlook.groups):
        in_time_s = outlook.now_s + outlook.needs_s(kind)
        place = bisect_left(group, (in_time_s,), lo=places[kind])
        if place < len(group) and not outlook.makes_late(kind):
            deadline_s, arrival_s, request_id, _ = group[place]
            score = slack(deadline_s - in_time_s, outlook.kinds[kind].unit_s)
            fitting.append((score, arrival_s, request_id, kind, place))
    return min(fitting)[3:] if fitting else None


class DroppingPolicy(LookAheadPolicy):
    """Fills places in an order of its own, and discards who would be late even with all to itself."""

    def choose(self, outlook: Outlook, num_free: int) -> Decision:
        """Admit the first of those who are not too late."""
        places, drop = _too_late(outlook)
        left = (islice(group, place, None) for group, place in zip(outlook.groups, places, strict=True))
        return Decision(tuple(one[2] for one in self.first(num_free, left)), drop)

    @abstractmethod
    def first(self, count: int, groups: Iterable[Iterable[ByDeadline]]) -> Iterable[ByDeadline]:
        """Take the first requests of groups, each of which is in order of deadline."""


class ContinuousDropPolicy(DroppingPolicy):
    """Continuous batching in order of arrival that discards who would be late."""

    name: ClassVar[str] = "continuous-drop"

    def first(self, count: int, groups: Iterable[Iterable[ByDeadline]]) -> Iterable[ByDeadline]:
        """Take those that arrived first."""
        return nsmallest(count, chain.from_iterable(groups), key=itemgetter(1, 2))


class EdfDropPolicy(DroppingPolicy):
    """Continuous batching by deadline that discards who would be late."""

    name: ClassVar[str] = "edf-drop"

    def first(self, count: int, groups: Iterable[Iterable[ByDeadline]]) -> Iterable[ByDeadline]:
        """Take those that are due first."""
        return islice(merge(*groups), count)
