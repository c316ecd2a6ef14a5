"""The scheduler of PatchedServe: Algorithm 1 of section 6.2, on slack scores and predicted step latencies."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar, NamedTuple

from ....data.resolution import Resolution
from ....data.work import Work
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
    * The remaining stages hold more than steps. The decoder takes one request at a time, in the order in which they end
      their steps: a request waits for those that it has been given already and for those of the batch that end
      before it or with it, each for as long as the decoder lately had for its resolution (`EndPredictor`). Of four that
      end together the last is late by three. Until one of the resolution has ended, what the standalone latency has
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
        decoder_free_s: float = 0.0,
    ) -> Decision:
        """See `Policy.decide`. Raises UsageError without a predictor."""
        num_free = free_places(active, max_batch_size)
        predict = require_predictor(self, predictor).step_latency_s
        if not num_free or not waiting:
            return Decision()

        active = tuple(active)  # the simulator makes views only when they are asked for
        groups = as_queue(waiting).groups
        firsts = [group[0][3] for group in groups]
        alone_s = {view.work: predict((view.work,)) for view in firsts}
        for view in active:
            if view.work not in alone_s and view.deadline_s is not None:
                alone_s[view.work] = predict((view.work,))
        ends = predictor if isinstance(predictor, EndPredictor) else None
        kinds = [_demand(view, alone_s, ends) for view in firsts]
        # The active requests in the order in which the decoder gets them.
        running = sorted((_run(view, now_s, alone_s, ends) for view in active), key=attrgetter("steps"))
        decoder_s = 0.0 if ends is None else max(0.0, decoder_free_s - now_s)
        batch = tuple(sorted(view.work for view in active))
        current_s = predict(batch) if batch else 0.0

        admit: list[int] = []
        drop: list[tuple[int, str]] = []
        places = [0] * len(groups)
        # Of the merged batch: its step by the candidate's resolution, and when a candidate of each kind would end.
        new_s: dict[Resolution | Work, float] = {}
        end_s: dict[int, float] = {}
        while num_free:
            least: tuple[float, float, int] | None = None
            chosen, spare_s = -1, 0.0
            for i, (work, steps, decode_s, beyond_s, unit_s) in enumerate(kinds):
                if places[i] == len(groups[i]):
                    continue
                if i not in end_s:
                    if work not in new_s:
                        new_s[work] = predict(tuple(sorted((*batch, work))))
                    ahead = [run for run in running if run.steps <= steps]
                    end_s[i] = _ends([*ahead, _Run(steps, decode_s)], new_s[work], decoder_s)[-1]
                deadline_s, arrival_s, request_id, _ = groups[i][places[i]]
                left_s = deadline_s - now_s - beyond_s - end_s[i]
                score = (left_s / unit_s if unit_s > 0 else math.copysign(math.inf, left_s), arrival_s, request_id)
                if least is None or score < least:
                    least, chosen, spare_s = score, i, left_s
            if least is None:
                break
            work, steps, decode_s, beyond_s, _ = kinds[chosen]
            deadline_s, _, request_id, _ = groups[chosen][places[chosen]]
            if spare_s < 0:
                drop.append((request_id, TOO_LATE))
                places[chosen] += 1
                continue
            step_s = new_s[work]
            place = bisect_right(running, steps, key=attrgetter("steps"))
            merged = [*running[:place], _Run(steps, decode_s, deadline_s - now_s - beyond_s), *running[place:]]
            later_s = _ends(merged, step_s, decoder_s)
            del later_s[place]
            before_s = _ends(running, current_s, decoder_s)
            if any(before <= run.by_s < later for run, before, later in zip(running, before_s, later_s, strict=True)):
                break
            if batch and current_s + alone_s[work] < self.min_benefit * step_s:
                break
            admit.append(request_id)
            places[chosen] += 1
            num_free -= 1
            running = merged
            batch = tuple(sorted((*batch, work)))
            current_s = step_s
            new_s.clear()
            end_s.clear()
        return Decision(tuple(admit), tuple(drop))


class _Demand(NamedTuple):
    """What a request of one kind takes: steps, seconds of the decoder and of what else is beyond the steps, and its
    standalone latency.
    """

    work: Resolution | Work
    steps: int
    decode_s: float
    beyond_s: float
    unit_s: float


class _Run(NamedTuple):
    """A request in the batch: steps left, seconds of the decoder, and from now until when the decoder must be done."""

    steps: int
    decode_s: float
    by_s: float = math.inf


def _demand(view: RequestView, alone_s: dict[Resolution | Work, float], ends: EndPredictor | None) -> _Demand:
    steps_s = view.num_steps * alone_s[view.work]
    unit_s = steps_s if view.standalone_s is None else view.standalone_s
    decode_s = None if ends is None else ends.after_steps_s(view.resolution)
    if decode_s is None:
        return _Demand(view.work, view.num_steps, 0.0, max(0.0, unit_s - steps_s), unit_s)
    return _Demand(view.work, view.num_steps, decode_s, 0.0, unit_s)


def _run(view: RequestView, now_s: float, alone_s: dict[Resolution | Work, float], ends: EndPredictor | None) -> _Run:
    left = view.num_steps - view.steps_done
    if view.deadline_s is None:
        return _Run(left, 0.0 if ends is None else ends.after_steps_s(view.resolution) or 0.0)
    demand = _demand(view, alone_s, ends)
    return _Run(left, demand.decode_s, view.deadline_s - now_s - demand.beyond_s)


def _ends(running: Sequence[_Run], step_s: float, free_s: float) -> list[float]:
    """Seconds from now until the decoder, which is free after `free_s`, is done with each of them, in their order."""
    ends_s = []
    for run in running:
        free_s = max(free_s, run.steps * step_s) + run.decode_s
        ends_s.append(free_s)
    return ends_s
