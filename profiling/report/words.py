"""Figures as people read them; a dash where there is none."""

from collections.abc import Mapping
from typing import Any

DASH = "-"


def number(value: float | None, unit: str = "") -> str:
    """Three digits, without an exponent for large values, and a unit."""
    if value is None:
        return DASH
    return (f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}") + f" {unit}".rstrip()


def share(value: float | None, digits: int = 1) -> str:
    """A share in per cent."""
    return DASH if value is None else f"{value:.{digits}%}"


def worst(shares: Mapping[str, float]) -> str:
    """The least of several shares in per cent, and whose it is; a dash where there are not several."""
    if len(shares) < 2:
        return DASH
    name = min(shares, key=shares.__getitem__)
    return f"{share(shares[name])} ({name})"


def seconds(value: float | None) -> str:
    """A time, in milliseconds below one second."""
    if value is None:
        return DASH
    return f"{value * 1e3:.0f} ms" if 0 < value < 1 else f"{value:.2f} s"


def plain(value: Any) -> str:
    """Any value of a JSON object on one line."""
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
    """A figure of a summary with the unit that its name tells; other values as they are."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if key.endswith("_qps"):
            return number(value, "/s")
        if key.endswith("_rate"):
            return share(value)
        if key.startswith(("duration", "latency_", "queueing_")):
            return seconds(value)
    return plain(value)
