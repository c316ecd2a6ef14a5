"""Checks shared by many settings."""

import codecs
from collections.abc import Mapping
from typing import TextIO

from .errors import UsageError


def require_counts(values: Mapping[str, int | None]) -> None:
    """Check counts, keyed by their names in messages; None stands for no limit.

    Raises UsageError if a count is below 1, naming the first such count.
    """
    for name, value in values.items():
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}, but it must be at least 1")


def is_text(value: str) -> bool:
    """Return whether a text can be stored and sent: it has no NUL, and no half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value


def writes_all_text(file: TextIO) -> bool:
    """Return whether a file's encoding has every character, as UTF-8 does, unlike the code pages of some terminals."""
    return codecs.lookup(file.encoding or "utf-8").name == "utf-8"


def require_prompt(name: str, value: str) -> None:
    """Raise UsageError if a prompt is blank, which is usually a mistake; `name` is as in `require_text`."""
    if not value.strip():
        raise UsageError(f"{name} is {value!r}, but it must say what to draw")


def require_text(name: str, value: str) -> None:
    """Raise UsageError unless `is_text`; the message calls the value `name`."""
    if not is_text(value):
        raise UsageError(f"{name} holds a character that is not text (NUL or half of a surrogate pair)")
