"""The scheduler of PatchedServe: Algorithm 1 of section 6.2, on slack scores and predicted step latencies."""

import math
from dataclasses import dataclass
from typing import ClassVar

from .base import Decision, Lately
from .outlook import LookAheadPolicy, Outlook

TOO_LATE = "it could not meet its deadline even if it started at once"


@dataclass(frozen=True, slots=True)
class SlackPolicy(LookAheadPolicy):
    """Admits the most urgent waiting request as long as no active one would miss its deadline and the batch gains.

        slack = (time left until the deadline - predicted time of the remaining stages) / standalone latency

    Again and again, the waiting request of least slack is the candidate (line 2). It is discarded if it misses its
    deadline even when it joins now (lines 6 to 9), and the next one is tried. Scheduling stops if an active request
    would then miss its deadline (lines 11 to 13), or if the merged batch does not pay (lines 14 to 19). Else it joins.

    How the paper is read where it leaves a choice:

    * Time. `DDL - C` is the time left until the deadline. `pred_fut_iter_time` is the latency of one step of the active
      requests and the candidate. All remaining steps of everybody are taken to last that long. A request meets its
      deadline exactly if its slack is not negative, so the active request of least slack (line 3) misses its own if
      and only if any one does.
    * The remaining stages hold more than steps: a request waits for those that the decoder has before it (`Outlook`).
      Of four that end together the last is late by three.
    * "Risks causing a timeout for any current task": an active request that misses its deadline without the candidate,
      too, halts nobody, because it is lost either way. (Else one lost request would close the batch until it ends.)
    * Equation 1 as printed is throughput in turns over throughput merged, which grows as merging gets worse, while the
      text admits what is *above* the threshold. It is taken upside down, with the steps per second of the active
      batch, of the candidate alone and of both as the throughputs:

          benefit = new (current + candidate) / (current candidate) = (T_current + T_candidate) / T_new

      the time of one step each, in turns, over that of one merged step. Above 1 merging pays.
    * With an empty active queue there is no batch to compare with: a candidate in time always starts.
    * The algorithm knows no largest batch. With no free place it is not run, so nothing is discarded either until a
      place is free; then whatever is too late goes first, having the least slack.
    * Without a deadline the slack is infinite: such requests come last, by arrival, and never miss anything. Without a
      measured standalone latency the predicted steps alone stand for it.

    A candidate that is refused comes back at every step, with less slack each time, and nobody else is admitted before
    it: it starts when the batch has emptied at the latest, or is discarded.

    Complexity: within one kind (resolution, steps, standalone latency) the order of slack is that of deadlines, so only
    the first of each kind is looked at: O(kinds) for each request named, plus the active requests.

    Attributes:
        min_benefit: threshold of the benefit. The paper gives no number but says that it makes up for the predictor's
            error; below 1 it lets in what may lose by as much.
    """

    min_benefit: float = 1.0

    name: ClassVar[str] = "slack"

    def choose(self, outlook: Outlook, num_free: int, lately: Lately) -> Decision:
        """Run the algorithm."""
        admit: list[int] = []
        drop: list[tuple[int, str]] = []
        places = [0] * len(outlook.groups)
        while num_free:
            least: tuple[float, float, int] | None = None
            chosen, spare_s = -1, 0.0
            for kind, group in enumerate(outlook.groups):
                if places[kind] == len(group):
                    continue
                deadline_s, arrival_s, request_id, _ = group[places[kind]]
                left_s = deadline_s - outlook.now_s - outlook.needs_s(kind)
                score = (slack(left_s, outlook.kinds[kind].unit_s), arrival_s, request_id)
                if least is None or score < least:
                    least, chosen, spare_s = score, kind, left_s
            if least is None:
                break
            deadline_s, _, request_id, _ = outlook.groups[chosen][places[chosen]]
            if spare_s < 0:
                drop.append((request_id, TOO_LATE))
                places[chosen] += 1
                continue
            if outlook.makes_late(chosen):
                break
            if outlook.batch and outlook.step_s + outlook.alone_s(chosen) < self.min_benefit * outlook.merged_s(chosen):
                break
            admit.append(request_id)
            places[chosen] += 1
            num_free -= 1
            outlook.join(chosen, deadline_s)
        return Decision(tuple(admit), tuple(drop))


def slack(left_s: float, unit_s: float) -> float:
    """The slack of a request that may be late by `left_s`, in units of its standalone latency."""
    return left_s / unit_s if unit_s > 0 else math.copysign(math.inf, left_s)
