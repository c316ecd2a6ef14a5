"""Counts of failures that do not end a run, and of those in a row that do."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ...data.errors import RunError

MAX_FAILURES = 8
"""Number of consecutive failures of one stage after which a service considers its engine broken. A persistent error,
such as one of CUDA, fails every try, and each failure is an error for a client. That this many requests in a row fail
for reasons of their own is possible but rare.
"""
_MEMORY_ERRORS = ("out of memory", "can't allocate memory", "not enough memory")
"""Parts of messages of torch's errors about memory, of which only some have a class of their own."""
_RETRY_AFTER = 500


@dataclass(slots=True)
class Failures:
    """Number of failures, and the reason of the first one. Its size does not grow with the number."""

    count: int = 0
    first: str | None = None

    def note(self, reason: str) -> None:
        """Count one more failure."""
        self.count += 1
        self.first = self.first or reason


class MemoryBound:
    """Work from which on batches have not fitted into memory, so that these are divided before they fail again.

    Memory that other processes have taken may be free later: after `_RETRY_AFTER` divided batches one is tried whole.
    """

    def __init__(self) -> None:
        self._failed_from, self._num_divided = math.inf, 0

    def note(self, error: Exception, work: float) -> None:
        """Record that a batch of this work has failed; only a lack of memory counts."""
        is_memory = isinstance(error, MemoryError) or any(sign in str(error).lower() for sign in _MEMORY_ERRORS)
        if is_memory:
            self._failed_from, self._num_divided = min(self._failed_from, work), 0

    def excludes(self, work: float) -> bool:
        """Return whether a batch of this work is to be divided."""
        if work < self._failed_from:
            return False
        self._num_divided += 1
        if self._num_divided > _RETRY_AFTER:
            self._failed_from, self._num_divided = math.inf, 0
        return work >= self._failed_from


class FailureStreaks:
    """Counts the consecutive failures of each stage.

    Args:
        max_failures: number of failures in a row that are an error of the run; None: the run continues.
        on_error: called after `error` was set.

    Attributes:
        error: error of a stage in which everything fails; None if there is none.
    """

    def __init__(self, max_failures: int | None, on_error: Callable[[], None]) -> None:
        self._max_failures, self._on_error = max_failures, on_error
        self._in_a_row: Counter[str] = Counter()
        self.error: RunError | None = None

    def count(self, stage: str, failure: str | None) -> None:
        """Record a try of a stage; a success, with `failure` None, resets its count.

        Only one thread at a time may call this for a stage.
        """
        self._in_a_row[stage] = num_failed = 0 if failure is None else self._in_a_row[stage] + 1
        if num_failed == self._max_failures:
            self.error = RunError(f"{num_failed} tries in a row have failed, the last one with {failure}")
            self._on_error()
