"""Adapters (LoRA) that a request names, and their form in text and JSON. No torch."""

import re
from collections.abc import Sequence

from .errors import UsageError

Adapters = tuple[tuple[str, float], ...]
"""Names of adapters, each with the scale of its change of the model."""
MAX_SCALE, _MAX_ADAPTERS = 100.0, 16
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)


def check_adapters(adapters: Sequence[tuple[object, object]]) -> None:
    """Raise UsageError if a name is invalid or repeated, a scale is invalid, or there are too many adapters."""
    if len(adapters) > _MAX_ADAPTERS:
        raise UsageError(f"{len(adapters)} adapters are named, but a request may have at most {_MAX_ADAPTERS}")
    for name, scale in adapters:
        check_adapter_name(name)
        if not isinstance(scale, (int, float)) or isinstance(scale, bool) or not -MAX_SCALE <= scale <= MAX_SCALE:
            allowed = f"a number from {-MAX_SCALE:g} to {MAX_SCALE:g}"
            raise UsageError(f"the scale of adapter {name} is {_short(scale)}, but it must be {allowed}")
    names = [name for name, _ in adapters]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"adapter {twice} is named twice: name it once, with the sum of its scales")


def check_adapter_name(name: object, what: str = "adapter") -> None:
    """Raise UsageError if this is not a valid name of an adapter, or of something else that is named alike."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"{what} name {_short(name)} is not allowed: up to 64 letters, digits, '.', '_' and '-'")


def require_adapters(adapters: Adapters, known: Sequence[str]) -> None:
    """Raise UsageError if an adapter is not among those that are served."""
    for name, _ in adapters:
        if name not in known:
            served = f"there are {', '.join(known)}" if known else "none is served: see --adapter NAME=PATH"
            raise UsageError(f"adapter {name} is unknown; {served}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def read_adapters(value: object) -> Adapters:
    """Parse adapters from text `NAME[:SCALE][+NAME[:SCALE]]...`, such as `pixel:0.8+toy`, or from a list of mappings
    such as `{"name": "pixel", "scale": 0.8}`. The default scale is 1; without names, the model is unchanged.

    Raises UsageError as `check_adapters`, or if the value has neither form.
    """
    if isinstance(value, str):
        parts = [part.partition(":") for part in value.split("+")] if value else []
        found = tuple((name, _number_of(scale) if colon else 1.0) for name, colon, scale in parts)
    elif isinstance(value, list) and all(isinstance(part, dict) and part.keys() <= {"name", "scale"} for part in value):
        found = tuple((part.get("name"), part.get("scale", 1.0)) for part in value)
    else:
        raise UsageError(
            f"{_short(value)} names no adapters: give NAME[:SCALE], joined by +, or a list of name and scale"
        )
    check_adapters(found)
    return found  # type: ignore[return-value]  scales are numbers, as has been checked


def _number_of(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def adapters_text(adapters: Adapters) -> str | None:
    """Return the text that `read_adapters` parses to these adapters; None without adapters."""
    return "+".join(f"{name}:{scale}" for name, scale in adapters) or None
