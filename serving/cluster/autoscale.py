"""How many replicas a load needs. No torch, no Ray.

Ray pickles this module by value into its controller.
"""

import math
from typing import Any

from ...data.errors import UsageError


def replicas_needed(
    pending: float, rate: float | None, target_s: float, *, least: int = 1, most: int = 1, now: int = 1
) -> int:
    """Replicas that do what is pending within a time, between `least` and `most`.

    Args:
        pending: pixel steps to do.
        rate: pixel steps per second of one replica; None where that is not known yet: then as many as there are `now`.
        target_s: seconds within which it is to be done.

    Raises:
        UsageError: a bound or the time is out of its range.
    """
    if not 1 <= least <= most:
        raise UsageError(f"replicas go from {least} to {most}, but it must be from 1 on, and not fall")
    if not 0 < target_s < math.inf:
        raise UsageError(f"the time for what is pending is {target_s:g} s, but it must be more than 0 and finite")
    wanted = now if not rate else math.ceil(pending / (rate * target_s))
    return min(max(wanted, least), most)


class ByPixelSteps:
    """Ray's autoscaling policy.

    Args:
        target_s: see `replicas_needed`.
    """

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas for Ray's `AutoscalingContext`; nothing is to be remembered."""
        metrics = context.aggregated_metrics or {}
        rates = [rate for rate in metrics.get("rate", {}).values() if rate > 0]
        wanted = replicas_needed(
            sum(metrics.get("pixel_steps", {}).values()),
            sum(rates) / len(rates) if rates else None,
            self._target_s,
            least=context.capacity_adjusted_min_replicas,
            most=context.capacity_adjusted_max_replicas,
            now=context.target_num_replicas,
        )
        return wanted, {}
