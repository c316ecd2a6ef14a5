"""How much slower than the machine of the documentation this one is just now, where other tests run beside."""

import time

_QUIET_S = 0.001
"""Processor time of `_work` on a quiet core of that machine, an AMD EPYC, between other work."""


def slowness() -> float:
    """At least 1; time what it excuses right before or after, in processor time."""
    start_s = time.process_time()
    _work()
    return max(1.0, (time.process_time() - start_s) / _QUIET_S)


def _work() -> int:
    """Dictionaries, objects and arithmetic, as in Python code of ours."""
    counts: dict[int, list[int]] = {}
    for number in range(6000):
        counts.setdefault(number * 7919 % 257, []).append(number)
    return sum(sorted(numbers, reverse=True)[0] for numbers in counts.values())
