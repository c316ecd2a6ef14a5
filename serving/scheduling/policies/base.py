"""What a policy is: which waiting requests join the denoise batch now, which are dropped, and which keep waiting."""

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
    """What a policy decided; a request named in neither field keeps waiting.

    Attributes:
        admit: ids of waiting requests that join the active queue, in the order in which they join.
        drop: `(id, reason)` of waiting requests that are discarded; the reason is shown to the user.
    """

    admit: tuple[int, ...] = ()
    drop: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Lately:
    """How requests with a deadline have fared lately.

    Attributes:
        in_time: share of them that met it, from 0 to 1.
        behind: resolutions of which clearly fewer did.
        count: of how many it is the share.
    """

    in_time: float = 1.0
    behind: frozenset[Resolution] = frozenset()
    count: float = 100.0

    def in_time_with(self, late: int) -> float:
        """The same share if so many more had ended late."""
        return self.in_time * self.count / (self.count + late)


ALL_IN_TIME = Lately()


class StepLatencyPredictor(Protocol):
    """Says how long one denoising step of a batch takes (PatchedServe section 6, "Schedule Predictor")."""

    def step_latency_s(self, active: Sequence[Resolution | Work]) -> float:
        """Seconds of one step over each work in `active` (with repeats, in any order): a whole image of a resolution,
        or a part of one. Who knows whole images only raises UsageError for a part.
        """
        ...


@runtime_checkable
class LearningPredictor(StepLatencyPredictor, Protocol):
    """A predictor that is told how long each step really took, and may correct itself."""

    def observe(
        self, active: Sequence[Resolution | Work], measured_s: float, *, is_first: bool, between_s: float
    ) -> None:
        """Take note that one step over `active` took `measured_s` seconds, whether it was the first of this batch, and
        how long its requests had waited for it since the step before; called after every step, in order.
        """
        ...


@runtime_checkable
class EndPredictor(Protocol):
    """Knows from the requests that have ended how long the decoder, which takes one at a time, has for each: it is
    decoded and saved. What a request waits for the decoder is another matter, which depends on who is ahead of it.
    """

    def after_steps_s(self, resolution: Resolution) -> float | None:
        """Seconds that the decoder has for a request of this resolution; None if none has ended yet."""
        ...

    def observe_end(self, resolution: Resolution, after_s: float) -> None:
        """Take note that the decoder had this long for a request, from when both were ready."""
        ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a policy decides from.

    Attributes:
        now_s: the time, in seconds from the start of the trace, on the same clock as `arrival_s` and `deadline_s`.
        waiting: requests that have arrived and may join, in order of arrival (equal arrivals: by id). Whether they are
            prepared already is no concern of a policy.
        active: requests that were admitted and have not left, in the order in which they were.
        max_batch_size: largest number of active requests, at least 1 and never below `len(active)`.
        predictor: step latencies for policies that look ahead; the others ignore it.
        decoder_free_s: when the decoder will have done what it was given, on the clock of `now_s`; not after that if it
            has nothing to do; infinity if it is at work and its end is not known.
        lately: how requests have fared.
    """

    now_s: float
    waiting: Sequence[RequestView]
    active: Sequence[RequestView]
    max_batch_size: int
    predictor: StepLatencyPredictor | None = None
    decoder_free_s: float = 0.0
    lately: Lately = ALL_IN_TIME

    @property
    def num_free(self) -> int:
        """Number of requests that may still join. Raises ValueError: `max_batch_size` is out of its range."""
        if self.max_batch_size < 1:
            raise ValueError(f"max_batch_size is {self.max_batch_size}, but it must be at least 1")
        if len(self.active) > self.max_batch_size:
            raise ValueError(f"{len(self.active)} requests are active, but max_batch_size is {self.max_batch_size}")
        return self.max_batch_size - len(self.active)


class Policy(Protocol):
    """Decides before every denoising step. The engine and the simulator call the same objects.

    A policy is a pure function of the snapshot: it keeps no state between calls, reads no clock, draws no random
    number and changes nothing that it is given, so equal snapshots always give the same decision.

    Attributes:
        name: what the user calls it (`--policy`).
        requires_one_resolution: whether all active requests always have one resolution and one number of steps. They
            then also take their first step together.
        requires_predictor: whether `decide` needs a predictor; who runs the policy checks it at the start.
    """

    name: ClassVar[str]
    requires_one_resolution: ClassVar[bool]
    requires_predictor: ClassVar[bool]

    def decide(self, snapshot: Snapshot) -> Decision:
        """Choose who joins and who is dropped before the next step.

        Called whenever a step has ended, and when a request arrives while no step is being taken. It must admit
        somebody when nothing is active and not all of `waiting` are dropped; otherwise the engine would stand still.

        Returns:
            A decision that `check_decision` accepts: only waiting requests are named, each once, and no more are
            admitted than there is room for.
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


def tried_when_idle(decision: Decision, snapshot: Snapshot) -> Decision:
    """The decision of an idle engine; where it would drop everybody, it draws the last to be due, if that deadline is
    not over. What is predicted may be wrong, and only requests that are drawn set it right.
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
    """Raise RuntimeError if a decision breaks the contract of `Policy`, which is our fault and never the user's.

    While images are being decoded, a policy may admit nobody although nothing is active: it is asked again.
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
