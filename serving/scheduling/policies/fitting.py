"""Deadline scheduling that passes over who does not fit, and keeps the batch small enough for the tightest kind."""

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import ClassVar, NamedTuple

from ....data.resolution import Resolution
from .base import Decision, Lately
from .dropping import first_in_time
from .outlook import LookAheadPolicy, Outlook
from .slack import TOO_LATE


class _Candidate(NamedTuple):
    """A request that may join. It sorts by what comes first."""

    is_ahead: bool
    deadline_s: float
    arrival_s: float
    request_id: int
    kind: int
    place: int


class EdfFittingPolicy(LookAheadPolicy):
    """Admits the earliest deadline of those that fit: in time themselves, making nobody late, and not slowing the batch
    beyond what each kind can bear.

    Where Algorithm 1 (`slack`) stops at the first request that would make an active one late, and discards at once who
    would be late in the merged batch, this one passes over both: the batch stays full, and who was passed over joins
    when others have left.

    * **A longest step.** All in a batch take their steps together, so that a batch of many large images is too slow for
      the deadlines of small ones, which could then never join, however few they are. A step may be as long as the
      tightest kind that waits or runs can bear: `share_of_slo` of the time from its arrival to its deadline, less its
      decoding, over its steps. Kinds that could not even be drawn alone in that time do not count.
    * Steps of a batch are taken to last `margin` longer than predicted, as one of many is slow, and who was admitted
      with nothing to spare is late then. A request that would be alone starts without it.
    * Who would be late even with all to itself is discarded. But as long as nearly all requests are in time (`light`),
      only those are whose deadline nothing could meet: who has become too late waits until all others have a place, and
      is drawn late.
    * Without a deadline a request comes last, but not for ever: when it has waited for `patience` times its standalone
      latency, nobody is admitted before it.

    Complexity: within one kind the first that fits is found by its deadline: O(kinds) for each request admitted, plus
    the active requests.

    Attributes:
        margin: share by which steps may last longer.
        share_of_slo: the rest is for waiting until there is a place.
        light: share of requests in time lately from which on nobody is discarded for having waited.
        patience: standalone latencies that a request without a deadline waits for others.
        is_fair: whether resolutions that are behind go first.
    """

    margin: ClassVar[float] = 0.05
    share_of_slo: ClassVar[float] = 0.9
    light: ClassVar[float] = 0.95
    patience: ClassVar[float] = 20.0
    is_fair: ClassVar[bool] = False
    name: ClassVar[str] = "edf-fitting"

    def choose(self, outlook: Outlook, num_free: int, lately: Lately) -> Decision:
        """Admit those who fit."""
        firsts = first_in_time(outlook)
        places = list(firsts)
        longest_s = self._longest_step_s(outlook, firsts)
        behind = lately.behind if self.is_fair else ()
        admit: list[int] = []
        while len(admit) < num_free and (found := self._next(outlook, places, longest_s, behind)) is not None:
            admit.append(found.request_id)
            # Those before it do not fit into a larger batch either.
            places[found.kind] = found.place + 1
            outlook.join(found.kind, found.deadline_s)
        grouped = zip(outlook.groups, firsts, strict=True)
        late = sorted((*one[:3], kind) for kind, (group, place) in enumerate(grouped) for one in group[:place])
        kept = [one for one in late if one[0] - one[1] >= outlook.takes_alone_s(one[3])]
        if lately.in_time_with(len(kept)) < self.light:
            kept = []
        if len(admit) + len(late) == sum(map(len, outlook.groups)):
            for deadline_s, _, request_id, kind in kept:
                if len(admit) < num_free and self._bears(outlook, kind, longest_s):
                    admit.append(request_id)
                    outlook.join(kind, deadline_s)
        waits = {one[2] for one in kept}
        return Decision(tuple(admit), tuple((one[2], TOO_LATE) for one in late if one[2] not in waits))

    def _longest_step_s(self, outlook: Outlook, places: Sequence[int]) -> float:
        """How long a step of the batch may last."""
        waiting = (group[place][3] for group, place in zip(outlook.groups, places, strict=True) if place < len(group))
        views = (view for view in (*outlook.active, *waiting) if view.deadline_s is not None)
        return min((outlook.bears_step_s(view, self.share_of_slo) for view in views), default=math.inf)

    def _next(
        self, outlook: Outlook, places: Sequence[int], longest_s: float, behind: Collection[Resolution]
    ) -> _Candidate | None:
        """Who joins next; None if nobody does."""
        if (found := self._patient(outlook, places)) is not None:
            return None if outlook.batch and outlook.makes_late(found.kind) else found
        fitting: list[_Candidate] = []
        is_held = False
        for kind, group in enumerate(outlook.groups):
            if places[kind] == len(group):
                continue
            is_behind = group[places[kind]][3].resolution in behind
            place = bisect_left(group, (outlook.now_s + outlook.needs_s(kind),), lo=places[kind])
            if place < len(group) and self._bears(outlook, kind, longest_s):
                fitting.append(_Candidate(not is_behind, *group[place][:3], kind, place))
            elif is_behind:
                is_held = True
        found = min(fitting, default=None)
        # Whoever goes ahead would only put off the one that is behind.
        return None if found is None or (is_held and found.is_ahead) else found

    def _patient(self, outlook: Outlook, places: Sequence[int]) -> _Candidate | None:
        """The request without a deadline that has waited for too long, and longest."""
        waited: list[_Candidate] = []
        for kind, group in enumerate(outlook.groups):
            place = bisect_left(group, (math.inf,), lo=places[kind])
            if place < len(group):
                one = _Candidate(False, *group[place][:3], kind, place)
                if outlook.now_s - one.arrival_s > self.patience * outlook.kinds[kind].unit_s:
                    waited.append(one)
        return min(waited, default=None)

    @staticmethod
    def _bears(outlook: Outlook, kind: int, longest_s: float) -> bool:
        """Whether the batch bears one of a kind."""
        return not outlook.batch or (outlook.merged_s(kind) <= longest_s and not outlook.makes_late(kind))


class FairFittingPolicy(EdfFittingPolicy):
    """The same, but no resolution pays for the others: where clearly fewer requests of one were in time lately than of
    all (`Lately.behind`), those that wait go first, and until they fit, nobody else joins.
    """

    is_fair: ClassVar[bool] = True
    name: ClassVar[str] = "fair-fitting"
