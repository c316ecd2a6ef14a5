"""The scheduler of PatchedServe: Algorithm 1 of section 6.2, on slack scores and predicted step latencies."""

import math
from dataclasses import dataclass
from typing import ClassVar

from .base import Decision, RecentAttainment
from .outlook import LookAheadPolicy, Outlook

TOO_LATE = "it could not meet its deadline even if it started at once"


@dataclass(frozen=True, slots=True)
class SlackPolicy(LookAheadPolicy):
    """Admits the most urgent waiting request as long as no active one would miss its deadline and the batch gains.

        slack = (time left until the deadline - predicted time of the remaining stages) / standalone latency

    Repeatedly, the waiting request with the least slack becomes the candidate (line 2). It is discarded if it misses
    its deadline even when it joins now (lines 6 to 9), and the next one is tried. Scheduling stops if an active request
    would then miss its deadline (lines 11 to 13), or if the merged batch does not pay (lines 14 to 19). Otherwise the
    candidate joins.

    How we read the paper where it leaves a choice:

    * Time. `DDL - C` is the time left until the deadline. `pred_fut_iter_time` is the latency of one step of the active
      requests and the candidate. All remaining steps of all requests are assumed to last that long. A request meets its
      deadline exactly if its slack is not negative, so the active request with the least slack (line 3) misses its own
      deadline if and only if any active request does.
    * The remaining stages include more than steps: a request waits for those ahead of it in the decoder (`Outlook`).
      Of four requests that end together, the last is delayed by three decodings.
    * "Risks causing a timeout for any current task": an active request that misses its deadline even without the
      candidate blocks no other request, because it is lost either way. (Otherwise one lost request would close the
      batch until it ends.)
    * Equation 1 as printed is throughput in turns over throughput merged, which grows as merging gets worse, while the
      text admits values *above* the threshold. We use its reciprocal, with the steps per second of the active batch, of
      the candidate alone and of both as the throughputs:

          benefit = new (current + candidate) / (current candidate) = (T_current + T_candidate) / T_new

      the time of one step each, in turns, over that of one merged step. Merging pays above 1.
    * With an empty active queue there is no batch to compare with: a candidate in time always starts.
    * The algorithm has no largest batch. With no free place it does not run, so nothing is discarded either until a
      place is free; then the requests that are too late are discarded first, as they have the least slack.
    * Without a deadline the slack is infinite: such requests come last, in order of arrival, and are never late.
      Without a measured standalone latency, the predicted latency of the steps alone replaces it.

    A refused candidate is tried again at every step, with less slack each time, and no other request is admitted before
    it: it starts at the latest when the batch has emptied, or is discarded.

    Complexity: within one kind (resolution, steps, standalone latency) the order of slack is that of deadlines, so only
    the first request of each kind is considered: O(kinds) for each request named, plus the active requests.

    Attributes:
        min_benefit: threshold of the benefit. The paper gives no number but says that the threshold makes up for the
            predictor's error; below 1, requests are admitted although merging may lose by that much.
    """

    min_benefit: float = 1.0

    name: ClassVar[str] = "slack"

    def choose(self, outlook: Outlook, num_free: int, attainment: RecentAttainment) -> Decision:
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
                left_s = deadline_s - outlook.now_s - outlook.completion_s(kind)
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
    """Return the slack of a request with `left_s` seconds to spare, in units of its standalone latency."""
    return left_s / unit_s if unit_s > 0 else math.copysign(math.inf, left_s)
