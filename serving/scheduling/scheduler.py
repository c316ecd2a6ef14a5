"""The scheduler: the state machine of requests. The engine drives it with real time, the simulator with virtual."""

import time
from bisect import insort
from collections.abc import Callable, Mapping, Sequence

from ...data.checks import require_counts
from ...data.requests import Request
from ...data.resolution import Resolution
from ...data.work import Work, resolution_of
from ..core.request_state import ActiveViews, RequestState, RequestView, Status
from .decoder_queue import DecoderQueue
from .ends import AttainmentTracker
from .fair_shares import FairShares
from .policies import (
    Decision,
    EndPredictor,
    LearningPredictor,
    Policy,
    Snapshot,
    StepLatencyPredictor,
    WaitingQueue,
    admit_one_when_idle,
    check_decision,
    require_predictor,
)
from .waiting_room import WaitingRoom

ONE_IN = 8
"""Beside other requests, those that yield get one place of the batch in this many, and at least one. They thus make
progress even if other requests are always present; a policy that looks ahead may still refuse them.
"""
_MOST_REFUSALS = 4
"""Number of owners in a decision none of whose requests the policy admits, after which it decides about all together:
the time that a decision takes must not grow with the number of owners.
"""


class Scheduler:
    """Holds every open request of one denoise loop and makes every transition between its stages.

        add -> waiting -> (policy) -> joining -> active -> decoding -> end
                            `-> dropped             `-> failed

    Active requests take their steps together, and each leaves the batch when its own last step is done. One request is
    prepared at a time: first those that the policy has admitted, as they hold a place in the batch (they are joining
    until they are prepared), then up to `max_prepared_ahead` waiting requests in order of arrival, so that policies
    which admit in that order find theirs ready. Only these, and one batch, hold tensors, however long the queue is.

    Requests that yield (`Request.yields`) are treated apart: they leave the batch, keeping the steps that they have
    taken, as soon as any other request waits, and the policy considers them only while none does. The batch then has
    few places for them (`ONE_IN`) unless they are alone.

    The policy considers only the most urgent waiting requests of each owner (`WaitingRoom`), so that `Request.priority`
    orders the requests of one owner and never those of different ones. While several owners have requests waiting, free
    places are offered to one owner at a time, by the work that each has received over its `Request.weight`
    (`FairShares`): the policy decides which of this owner's requests joins, if any. Places that all owners leave free
    so, and requests to drop, are decided for all owners together, as is everything by policies that require one
    resolution.

    The contract. The driver reports events, and the scheduler decides what follows:

    * One call at a time: the scheduler has no lock. It reads no clock, except to measure how long the policy takes;
      the driver passes the time in seconds, and times do not decrease.
    * `add`, `prepared` and `end` may be called at any time, also during a step. After each of them, and after `decide`,
      the driver calls `next_to_prepare`.
    * `decide` is called only between two steps. If `can_step` is true afterwards, the driver takes one step of all
      `active` requests and calls `stepped`, without another `decide` in between.
    * It modifies its own state and the states and records that it has made. No other component modifies these while
      they are open (except `image_path` and, for edits, `active_share` and `reused`). It keeps nothing of a request
      whose record is closed, once that request is no longer being prepared.
    * Only the constructor raises `UsageError`. Any other error is a defect of the policy or the driver; afterwards only
      `end_all` may be called.

    Args:
        policy: decides between steps which requests join the batch and which are dropped.
        predictor: step latencies, for policies that need them. If it can learn (`LearningPredictor`, `EndPredictor`),
            it receives the measured latency of every step, and the decoder's time for every request.
        max_batch_size: largest number of requests that are active or joining.
        max_prepared_ahead: largest number of waiting requests that are prepared or being prepared; None for twice
            `max_batch_size`. A request that is not prepared when it is admitted misses a step.
        on_decision: called after each decision with the seconds of real time that the policy took.

    Attributes:
        works: work of a step for each active request, sorted: its resolution, or a part of that for an edit.
        changed: resolutions of requests that have joined or left the batch since the last step.
        num_steps: number of steps taken.
        num_prepared, max_prepared: number of prepared requests that still have steps to take, now and at its peak.
        pixel_steps: remaining denoising work: pixels times remaining steps, summed over all requests.

    Raises:
        UsageError: a number is below 1, or the policy needs a predictor and none is given.
    """

    def __init__(
        self,
        policy: Policy,
        predictor: StepLatencyPredictor | None = None,
        *,
        max_batch_size: int = 16,
        max_prepared_ahead: int | None = None,
        on_decision: Callable[[float], None] | None = None,
    ) -> None:
        require_counts({"max batch size": max_batch_size, "requests prepared ahead": max_prepared_ahead})
        if policy.requires_predictor:
            require_predictor(policy, predictor)
        self.works: list[Resolution | Work] = []
        self.changed: set[Resolution] = set()
        self.num_steps = self.num_prepared = self.max_prepared = self.pixel_steps = 0
        self._policy = policy
        self._predictor = predictor
        self._learner = predictor if isinstance(predictor, LearningPredictor) else None
        self._max_batch_size = max_batch_size
        self._given_ahead, self._max_ahead = max_prepared_ahead, max_prepared_ahead or 2 * max_batch_size
        self._on_decision = on_decision
        self._open: dict[int, RequestState] = {}
        self._waiting, self._yielding = WaitingRoom(), WaitingRoom()
        self._shares = FairShares()
        self._joining: dict[int, RequestState] = {}
        # Joining requests that have been prepared since the last decision.
        self._ready: list[RequestState] = []
        self._active: list[RequestState] = []
        self._decoding = DecoderQueue(predictor if isinstance(predictor, EndPredictor) else None)
        self._attainment = AttainmentTracker()
        # Time at which the last step ended, if requests were left in the batch.
        self._left_s: float | None = None
        # Pixels of the active requests, and the value of `num_steps` at which the next of them leaves.
        self._batch_pixels = self._next_leave = 0
        self._preparing: RequestState | None = None
        self._has_news = False

    @property
    def max_batch_size(self) -> int:
        """Largest number of requests that are active or joining. It may be changed between steps; requests that are
        already active or joining stay.
        """
        return self._max_batch_size

    @max_batch_size.setter
    def max_batch_size(self, size: int) -> None:
        require_counts({"max batch size": size})
        self._max_batch_size, self._max_ahead = size, self._given_ahead or 2 * size
        self._has_news = True

    @property
    def active(self) -> Sequence[RequestState]:
        """Requests that take the next step, in the order in which they became active. Do not modify."""
        return self._active

    @property
    def num_waiting(self) -> int:
        """Number of requests that have arrived but are not active yet."""
        return len(self._waiting) + len(self._yielding) + len(self._joining)

    @property
    def is_idle(self) -> bool:
        """Whether no request is waiting, joining or active."""
        return not (self._waiting or self._yielding or self._joining or self._active)

    @property
    def can_step(self) -> bool:
        """Whether a step can be taken. A batch that must be of one resolution takes its first step together."""
        return bool(self._active) and not (self._joining and self._policy.requires_one_resolution)

    @property
    def is_due(self) -> bool:
        """Whether `decide` may change anything or a step can be taken; if not, the driver waits for the next event."""
        return self._has_news or self.can_step

    @property
    def batch(self) -> list[Resolution]:
        """Resolutions of the active requests, sorted."""
        return list(map(resolution_of, self.works))

    @property
    def views(self) -> Sequence[RequestView]:
        """Views, for policies and routers, of the requests that have steps to take: those in the batch or about to join
        it, then the waiting ones in order of arrival.
        """
        admitted = [*self._active, *self._joining.values()]
        return [*ActiveViews(admitted, self.num_steps), *self._waiting.views, *self._yielding.views]

    def add(self, request: Request, view: RequestView | None = None) -> RequestState:
        """Add a request that has arrived. Policies see `view`; None for a view of the request as it is.

        Raises:
            ValueError: an open request has this id.
        """
        if request.request_id in self._open:
            raise ValueError(f"request {request.request_id} is open already")
        state = RequestState.of(request, view or RequestView.of(request))
        self._open[request.request_id] = state
        self._room_of(state).add(request, state.view)
        self.pixel_steps += request.pixels_seen * state.num_iterations
        self._has_news = True
        return state

    def withdraw_waiting(self) -> list[Request]:
        """Remove and return all waiting requests; joining and active ones stay. Their records stay pending and are not
        kept.
        """
        states = [state for state in self._open.values() if state.stage == "waiting"]
        for state in states:
            del self._open[state.request.request_id]
            self._leave_stage(state)
        return [state.request for state in states]

    def next_to_prepare(self, now_s: float) -> RequestState | None:
        """Return the request to prepare from now on; None if one is being prepared already or none should be."""
        if self._preparing is not None:
            return None
        state = None
        if self._joining:
            state = next((joining for joining in self._joining.values() if not joining.is_prepared), None)
        if state is None:
            room = self._waiting if self._has_others else self._yielding
            request_id = room.next_ahead(self._max_ahead)
            if request_id is None:
                return None
            state = self._open[request_id]
        self._preparing = state
        state.record.prepare_start_s = now_s
        return state

    def prepared(
        self, request_id: int, now_s: float, *, num_iterations: int | None = None, failure: str | None = None
    ) -> RequestState | None:
        """Report that the request from `next_to_prepare` is prepared, or that its preparation failed.

        Args:
            request_id: id of the request.
            now_s: current time.
            num_iterations: number of steps that its sampler takes, if it differs from the number requested.
            failure: why the preparation failed, which ends the request as "failed"; None if it is prepared.

        Returns:
            The state of the request; None if it has ended meanwhile, so that the prepared tensors are not needed.
        """
        state = self._preparing
        assert state is not None, "this request is not being prepared"
        assert request_id == state.request.request_id, "this request is not being prepared"
        self._preparing = None
        self._has_news = True
        if self._open.get(request_id) is not state:  # another request may have its id by now
            return None
        state.record.prepare_end_s = now_s
        if failure is not None:
            return self.end(request_id, "failed", now_s, failure)
        if num_iterations is not None:
            self.pixel_steps += state.request.pixels_seen * (num_iterations - state.num_iterations)
            state.num_iterations = num_iterations
        state.is_prepared = True
        self.num_prepared += 1
        self.max_prepared = max(self.max_prepared, self.num_prepared)
        if state.stage == "joining":
            self._ready.append(state)
        return state

    def decide(self, now_s: float) -> Sequence[RequestState]:
        """Make the joining requests that are ready active, then ask the policy about the waiting requests, if any.

        Returns:
            The requests that the policy has dropped; their records are closed as "discarded".

        Raises:
            RuntimeError: the policy has broken its contract.
        """
        self._has_news = False
        for state in self._ready:
            del self._joining[state.request.request_id]
            self._activate(state, now_s)
        self._ready.clear()
        dropped: list[RequestState] = []
        if self._waiting:
            self._return_yielding()
            self._waiting.release_overdue(now_s)
            self._admit_in_turns(now_s)
        if self._waiting:
            dropped += self._ask_policy(self._waiting, now_s)
        if self._yielding and not self._waiting:
            self._yielding.release_overdue(now_s)
            dropped += self._ask_policy(self._yielding, now_s)
        return dropped

    def _admit_in_turns(self, now_s: float) -> None:
        """Offer the free places to one owner after the other, while several have requests waiting."""
        room, refused = self._waiting, set[str]()
        num_free = 0 if self._policy.requires_one_resolution else self._max_batch_size - self._num_admitted
        while num_free > 0 and len(refused) < _MOST_REFUSALS:
            owners = [owner for owner in room.owners if owner not in refused]
            if len(owners) < 2:
                break
            owner = min(owners, key=self._shares.start_of)
            # Requests to drop wait for the decision about all: an idle engine never drops every one of them.
            if admit := self._decision(room.queue_of(owner), now_s, self._max_batch_size).admit:
                self._admit(self._open[admit[0]], now_s)
                num_free -= 1
            else:
                refused.add(owner)

    def _ask_policy(self, room: WaitingRoom, now_s: float) -> Sequence[RequestState]:
        """Ask the policy about the requests in a waiting room and carry out its decision; return the dropped ones."""
        admitted = [*self._active, *self._joining.values()]
        max_batch_size = self._max_batch_size
        if room is self._yielding and (num_others := sum(not state.request.yields for state in admitted)):
            max_batch_size = min(max_batch_size, num_others + max(1, max_batch_size // ONE_IN))
        # If the limit has been lowered meanwhile, admitted requests stay.
        decision = self._decision(room.queue, now_s, max(max_batch_size, len(admitted)), is_last=True)
        for request_id in decision.admit:
            self._admit(self._open[request_id], now_s)
        dropped = [self._open[request_id] for request_id, _ in decision.drop]
        for request_id, reason in decision.drop:
            self.end(request_id, "discarded", now_s, reason)
        return dropped

    def _decision(self, queue: WaitingQueue, now_s: float, max_batch_size: int, *, is_last: bool = False) -> Decision:
        """Return the policy's decision about a queue; the last one before a step admits a request if all are idle."""
        policy, admitted = self._policy, [*self._active, *self._joining.values()] if self._joining else self._active
        views = ActiveViews(admitted, self.num_steps)
        start = time.perf_counter()
        snapshot = Snapshot(
            now_s, queue, views, max_batch_size, self._predictor, self._decoding.free_s(), self._attainment.attainment
        )
        decision = policy.decide(snapshot)
        if is_last and not admitted and not self._decoding:
            decision = admit_one_when_idle(decision, snapshot)
        if self._on_decision is not None:
            self._on_decision(time.perf_counter() - start)
        check_decision(
            decision,
            snapshot,
            requires_one_resolution=policy.requires_one_resolution,
            is_decoding=bool(self._decoding),
        )
        return decision

    def _admit(self, state: RequestState, now_s: float) -> None:
        """Give a waiting request a place in the batch."""
        request = state.request
        self._room_of(state).remove(request)
        if not request.yields:
            work = request.pixels_seen * state.num_iterations
            self._shares.serve(self._shares.add(request.owner, work, request.weight))
        if state.is_prepared:
            self._activate(state, now_s)
        else:
            state.stage = "joining"
            self._joining[request.request_id] = state

    def stepped(self, end_s: float, step_s: float, failures: Mapping[int, str] | None = None) -> Sequence[RequestState]:
        """Report that a step of all active requests has ended.

        Args:
            end_s: time at which it ended.
            step_s: seconds that it took.
            failures: reasons by id of the requests that failed in the step, which end as "failed"; the others have
                taken the step.

        Returns:
            The requests that have left the batch, in batch order: those that failed, and those that have taken their
            last step, which are decoding until the driver calls `end`.
        """
        self.num_steps += 1
        self.pixel_steps -= self._batch_pixels
        is_first = bool(self.changed)
        self.changed.clear()
        self._has_news = True
        # A failed step is repeated in parts, so its duration says nothing about other steps.
        if self._learner is not None and not failures:
            between_s = 0.0 if self._left_s is None else max(0.0, end_s - step_s - self._left_s)
            self._learner.observe(self.works, step_s, is_first=is_first, between_s=between_s)
        self._left_s = end_s
        if not failures and self.num_steps < self._next_leave:
            return ()
        failures = failures or {}
        left: list[RequestState] = []
        for state in tuple(self._active):
            request_id = state.request.request_id
            if request_id in failures:
                self.end(request_id, "failed", end_s, failures[request_id])
            elif self.num_steps == state.first_step + state.num_iterations:
                state.record.denoise_end_s = end_s
                self._leave_stage(state)
                state.stage = "decoding"
                self._decoding.put(state)
            else:
                continue
            left.append(state)
        return left

    def end(self, request_id: int, status: Status, now_s: float, reason: str | None = None) -> RequestState | None:
        """Close the record of a request in any stage; an active request can be ended only between two steps.

        Returns:
            The state of the request; None if no open request has this id.
        """
        state = self._open.pop(request_id, None)
        if state is None:
            return None
        state.record.close(status, now_s, reason)
        self._attainment.note(state.record)
        if state.stage != "decoding":
            self._leave_stage(state)
        else:
            self._decoding.end(state, now_s)
        self._has_news = True
        return state

    def end_all(self, status: Status, now_s: float, reason: str) -> list[RequestState]:
        """Close all open records, in whatever state an interrupt or an error has left the scheduler. This must be the
        last call.

        Returns:
            The states of the requests that were open.
        """
        states = list(self._open.values())
        self._open.clear()
        for state in states:
            state.record.close(status, now_s, reason)
        return states

    def _activate(self, state: RequestState, now_s: float) -> None:
        assert state.is_prepared, "a request without latents would stay in the batch for ever"
        state.stage = "active"
        if state.record.admitted_s is None:
            state.record.admitted_s = now_s
        state.first_step = self.num_steps
        last_step = self.num_steps + state.num_iterations
        self._next_leave = min(self._next_leave, last_step) if self._active else last_step
        self._active.append(state)
        self._batch_pixels += state.request.pixels_seen
        insort(self.works, state.view.work)
        self.changed.add(state.request.resolution)

    @property
    def _num_admitted(self) -> int:
        return len(self._active) + len(self._joining)

    @property
    def _has_others(self) -> bool:
        """Whether a request that does not yield has steps to take."""
        return bool(self._waiting) or any(
            not state.request.yields for state in (*self._active, *self._joining.values())
        )

    def _room_of(self, state: RequestState) -> WaitingRoom:
        return self._yielding if state.request.yields else self._waiting

    def _return_yielding(self) -> None:
        """Move all yielding requests back to waiting; they resume later where they stopped."""
        for state in [*self._active, *self._joining.values()]:
            if not state.request.yields:
                continue
            if state.stage == "active":
                self._leave_batch(state)
                state.return_to_waiting(self.num_steps)
            else:
                del self._joining[state.request.request_id]
                state.stage = "waiting"
            is_ahead = state.is_prepared or state is self._preparing
            self._yielding.add(state.request, state.view, is_ahead=is_ahead)

    def _leave_stage(self, state: RequestState) -> None:
        """Remove a request from its current stage, which is not decoding."""
        self.pixel_steps -= self._pixel_steps_of(state)
        self.num_prepared -= state.is_prepared
        if state.stage == "waiting":
            self._room_of(state).remove(state.request)
        elif state.stage == "joining":
            del self._joining[state.request.request_id]
            if state.is_prepared:
                self._ready.remove(state)
        else:
            self._leave_batch(state)

    def _leave_batch(self, state: RequestState) -> None:
        self._active.remove(state)
        if not self._active:
            self._left_s = None
        self.works.remove(state.view.work)
        self._batch_pixels -= state.request.pixels_seen
        self._next_leave = min((one.first_step + one.num_iterations for one in self._active), default=0)
        self.changed.add(state.request.resolution)

    def _pixel_steps_of(self, state: RequestState) -> int:
        steps_done = self.num_steps - state.first_step if state.stage == "active" else 0
        return state.request.pixels_seen * (state.num_iterations - steps_done)
