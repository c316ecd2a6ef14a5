"""The interval of a share (Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", 1927)."""

import math
from statistics import NormalDist

_Z95 = NormalDist().inv_cdf(0.975)


def wilson_interval(num_met: float, num: int) -> tuple[float, float]:
    """95 % interval of the share `num_met / num`: never outside of 0 to 1, and no point at their ends.

    Args:
        num_met: how many of `num`; not whole where some count by half, as ties of a win rate do.
        num: how many there are.

    Raises:
        ValueError: there is nothing to take a share of, or more of it than there is.
    """
    if num < 1 or not 0 <= num_met <= num:
        raise ValueError(f"{num_met} of {num} is no share; give 0 to NUM of NUM, NUM at least 1")
    share, z2 = num_met / num, _Z95**2
    centre = (share + z2 / (2 * num)) / (1 + z2 / num)
    half = _Z95 / (1 + z2 / num) * math.sqrt(share * (1 - share) / num + z2 / (4 * num**2))
    # At the ends the bound is the share itself; rounding would miss it.
    return max(0.0, min(centre - half, share)), min(1.0, max(centre + half, share))
