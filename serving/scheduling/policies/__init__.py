"""Policies (schedulers): pure functions that decide before each step who joins the batch. They import no torch."""

from ....data.errors import UsageError
from .base import (
    Decision,
    LearningPredictor,
    Policy,
    StepLatencyPredictor,
    check_decision,
    request_under,
    require_predictor,
)
from .bucketed import BucketedPolicy
from .distrifusion import DistriFusionFcfsPolicy, DistriFusionLatency
from .edf import EdfPolicy
from .fcfs import FcfsPolicy
from .nirvana import NirvanaPolicy
from .patched_fcfs import PatchedFcfsPolicy
from .slack import SlackPolicy
from .static import StaticPolicy
from .waiting import WaitingQueue

_POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (FcfsPolicy, StaticPolicy, BucketedPolicy, PatchedFcfsPolicy, EdfPolicy, NirvanaPolicy, SlackPolicy)
}
_SIMULATED: dict[str, type[Policy]] = {policy.name: policy for policy in (DistriFusionFcfsPolicy,)}
POLICY_NAMES: tuple[str, ...] = tuple(_POLICIES)
"""Policies that the engine runs; the simulator runs them, too."""
SIMULATED_POLICY_NAMES: tuple[str, ...] = (*_POLICIES, *_SIMULATED)
"""Policies that the simulator runs."""


def get_policy(name: str, *, is_simulated: bool = False) -> Policy:
    """The policy that the user calls `name`.

    Args:
        name: one of `POLICY_NAMES`, or of `SIMULATED_POLICY_NAMES` if
        is_simulated: it is for the simulator.

    Raises:
        UsageError: there is none of this name; the message lists all names.
    """
    known = _POLICIES | _SIMULATED if is_simulated else _POLICIES
    if name not in known:
        hint = " (that one only in `psctl simulate`)" if name in _SIMULATED else ""
        raise UsageError(f"policy is {name!r}{hint}, but it must be one of {', '.join(known)}")
    return known[name]()


__all__ = [
    "POLICY_NAMES",
    "SIMULATED_POLICY_NAMES",
    "Decision",
    "DistriFusionFcfsPolicy",
    "DistriFusionLatency",
    "LearningPredictor",
    "Policy",
    "StepLatencyPredictor",
    "WaitingQueue",
    "check_decision",
    "get_policy",
    "request_under",
    "require_predictor",
]
