"""Counts of failures that do not end a run, and of those in a row that do."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ...data.errors import RunError

MAX_FAILURES = 8
"""Number of consecutive failures of one stage after which a service considers its engine broken. A persistent error,
such as one of CUDA, fails every try, and each failure is an error for a client. That this many requests in a row fail
for reasons of their own is possible but rare.
"""


@dataclass(slots=True)
class Failures:
    """Number of failures, and the reason of the first one. Its size does not grow with the number."""

    count: int = 0
    first: str | None = None

    def note(self, reason: str) -> None:
        """Count one more failure."""
        self.count += 1
        self.first = self.first or reason


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
