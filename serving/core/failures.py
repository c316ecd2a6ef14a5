"""Count of failures that do not end a run."""

from dataclasses import dataclass


@dataclass(slots=True)
class Failures:
    """Number of failures, and the reason of the first one. Its size does not grow with the number."""

    count: int = 0
    first: str | None = None

    def note(self, reason: str) -> None:
        """Count one more failure."""
        self.count += 1
        self.first = self.first or reason
