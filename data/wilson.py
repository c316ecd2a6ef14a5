"""Wilson's interval of a share. No torch."""

import math

from .confidence import Z95


def wilson_interval(num_met: float, num: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson, 1927), which stays within 0 and 1 and is no point at their ends.

    Args:
        num_met: how many of them count; a half where one counts half.
        num: how many independent ones there are.

    Raises:
        ValueError: there is nothing to take a share of.
    """
    if num < 1 or not 0 <= num_met <= num:
        raise ValueError(f"{num_met:g} of {num} is no share")
    share, z2 = num_met / num, Z95 * Z95
    centre = (share + z2 / (2 * num)) / (1 + z2 / num)
    half = Z95 / (1 + z2 / num) * math.sqrt(share * (1 - share) / num + z2 / (4 * num * num))
    # At the ends a bound is the share itself, which rounding would miss.
    low = 0.0 if num_met == 0 else min(centre - half, share)
    return low, 1.0 if num_met == num else max(centre + half, share)
