"""Deadline scheduling that skips requests that do not fit and keeps the batch small enough for the tightest kind."""

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import ClassVar, NamedTuple

from ....data.resolution import Resolution
from .base import Decision, RecentAttainment
from .dropping import first_in_time
from .outlook import LookAheadPolicy, Outlook
from .slack import TOO_LATE


class _Candidate(NamedTuple):
    """A request that may join. Candidates sort in the order in which they are admitted."""

    is_ahead: bool
    deadline_s: float
    arrival_s: float
    request_id: int
    kind: int
    place: int


class EdfFittingPolicy(LookAheadPolicy):
    """Admits the earliest deadline among the requests that fit.

    A request fits if it is in time itself, makes no request of the batch late, and does not slow the batch beyond the
    longest step that each kind tolerates. Algorithm 1 (`slack`) stops at the first request that would make an active
    one late, and immediately discards a request that would be late in the merged batch. This policy skips both: the
    batch stays full, and the skipped requests join when others have left.

    * **A longest step.** All requests in a batch take their steps together, so a batch of many large images is too slow
      for the deadlines of small ones, which could then never join, however few they are. The longest step is the one
      that the tightest waiting or running kind tolerates: `share_of_slo` of the time from its arrival to its deadline,
      less its decoding, divided by its steps. Kinds that would not end in that time even alone do not count.
    * Steps of a batch are assumed to last `margin` longer than predicted, because now and then a step is slow and would
      make requests late that were admitted with no time to spare. A request that would run alone starts without it.
    * A request that would be late even if it ran alone is discarded. While nearly all requests are in time (`light`),
      however, only requests whose deadline could never have been met are discarded: one that became too late by
      waiting keeps waiting until all others have a place, and is served late.
    * A request without a deadline comes last, but its wait is bounded: once it has waited `patience` times its
      standalone latency, no request is admitted before it.

    Complexity: within one kind, the first request that fits is found by its deadline: O(kinds) for each admitted
    request, plus the active requests.

    Attributes:
        margin: share by which steps are assumed to exceed their prediction.
        share_of_slo: share of the time until the deadline that is planned for serving; the rest is for waiting until a
            place is free.
        light: recent share of requests in time from which on no request is discarded for having waited.
        patience: multiple of its standalone latency for which a request without a deadline waits for others.
        is_fair: whether resolutions that are behind go first.
    """

    margin: ClassVar[float] = 0.05
    share_of_slo: ClassVar[float] = 0.9
    light: ClassVar[float] = 0.95
    patience: ClassVar[float] = 20.0
    is_fair: ClassVar[bool] = False
    name: ClassVar[str] = "edf-fitting"

    def choose(self, outlook: Outlook, num_free: int, attainment: RecentAttainment) -> Decision:
        """Admit the requests that fit."""
        firsts = first_in_time(outlook)
        places = list(firsts)
        longest_s = self._longest_step_s(outlook, firsts)
        behind = attainment.behind if self.is_fair else ()
        admit: list[int] = []
        while len(admit) < num_free and (found := self._next(outlook, places, longest_s, behind)) is not None:
            admit.append(found.request_id)
            # Requests before it in its group do not fit into a larger batch either.
            places[found.kind] = found.place + 1
            outlook.join(found.kind, found.deadline_s)
        grouped = zip(outlook.groups, firsts, strict=True)
        late = sorted((*one[:3], kind) for kind, (group, place) in enumerate(grouped) for one in group[:place])
        kept = [one for one in late if one[0] - one[1] >= outlook.alone_duration_s(one[3])]
        if attainment.in_time_with(len(kept)) < self.light:
            kept = []
        if len(admit) + len(late) == sum(map(len, outlook.groups)):
            for deadline_s, _, request_id, kind in kept:
                if len(admit) < num_free and self._tolerates(outlook, kind, longest_s):
                    admit.append(request_id)
                    outlook.join(kind, deadline_s)
        waits = {one[2] for one in kept}
        return Decision(tuple(admit), tuple((one[2], TOO_LATE) for one in late if one[2] not in waits))

    def _longest_step_s(self, outlook: Outlook, places: Sequence[int]) -> float:
        """Return the longest step, in seconds, that all kinds tolerate."""
        waiting = (group[place][3] for group, place in zip(outlook.groups, places, strict=True) if place < len(group))
        views = (view for view in (*outlook.active, *waiting) if view.deadline_s is not None)
        return min((outlook.longest_step_s(view, self.share_of_slo) for view in views), default=math.inf)

    def _next(
        self, outlook: Outlook, places: Sequence[int], longest_s: float, behind: Collection[Resolution]
    ) -> _Candidate | None:
        """Return the request that joins next; None if none does."""
        if (found := self._patient(outlook, places)) is not None:
            return None if outlook.batch and outlook.makes_late(found.kind) else found
        fitting: list[_Candidate] = []
        is_held = False
        for kind, group in enumerate(outlook.groups):
            if places[kind] == len(group):
                continue
            is_behind = group[places[kind]][3].resolution in behind
            place = bisect_left(group, (outlook.now_s + outlook.completion_s(kind),), lo=places[kind])
            if place < len(group) and self._tolerates(outlook, kind, longest_s):
                fitting.append(_Candidate(not is_behind, *group[place][:3], kind, place))
            elif is_behind:
                is_held = True
        found = min(fitting, default=None)
        # Admitting another resolution first would only delay the one that is behind.
        return None if found is None or (is_held and found.is_ahead) else found

    def _patient(self, outlook: Outlook, places: Sequence[int]) -> _Candidate | None:
        """Return the longest-waiting request without a deadline whose patience is exhausted; None if there is none."""
        waited: list[_Candidate] = []
        for kind, group in enumerate(outlook.groups):
            place = bisect_left(group, (math.inf,), lo=places[kind])
            if place < len(group):
                one = _Candidate(False, *group[place][:3], kind, place)
                if outlook.now_s - one.arrival_s > self.patience * outlook.kinds[kind].unit_s:
                    waited.append(one)
        return min(waited, default=None)

    @staticmethod
    def _tolerates(outlook: Outlook, kind: int, longest_s: float) -> bool:
        """Return whether the batch tolerates one more request of a kind."""
        return not outlook.batch or (outlook.merged_s(kind) <= longest_s and not outlook.makes_late(kind))


class FairFittingPolicy(EdfFittingPolicy):
    """`EdfFittingPolicy` with fairness between resolutions.

    If clearly fewer requests of one resolution than of all were recently in time (`RecentAttainment.behind`), the
    waiting requests of that resolution go first, and no other request joins until they fit.
    """

    is_fair: ClassVar[bool] = True
    name: ClassVar[str] = "fair-fitting"
