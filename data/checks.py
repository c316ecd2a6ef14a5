"""Checks that many settings share."""

from collections.abc import Mapping

from .errors import UsageError


def require_counts(values: Mapping[str, int | None]) -> None:
    """Check numbers of things, which are given by what messages call them; None stands for no limit.

    Raises UsageError: one is below 1; the first is named.
    """
    for name, value in values.items():
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}, but it must be at least 1")
