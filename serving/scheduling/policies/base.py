"""Interface of policies: which waiting requests join the batch now, which are dropped and which keep waiting."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from ....data.errors import UsageError
from ....data.resolution import Resolution
from ....data.work import Work
from ...core.request_state import RequestView
from .waiting import as_queue, by_deadline


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision of a policy. A request that neither field names keeps waiting.

    Attributes:
        admit: ids of waiting requests that join the active queue, in the order in which they join.
        drop: `(id, reason)` pairs of waiting requests that are discarded; the user sees the reason.
    """

    admit: tuple[int, ...] = ()
    drop: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class RecentAttainment:
    """Recent SLO attainment of requests with a deadline.

    Attributes:
        in_time: share of these requests that met their deadline, from 0 to 1.
        behind: resolutions whose share is clearly lower.
        count: number of requests, by weight, that the share is taken over.
    """

    in_time: float = 1.0
    behind: frozenset[Resolution] = frozenset()
    count: float = 100.0

    def in_time_with(self, late: int) -> float:
        """Return the share if `late` more requests had ended late."""
        return self.in_time * self.count / (self.count + late)


ALL_IN_TIME = RecentAttainment()


class StepLatencyPredictor(Protocol):
    """Predicts the latency of one denoising step of a batch (PatchedServe section 6, "Schedule Predictor")."""

    def step_latency_s(self, active: Sequence[Resolution | Work]) -> float:
        """Return the seconds of one step over all works in `active` (with repeats, in any order).

        A work is a whole image of a resolution, or a part of one. A predictor that knows only whole images raises
        UsageError for a part.
        """
        ...


@runtime_checkable
class LearningPredictor(StepLatencyPredictor, Protocol):
    """A predictor that receives the measured latency of each step and may correct itself."""

    def observe(
        self, active: Sequence[Resolution | Work], measured_s: float, *, is_first: bool, between_s: float
    ) -> None:
        """Record one measured step. Called after every step, in order.

        Args:
            active: works of the step.
            measured_s: seconds that it took.
            is_first: whether it was the first step of this batch.
            between_s: seconds that its requests had waited for it since the previous step.
        """
        ...


@runtime_checkable
class EndPredictor(Protocol):
    """Predicts, from requests that have ended, how long the decoder takes to decode and save one request.

    The decoder takes one request at a time. The time that a request waits for the decoder is not included: it depends
    on the requests ahead of it.
    """

    def after_steps_s(self, resolution: Resolution) -> float | None:
        """Return the seconds that the decoder takes for a request of this resolution; None if none has ended yet."""
        ...

    def observe_end(self, resolution: Resolution, after_s: float) -> None:
        """Record the seconds that the decoder took for a request, counted from when both were ready."""
        ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Inputs of a policy's decision.

    Attributes:
        now_s: current time in seconds from the start of the trace, on the same clock as `arrival_s` and `deadline_s`.
        waiting: requests that have arrived and may join, in order of arrival (equal arrivals: by id). They need not be
            prepared yet; policies ignore that.
        active: requests that were admitted and have not left, in the order of their admission.
        max_batch_size: largest number of active requests, at least 1 and never below `len(active)`.
        predictor: step latencies for policies that look ahead; the others ignore it.
        decoder_free_s: time at which the decoder will have finished its queue, on the clock of `now_s`; at most `now_s`
            if it is idle; infinity if it is busy and its end is not known.
        attainment: recent SLO attainment.
    """

    now_s: float
    waiting: Sequence[RequestView]
    active: Sequence[RequestView]
    max_batch_size: int
    predictor: StepLatencyPredictor | None = None
    decoder_free_s: float = 0.0
    attainment: RecentAttainment = ALL_IN_TIME

    @property
    def num_free(self) -> int:
        """Number of requests that may still join. Raises ValueError if `max_batch_size` is out of its range."""
        if self.max_batch_size < 1:
            raise ValueError(f"max_batch_size is {self.max_batch_size}, but it must be at least 1")
        if len(self.active) > self.max_batch_size:
            raise ValueError(f"{len(self.active)} requests are active, but max_batch_size is {self.max_batch_size}")
        return self.max_batch_size - len(self.active)


class Policy(Protocol):
    """Decides before every denoising step. The engine and the simulator call the same objects.

    A policy is a pure function of the snapshot: it keeps no state between calls, reads no clock, draws no random
    number and modifies none of its arguments, so equal snapshots always give the same decision.

    Attributes:
        name: name of the policy on the command line (`--policy`).
        requires_one_resolution: whether all active requests always have one resolution and one number of steps. They
            then also take their first step together.
        requires_predictor: whether `decide` needs a predictor; the scheduler checks this at the start.
    """

    name: ClassVar[str]
    requires_one_resolution: ClassVar[bool]
    requires_predictor: ClassVar[bool]

    def decide(self, snapshot: Snapshot) -> Decision:
        """Choose the requests that join and those that are dropped before the next step.

        Called whenever a step has ended, and when a request arrives while no step is running. It must admit at least
        one request when nothing is active and not all of `waiting` are dropped; otherwise the engine would stall.

        Returns:
            A decision that `check_decision` accepts: it names only waiting requests, each at most once, and admits at
            most `num_free` of them.
        """
        ...


def require_predictor(policy: Policy, predictor: StepLatencyPredictor | None) -> StepLatencyPredictor:
    """Return the predictor; raise UsageError if there is none."""
    if predictor is None:
        raise UsageError(
            f"policy {policy.name} looks ahead and needs step latencies, but none are given: name a predictor or a "
            "latency table, or choose a policy that needs none"
        )
    return predictor


def admit_one_when_idle(decision: Decision, snapshot: Snapshot) -> Decision:
    """Return the decision of an idle engine, which never drops all waiting requests on a prediction alone.

    If the policy would drop all of them, the one with the latest deadline is admitted, unless that deadline has passed.
    The prediction may be wrong, and only requests that are served correct it.
    """
    if decision.admit or len(decision.drop) < len(snapshot.waiting):
        return decision
    due_s, _, tried, _ = max(map(by_deadline, snapshot.waiting))
    if due_s <= snapshot.now_s:
        return decision
    return Decision((tried,), tuple(one for one in decision.drop if one[0] != tried))


def check_decision(
    decision: Decision, snapshot: Snapshot, *, requires_one_resolution: bool = False, is_decoding: bool = False
) -> None:
    """Raise RuntimeError if a decision breaks the contract of `Policy`, which is a bug in the policy, not a user error.

    While images are being decoded, a policy may admit no request although nothing is active: it is called again later.
    """
    waiting, active, max_batch_size = snapshot.waiting, snapshot.active, snapshot.max_batch_size
    dropped = [request_id for request_id, _ in decision.drop]
    named = [*decision.admit, *dropped]
    queue = as_queue(waiting)
    unknown = [request_id for request_id in named if queue.get(request_id) is None]
    if unknown:
        raise RuntimeError(f"policy named requests {unknown}, which are not waiting")
    if len(set(named)) < len(named):
        raise RuntimeError(f"policy named a request twice: admitted {list(decision.admit)}, dropped {dropped}")
    if len(active) + len(decision.admit) > max_batch_size:
        raise RuntimeError(
            f"policy admitted {len(decision.admit)} requests to {len(active)} active ones, "
            f"but max_batch_size is {max_batch_size}"
        )
    if waiting and not active and not is_decoding and not decision.admit and len(dropped) < len(waiting):
        raise RuntimeError(f"policy admitted none of {len(waiting)} waiting requests although nothing is active")
    if requires_one_resolution:
        joining = [view for request_id in decision.admit if (view := queue.get(request_id))]
        if len({(view.resolution, view.num_steps) for view in [*active, *joining]}) > 1:
            raise RuntimeError("policy mixed resolutions or numbers of steps, but it requires one of each")
