"""Figures of result files: `figures: {name: {value, low, high, n}}`, which commands write and gates read. No torch."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from .errors import UsageError
from .statistics import Estimate

FIGURES_KEY = "figures"


def write_figures(content: dict[str, Any], figures: Mapping[str, Estimate], key: str = FIGURES_KEY) -> dict[str, Any]:
    """Add the figures to the content of a result file and return the content."""
    content[key] = {name: each.to_json() for name, each in figures.items()}
    return content


def read_figures(content: Mapping[str, Any], file: Path, key: str = FIGURES_KEY) -> dict[str, Estimate]:
    """Return the figures in the content of a result file.

    Args:
        content: content of the file.
        file: path of the file, for errors.
        key: key of the figures in the content.

    Raises:
        UsageError: the figures are missing or damaged.
    """
    entries = content.get(key)
    if not isinstance(entries, Mapping):
        raise UsageError(f"{file}: {key} must be a mapping of figures by name")
    found = {}
    for name, each in entries.items():
        try:
            found[name] = Estimate.from_json(each)
        except UsageError as error:
            raise UsageError(f"{file}: {name}: {error}") from error
    return found


def numbers_of(content: Mapping[str, Any], prefix: str = "") -> dict[str, Estimate]:
    """Return every number of nested mappings as an exact figure by its path: `per_resolution.128x128.latency_p95`."""
    found: dict[str, Estimate] = {}
    for key, value in content.items():
        if isinstance(value, Mapping):
            found |= numbers_of(value, f"{prefix}{key}.")
        elif is_number(value):
            found[prefix + key] = Estimate.exact(float(value))
    return found


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a JSON value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
