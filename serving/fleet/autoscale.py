"""Autoscaling: the number of replicas that a load needs. This module imports neither torch nor Ray.

Ray pickles this module by value into its controller.
"""

import math
from typing import Any

from ...data.errors import UsageError


def replicas_needed(
    pending: float, rate: float | None, target_s: float, *, least: int = 1, most: int = 1, now: int = 1
) -> int:
    """Return the number of replicas that clear the pending work within `target_s`, clamped to `least` and `most`.

    Args:
        pending: pixel steps to do.
        rate: pixel steps per second of one replica; None while it is unknown, which keeps the current number.
        target_s: seconds within which the pending work should be done.
        least, most: smallest and largest number of replicas.
        now: current number of replicas.

    Raises:
        UsageError: a bound or the time is out of its range.
    """
    if not 1 <= least <= most:
        raise UsageError(f"replicas go from {least} to {most}, but it must be from 1 on, and not fall")
    if not 0 < target_s < math.inf:
        raise UsageError(f"the time for what is pending is {target_s:g} s, but it must be more than 0 and finite")
    wanted = now if not rate else math.ceil(pending / (rate * target_s))
    return min(max(wanted, least), most)


class PixelStepsPolicy:
    """Autoscaling policy for Ray Serve, by pending pixel steps.

    Args:
        target_s: seconds within which the pending work should be done, as in `replicas_needed`.
    """

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas for Ray's `AutoscalingContext`, and an empty state."""
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
