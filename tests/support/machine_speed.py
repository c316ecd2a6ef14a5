"""How much slower than the machine of the documentation this one is just now, where other tests run beside.

Time `reference_s` right before what is timed, several times, and compare the least of both: neither then gains by a
moment in which the other was held up.
"""

import time

_QUIET_S = 0.001
"""`reference_s` on a quiet core of that machine, an AMD EPYC, between other work."""


def reference_s() -> float:
    """Processor time of a fixed piece of Python."""
    start_s = time.process_time()
    _work()
    return time.process_time() - start_s


def slowness(least_reference_s: float) -> float:
    """How many times as long as on that machine things take; at least 1."""
    return max(1.0, least_reference_s / _QUIET_S)


def _work() -> int:
    """Dictionaries, objects and arithmetic, as in Python code of ours."""
    counts: dict[int, list[int]] = {}
    for number in range(6000):
        counts.setdefault(number * 7919 % 257, []).append(number)
    return sum(sorted(numbers, reverse=True)[0] for numbers in counts.values())
