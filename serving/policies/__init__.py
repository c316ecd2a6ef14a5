"""Policies (schedulers): pure functions that decide before each step who joins the batch. They import no torch."""

from ...data.errors import UsageError
from .base import Decision, Policy, StepLatencyPredictor, check_decision
from .bucketed import BucketedPolicy
from .fcfs import FcfsPolicy
from .static import StaticPolicy

_POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (FcfsPolicy, StaticPolicy, BucketedPolicy)}
POLICY_NAMES: tuple[str, ...] = tuple(_POLICIES)


def get_policy(name: str) -> Policy:
    """The policy that the user calls `name`.

    Raises:
        UsageError: there is none of this name; the message lists all names.
    """
    if name not in _POLICIES:
        raise UsageError(f"policy is {name!r}, but it must be one of {', '.join(POLICY_NAMES)}")
    return _POLICIES[name]()


__all__ = ["POLICY_NAMES", "Decision", "Policy", "StepLatencyPredictor", "check_decision", "get_policy"]
