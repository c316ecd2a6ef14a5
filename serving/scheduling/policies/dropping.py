"""Policies that fill places in an order of their own and look at no prediction but to find who is too late."""

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterable
from heapq import merge, nsmallest
from itertools import chain, islice
from operator import itemgetter
from typing import ClassVar

from .base import Decision, Lately
from .outlook import LookAheadPolicy, Outlook
from .slack import TOO_LATE
from .waiting import ByDeadline


def first_in_time(outlook: Outlook) -> list[int]:
    """In the group of each kind, the place of the first request that would be in time with all to itself."""
    now_s = outlook.now_s
    return [bisect_left(group, (now_s + outlook.needs_alone_s(kind),)) for kind, group in enumerate(outlook.groups)]


class DroppingPolicy(LookAheadPolicy):
    """Fills places in an order of its own, and discards who would be late even with all to itself."""

    def choose(self, outlook: Outlook, num_free: int, lately: Lately) -> Decision:
        """Admit the first of those who are not too late."""
        groups = list(zip(outlook.groups, first_in_time(outlook), strict=True))
        late = merge(*(group[:place] for group, place in groups))
        left = (islice(group, place, None) for group, place in groups)
        return Decision(tuple(one[2] for one in self.first(num_free, left)), tuple((one[2], TOO_LATE) for one in late))

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
