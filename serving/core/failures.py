"""Counts what goes wrong without ending anything."""

from dataclasses import dataclass


@dataclass(slots=True)
class Failures:
    """How often something has failed, and why the first time: never grows, however often it does."""

    count: int = 0
    first: str | None = None

    def note(self, reason: str) -> None:
        """Count one more."""
        self.count += 1
        self.first = self.first or reason
