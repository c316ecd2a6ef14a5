"""Which units of a masked pass read a record, and which compute all tokens while loads catch up (InstGenIE 4.2).

What a unit reads is loaded beside the computation of those before it. Reuse computes less, but waits where the link is
slow; computing all tokens needs no load, unless the unit before has left only the active ones. No torch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

PlanName = Literal["optimal", "paper", "strawman", "sequential", "none", "ideal"]


@dataclass(frozen=True, slots=True)
class Unit:
    """Times of a part of the model that reuses its record as a whole or not at all, for one batch.

    Attributes:
        all_s: computing all tokens.
        active_s: computing the active ones, with what was loaded of the others.
        load_s: loading that.
        return_s: loading the unit's input of the other tokens, where it computes all after a unit that did not; 0 where
            records hold outputs, infinite where they do not hold it.
    """

    all_s: float
    active_s: float
    load_s: float
    return_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What each unit of a pass does.

    Attributes:
        reuses: of each unit, whether it computes the active tokens only.
        latency_s: of the pass.
    """

    reuses: tuple[bool, ...]
    latency_s: float


class _State(NamedTuple):
    """A pass so far: when its loads end, when its computations do, what was decided (one bit each, the last lowest)."""

    load_s: float
    comp_s: float
    reuses: int


_START = _State(0.0, 0.0, 0)


def latency_of(units: Sequence[Unit], reuses: Sequence[bool], *, is_ahead: bool = False) -> float:
    """Seconds of a pass in which these units compute active tokens only. A pass starts with all tokens.

    Loads begin with the pass; with `is_ahead`, they begin in the pass before, which is the same. Then none waits for
    another, and a pass takes as long as the longer of both sums.
    """
    state = _START
    for unit, is_active in zip(units, reuses, strict=True):
        state = _after(state, unit, is_active=is_active, is_ahead=is_ahead)
    return max(state.load_s, state.comp_s) if is_ahead else state.comp_s


def optimal_plan(units: Sequence[Unit], *, is_ahead: bool = False) -> Plan:
    """The plan of least latency (see `latency_of`), by dynamic programming over when loads and computations end.

    Of the ways to get to a unit with the same tokens, one that has ended both its loads and its computations no later
    than another makes the other needless; one that ends only one of them earlier does not.
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
    return Plan(reuses, latency_of(units, reuses, is_ahead=is_ahead))


def paper_plan(units: Sequence[Unit]) -> Plan:
    """Algorithm 1 of the paper: each unit does what ends its own computation first. That is not optimal, as a load also
    delays those of later units.
    """
    state = _START
    for unit in units:
        reused, computed = (_after(state, unit, is_active=is_active) for is_active in (True, False))
        state = reused if reused.comp_s <= computed.comp_s else computed
    return Plan(_reuses(units, state), state.comp_s)


def strawman_plan(units: Sequence[Unit]) -> Plan:
    """All units reuse; loads run beside computations."""
    reuses = (True,) * len(units)
    return Plan(reuses, latency_of(units, reuses))


def sequential_plan(units: Sequence[Unit]) -> Plan:
    """All units reuse, and each waits for its own load, which starts when the unit before it is done."""
    return Plan((True,) * len(units), sum(unit.load_s + unit.active_s for unit in units))


def plan_without_reuse(units: Sequence[Unit]) -> Plan:
    """No unit reuses."""
    reuses = (False,) * len(units)
    return Plan(reuses, latency_of(units, reuses))


def ideal_plan(units: Sequence[Unit]) -> Plan:
    """What is fastest if loads take no time: no plan is faster."""
    reuses = tuple(unit.active_s <= unit.all_s for unit in units)
    return Plan(reuses, sum(min(unit.active_s, unit.all_s) for unit in units))


PLANS: Mapping[PlanName, Callable[[Sequence[Unit]], Plan]] = {
    "optimal": optimal_plan,
    "paper": paper_plan,
    "strawman": strawman_plan,
    "sequential": sequential_plan,
    "none": plan_without_reuse,
    "ideal": ideal_plan,
}


def _after(state: _State, unit: Unit, *, is_active: bool, is_ahead: bool = False) -> _State:
    had_active, reuses = state.reuses & 1, state.reuses << 1 | is_active
    if not is_active and not had_active:
        return _State(state.load_s, state.comp_s + unit.all_s, reuses)
    load_s = state.load_s + (unit.load_s if is_active else unit.return_s)
    comp_s = (state.comp_s if is_ahead else max(state.comp_s, load_s)) + (unit.active_s if is_active else unit.all_s)
    return _State(load_s, comp_s, reuses)


def _needed(states: Iterable[_State]) -> list[_State]:
    """Those of which none other has both times as early."""
    kept: list[_State] = []
    for state in sorted(states):
        if not kept or state.comp_s < kept[-1].comp_s:
            kept.append(state)
    return kept


def _reuses(units: Sequence[Unit], state: _State) -> tuple[bool, ...]:
    return tuple(bool(state.reuses >> place & 1) for place in reversed(range(len(units))))
