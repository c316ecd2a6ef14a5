"""Policies that fill places in a fixed order and use predictions only to discard requests that are too late."""

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterable
from heapq import merge, nsmallest
from itertools import chain, islice
from operator import itemgetter
from typing import ClassVar

from .base import Decision, RecentAttainment
from .outlook import LookAheadPolicy, Outlook
from .slack import TOO_LATE
from .waiting import ByDeadline


def first_in_time(outlook: Outlook) -> list[int]:
    """Return, for the group of each kind, the index of the first request that would be in time if it ran alone."""
    now_s = outlook.now_s
    return [
        bisect_left(group, (now_s + outlook.alone_completion_s(kind),)) for kind, group in enumerate(outlook.groups)
    ]


class DroppingPolicy(LookAheadPolicy):
    """Fills places in an order of its own and discards requests that would be late even if they ran alone."""

    def choose(self, outlook: Outlook, num_free: int, attainment: RecentAttainment) -> Decision:
        """Admit the first of the requests that are not too late."""
        groups = list(zip(outlook.groups, first_in_time(outlook), strict=True))
        late = merge(*(group[:place] for group, place in groups))
        left = (islice(group, place, None) for group, place in groups)
        return Decision(tuple(one[2] for one in self.first(num_free, left)), tuple((one[2], TOO_LATE) for one in late))

    @abstractmethod
    def first(self, count: int, groups: Iterable[Iterable[ByDeadline]]) -> Iterable[ByDeadline]:
        """Return the first `count` requests of the groups, each of which is in order of deadline."""


class ContinuousDropPolicy(DroppingPolicy):
    """Continuous batching in order of arrival that discards requests that would be late."""

    name: ClassVar[str] = "continuous-drop"

    def first(self, count: int, groups: Iterable[Iterable[ByDeadline]]) -> Iterable[ByDeadline]:
        """Return the requests that arrived first."""
        return nsmallest(count, chain.from_iterable(groups), key=itemgetter(1, 2))


class EdfDropPolicy(DroppingPolicy):
    """Continuous batching by deadline that discards requests that would be late."""

    name: ClassVar[str] = "edf-drop"

    def first(self, count: int, groups: Iterable[Iterable[ByDeadline]]) -> Iterable[ByDeadline]:
        """Return the requests with the earliest deadlines."""
        return islice(merge(*groups), count)
