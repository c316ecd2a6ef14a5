"""A figure that gates look at, and how the numbers of a JSON object become figures."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with what is known about how sure it is.

    Attributes:
        name: of the metric.
        value: the number.
        low, high: 95 % interval; both equal to the value if it counts as exact, None if nothing tells how far another
            run may lie off.
        n: number of images, requests or runs behind it; None if the file does not say.
        source: the file.
    """

    name: str
    value: float
    low: float | None
    high: float | None
    n: int | None
    source: str

    @property
    def is_exact(self) -> bool:
        """Whether nothing is known of its spread."""
        return self.low == self.value == self.high


def plain_figures(content: Mapping[str, Any], file: Path, prefix: str = "") -> Iterator[Figure]:
    """Every number of an object by its path, as `per_resolution.128x128.latency_p95`; such numbers count as exact."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from plain_figures(value, file, f"{prefix}{key}.")
        elif is_number(value):
            yield Figure(prefix + key, float(value), float(value), float(value), None, str(file))


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether JSON holds a finite number here."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
