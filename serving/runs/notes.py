"""Notes on the progress of a run, and warnings of possible inaccuracies: lines of text."""

from collections.abc import Callable

Notify = Callable[[str], None]
"""Function that is called with a line for the user."""


def ignore(text: str) -> None:
    """Discard a note or a warning."""
