"""Formatting of figures; a dash stands for a missing one."""

from collections.abc import Mapping
from typing import Any

DASH = "-"


def number(value: float | None, unit: str = "") -> str:
    """Format a number with three digits, without an exponent for large values, and a unit."""
    if value is None:
        return DASH
    return (f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}") + f" {unit}".rstrip()


def share(value: float | None, digits: int = 1) -> str:
    """Format a share in per cent."""
    return DASH if value is None else f"{value:.{digits}%}"


def worst(shares: Mapping[str, float]) -> str:
    """Format the smallest of several shares in per cent, with its name; a dash if there are fewer than two."""
    if len(shares) < 2:
        return DASH
    name = min(shares, key=shares.__getitem__)
    return f"{share(shares[name])} ({name})"


def seconds(value: float | None) -> str:
    """Format a time in seconds, or in milliseconds below one second."""
    if value is None:
        return DASH
    return f"{value * 1e3:.0f} ms" if 0 < value < 1 else f"{value:.2f} s"


def plain(value: Any) -> str:
    """Format any JSON value on one line."""
    if value is None:
        return DASH
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {plain(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value))
    return str(value)


def figure(key: str, value: Any) -> str:
    """Format a figure of a summary with the unit that its name implies; other values as they are."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if key.endswith("_qps"):
            return number(value, "/s")
        if key.endswith("_rate"):
            return share(value)
        if key.startswith(("duration", "latency_", "queueing_")):
            return seconds(value)
    return plain(value)
