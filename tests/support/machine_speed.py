"""Current slowness of this machine, which may run other tests, relative to the machine of the documentation.

Time `reference_s` right before the code under test, several times, and compare the minima of both, so that a moment in
which one of them was delayed does not favour the other.
"""

import time

_QUIET_S = 0.001
"""`reference_s` on a quiet core of that machine, an AMD EPYC, between other work."""


def reference_s() -> float:
    """Return the CPU time of a fixed piece of Python."""
    start_s = time.process_time()
    _work()
    return time.process_time() - start_s


def slowness(least_reference_s: float) -> float:
    """Return how many times as long as on that machine code takes; at least 1."""
    return max(1.0, least_reference_s / _QUIET_S)


def _work() -> int:
    """Use dictionaries, objects and arithmetic, as our own Python code does."""
    counts: dict[int, list[int]] = {}
    for number in range(6000):
        counts.setdefault(number * 7919 % 257, []).append(number)
    return sum(sorted(numbers, reverse=True)[0] for numbers in counts.values())
