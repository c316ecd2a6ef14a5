"""Progress of slow work in phases. No torch."""

from collections.abc import Callable

OnProgress = Callable[[str, int, int], None]
"""Called with a phase of the work, the number of its units that are done, and the number of all; 0 if unknown."""


def no_progress(what: str, done: int, total: int) -> None:
    """Discard the progress."""
