"""Policies (schedulers): pure functions that decide before each step which requests enter the batch. No torch."""

from ....data.errors import UsageError
from .base import (
    ALL_IN_TIME,
    Decision,
    EndPredictor,
    LearningPredictor,
    Policy,
    RecentAttainment,
    Snapshot,
    StepLatencyPredictor,
    admit_one_when_idle,
    check_decision,
    require_predictor,
)
from .dropping import ContinuousDropPolicy, EdfDropPolicy
from .fitting import EdfFittingPolicy, FairFittingPolicy
from .in_order import ContinuousPolicy, EdfPolicy, FcfsPolicy, StaticPolicy
from .slack import SlackPolicy
from .waiting import WaitingQueue

_POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        FcfsPolicy,
        StaticPolicy,
        ContinuousPolicy,
        ContinuousDropPolicy,
        EdfPolicy,
        EdfDropPolicy,
        SlackPolicy,
        EdfFittingPolicy,
        FairFittingPolicy,
    )
}
POLICY_NAMES: tuple[str, ...] = tuple(_POLICIES)


def get_policy(name: str) -> Policy:
    """Return the policy with this name, one of `POLICY_NAMES`.

    Raises:
        UsageError: no policy has this name; the message lists all names.
    """
    if name not in _POLICIES:
        raise UsageError(f"policy is {name!r}, but it must be one of {', '.join(_POLICIES)}")
    return _POLICIES[name]()


__all__ = [
    "ALL_IN_TIME",
    "POLICY_NAMES",
    "Decision",
    "EndPredictor",
    "LearningPredictor",
    "Policy",
    "RecentAttainment",
    "Snapshot",
    "StepLatencyPredictor",
    "WaitingQueue",
    "admit_one_when_idle",
    "check_decision",
    "get_policy",
    "require_predictor",
]
