"""Plans of which units of a masked pass read a record, and which compute all tokens (InstGenIE section 4.2). No torch.

Loads of a unit overlap the computation of the units before it. A unit that reuses its record computes less, but waits
if the link is slow. A unit that computes all tokens needs no load, unless the unit before it has computed only the
active ones.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...data.templates import LoadPlan


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """Times for one batch of a part of the model that reuses its record as a whole or not at all.

    Attributes:
        all_s: time to compute all tokens.
        active_s: time to compute the active tokens, with the record of the others loaded.
        load_s: time to load this record.
        return_s: time to load the unit's input for the other tokens, if it computes all tokens after a unit that did
            not; 0 if records hold outputs, infinite if they do not hold this input.
    """

    all_s: float
    active_s: float
    load_s: float
    return_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """Plan of a pass.

    Attributes:
        reuses: for each unit, whether it computes the active tokens only.
        latency_s: latency of the pass.
    """

    reuses: tuple[bool, ...]
    latency_s: float


class _State(NamedTuple):
    """A partial pass: the end of its loads, the end of its computations, and its decisions.

    `reuses` has one bit per unit, the last unit lowest.
    """

    load_s: float
    comp_s: float
    reuses: int


_START = _State(0.0, 0.0, 0)


def latency_of(units: Sequence[UnitTimes], reuses: Sequence[bool], *, is_ahead: bool = False) -> float:
    """Return the latency of a pass in which units with true `reuses` compute active tokens only.

    A pass starts with all tokens. Loads begin with the pass or, with `is_ahead`, in the previous pass, which has the
    same plan. In the latter case computations never wait for loads of the same pass, and the latency is the longer of
    the sum of loads and the sum of computations.
    """
    state = _START
    for unit, is_active in zip(units, reuses, strict=True):
        state = _after(state, unit, is_active=is_active, is_ahead=is_ahead)
    return max(state.load_s, state.comp_s) if is_ahead else state.comp_s


def optimal_plan(units: Sequence[UnitTimes], *, is_ahead: bool = False) -> ReusePlan:
    """Return the plan of least latency (`latency_of`), by dynamic programming over the ends of loads and computations.

    Among partial passes that reach a unit with the same tokens, one dominates another if both its loads and its
    computations end no later. A partial pass in which only one of the two ends earlier dominates nothing.
    """
    with_all, with_active = [_START], list[_State]()
    for unit in units:
        so_far = [*with_all, *with_active]
        with_all, with_active = (
            _needed(_after(state, unit, is_active=is_active, is_ahead=is_ahead) for state in so_far)
            for is_active in (False, True)
        )
    best = min((*with_all, *with_active), key=lambda state: max(state[:2]) if is_ahead else state.comp_s)
    reuses = _reuses(units, best)
    return ReusePlan(reuses, latency_of(units, reuses, is_ahead=is_ahead))


def paper_plan(units: Sequence[UnitTimes]) -> ReusePlan:
    """Algorithm 1 of the paper: each unit takes the choice that ends its own computation first.

    This is not optimal, because a load also delays the loads of later units.
    """
    state = _START
    for unit in units:
        reused, computed = (_after(state, unit, is_active=is_active) for is_active in (True, False))
        state = reused if reused.comp_s <= computed.comp_s else computed
    return ReusePlan(_reuses(units, state), state.comp_s)


def strawman_plan(units: Sequence[UnitTimes]) -> ReusePlan:
    """All units reuse; loads overlap computations."""
    reuses = (True,) * len(units)
    return ReusePlan(reuses, latency_of(units, reuses))


def plan_without_reuse(units: Sequence[UnitTimes]) -> ReusePlan:
    """No unit reuses."""
    reuses = (False,) * len(units)
    return ReusePlan(reuses, latency_of(units, reuses))


PLANS: Mapping[LoadPlan, Callable[[Sequence[UnitTimes]], ReusePlan]] = {
    "optimal": optimal_plan,
    "paper": paper_plan,
    "strawman": strawman_plan,
    "none": plan_without_reuse,
}


def _after(state: _State, unit: UnitTimes, *, is_active: bool, is_ahead: bool = False) -> _State:
    had_active, reuses = state.reuses & 1, state.reuses << 1 | is_active
    if not is_active and not had_active:
        return _State(state.load_s, state.comp_s + unit.all_s, reuses)
    load_s = state.load_s + (unit.load_s if is_active else unit.return_s)
    comp_s = (state.comp_s if is_ahead else max(state.comp_s, load_s)) + (unit.active_s if is_active else unit.all_s)
    return _State(load_s, comp_s, reuses)


def _needed(states: Iterable[_State]) -> list[_State]:
    """Return the states that no other state dominates."""
    kept: list[_State] = []
    for state in sorted(states):
        if not kept or state.comp_s < kept[-1].comp_s:
            kept.append(state)
    return kept


def _reuses(units: Sequence[UnitTimes], state: _State) -> tuple[bool, ...]:
    return tuple(bool(state.reuses >> place & 1) for place in reversed(range(len(units))))
