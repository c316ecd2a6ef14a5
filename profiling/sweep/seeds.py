"""What the seeds of a sweep tell of how sure its figures are. No torch.

Requests of one run queue behind each other, so that they are late together: as evidence they count less than their
number. Runs with different seeds are independent. From three seeds on intervals are therefore Student's over the seeds;
one or two leave nothing but Wilson's over the requests, which is too narrow and labelled as what it is.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from ...data.statistics import student_interval, wilson_interval

MIN_SEEDS = 3


class ShareInterval(NamedTuple):
    """95 % interval of a share, and over what: `seeds`, or `requests` as if they were independent."""

    low: float
    high: float
    over: Literal["seeds", "requests"]


def share_interval(met: Sequence[int], num: Sequence[int]) -> ShareInterval:
    """95 % interval of sum(met) / sum(num).

    Over seeds it is Student's of the ratio of two sums, linearised (Cochran, Sampling Techniques, 1977, section 6.3):
    for runs of equal length that of the mean of their shares. It is never narrower than Wilson's over the requests,
    which are at best independent (where all seeds agree, as at 100 %, Student's would be a point), and stays within 0
    and 1.

    Args:
        met: requests in time, by seed.
        num: all requests, by seed.

    Raises:
        ValueError: there are no requests.
    """
    total = sum(num)
    low, high = wilson_interval(sum(met), total)
    if len(met) < MIN_SEEDS:
        return ShareInterval(low, high, "requests")
    share, mean_num = sum(met) / total, total / len(num)
    interval = student_interval([share + (own - share * count) / mean_num for own, count in zip(met, num, strict=True)])
    assert interval is not None
    return ShareInterval(max(0.0, min(low, interval[0])), min(1.0, max(high, interval[1])), "seeds")


def positive_interval(value: float, by_seed: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of a rate or ratio over seeds: Student's of the logarithms, so that it stays above 0.

    The figure of all seeds together is not the mean of those of the seeds; the interval is widened to hold it.

    Args:
        value: of all seeds together.
        by_seed: of every seed, above 0.

    Returns:
        The interval; None with fewer than `MIN_SEEDS`.
    """
    if len(by_seed) < MIN_SEEDS:
        return None
    interval = student_interval([math.log(each) for each in by_seed])
    assert interval is not None
    return min(value, math.exp(interval[0])), max(value, math.exp(interval[1]))
