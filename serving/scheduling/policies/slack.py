"""The scheduler of PatchedServe: Algorithm 1 of section 6.2, on slack scores and predicted step latencies."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ....data.resolution import Resolution
from ...core.request_state import RequestView
from .base import Decision, EndPredictor, StepLatencyPredictor, free_places, require_predictor
from .waiting import as_queue

TOO_LATE = "it could not meet its deadline even if it started at once"


@dataclass(frozen=True, slots=True)
class SlackPolicy:
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
    * The remaining stages hold more than steps: what requests of the resolution have lately taken after their last step
      (`EndPredictor`), which holds the queue for the decoder. Until one has ended, what the standalone latency has
      beyond the steps alone stands for it; that holds the preparation, too, which errs on the safe side.
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
    requires_one_resolution: ClassVar[bool] = False
    requires_predictor: ClassVar[bool] = True

    def decide(
        self,
        now_s: float,
        waiting: Sequence[RequestView],
        active: Sequence[RequestView],
        max_batch_size: int,
        predictor: StepLatencyPredictor | None = None,
    ) -> Decision:
        """See `Policy.decide`. Raises UsageError without a predictor."""
        num_free = free_places(active, max_batch_size)
        predict = require_predictor(self, predictor).step_latency_s
        if not num_free or not waiting:
            return Decision()

        active = tuple(active)  # the simulator makes views only when they are asked for
        groups = as_queue(waiting).groups
        firsts = [group[0][3] for group in groups]
        alone_s = {view.resolution: predict((view.resolution,)) for view in firsts}
        for view in active:
            if view.resolution not in alone_s and view.deadline_s is not None:
                alone_s[view.resolution] = predict((view.resolution,))
        # For each kind: steps, time beyond the steps, what the slack is divided by.
        ends = predictor if isinstance(predictor, EndPredictor) else None
        kinds = [(view.resolution, view.num_steps, *_beyond_steps(view, alone_s, ends)) for view in firsts]
        # For each active request with a deadline: time for its steps until then, and how many they are.
        running = [
            (view.deadline_s - now_s - _beyond_steps(view, alone_s, ends)[0], view.num_steps - view.steps_done)
            for view in active
            if view.deadline_s is not None
        ]
        batch = tuple(sorted(view.resolution for view in active))
        current_s = predict(batch) if batch else 0.0

        admit: list[int] = []
        drop: list[tuple[int, str]] = []
        places = [0] * len(groups)
        new_s: dict[Resolution, float] = {}
        while num_free:
            least: tuple[float, float, int] | None = None
            chosen, spare_s = -1, 0.0
            for i, (resolution, num_steps, beyond_s, unit_s) in enumerate(kinds):
                if places[i] == len(groups[i]):
                    continue
                if resolution not in new_s:
                    new_s[resolution] = predict(tuple(sorted((*batch, resolution))))
                deadline_s, arrival_s, request_id, _ = groups[i][places[i]]
                left_s = deadline_s - now_s - beyond_s - num_steps * new_s[resolution]
                score = (left_s / unit_s if unit_s > 0 else math.copysign(math.inf, left_s), arrival_s, request_id)
                if least is None or score < least:
                    least, chosen, spare_s = score, i, left_s
            if least is None:
                break
            resolution, num_steps, beyond_s, _ = kinds[chosen]
            deadline_s, _, request_id, view = groups[chosen][places[chosen]]
            if spare_s < 0:
                drop.append((request_id, TOO_LATE))
                places[chosen] += 1
                continue
            step_s = new_s[resolution]
            if any(steps * current_s <= left_s < steps * step_s for left_s, steps in running):
                break
            if batch and current_s + alone_s[resolution] < self.min_benefit * step_s:
                break
            admit.append(request_id)
            places[chosen] += 1
            num_free -= 1
            if view.deadline_s is not None:
                running.append((deadline_s - now_s - beyond_s, num_steps))
            batch = tuple(sorted((*batch, resolution)))
            current_s = step_s
            new_s.clear()
        return Decision(tuple(admit), tuple(drop))


def _beyond_steps(
    view: RequestView, alone_s: dict[Resolution, float], ends: EndPredictor | None
) -> tuple[float, float]:
    """Return the time that a request takes beyond its steps, and its standalone latency."""
    steps_s = view.num_steps * alone_s[view.resolution]
    unit_s = steps_s if view.standalone_s is None else view.standalone_s
    after_s = None if ends is None else ends.after_steps_s(view.resolution)
    return max(0.0, unit_s - steps_s) if after_s is None else after_s, unit_s
