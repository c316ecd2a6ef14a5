"""Fields of a body: each is checked as it is read, and the fields left over are refused by name."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...data.adapters import Adapters, read_adapters, require_adapters
from ...data.checks import require_prompt, require_text
from ...data.errors import UsageError
from .errors import ApiError, invalid

LORA = "lora"
"""Field in which requests name adapters (LoRA)."""
MAX_USER = 256
_ADAPTERS = (LORA, "loras", "adapter", "adapters")
UNSUPPORTED_FIELDS = {
    "complexity": "nothing is planned before an image is drawn; quality says how many steps it takes",
    "frame_count": "images are not animated",
    "frame_duration_ms": "images are not animated",
    "svg": "images are made of pixels: output_format is png, jpeg or webp",
    "markup": "a mask says what is edited",
}
"""OpenAI's fields that are refused, with the reason."""
_MAX_SHOWN = 60


def unsupported(name: str) -> ApiError | None:
    """Return the error for an unsupported field of OpenAI, or for a part of one (`svg[model]` in forms); else None."""
    field = name.partition("[")[0]
    if field not in UNSUPPORTED_FIELDS:
        return None
    return invalid(
        f"the field {field} is not supported: {UNSUPPORTED_FIELDS[field]}", field, code="unsupported_parameter"
    )


def shown(value: object) -> str:
    """Return a value as error messages show it: on one line, and short."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


class Fields:
    """Reads the fields of a body one by one; null counts as missing. Fields that were not read are unknown.

    Methods raise ApiError (400) if the field that they read has another type or range.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._left = dict(body)

    def has(self, name: str) -> bool:
        """Return whether a field is given and not null."""
        return self._left.get(name) is not None

    def end(self) -> None:
        """Raise ApiError if a field is left."""
        for name, value in self._left.items():
            if (refusal := unsupported(name)) is not None:
                if value is None:
                    continue
                raise refusal
            message = f"the field {shown(name)} is unknown"
            if name == LORA:
                message += ": no adapters are served here; psctl serve --adapter NAME=PATH lets requests name them"
            elif name in _ADAPTERS:
                message += f": requests name their adapters in the field {LORA}"
            raise invalid(message, name[:MAX_USER], code="unknown_parameter")

    def required(self, name: str, *, most: int) -> str:
        """Read a text that must be given."""
        value = self.text(name, most=most)
        if value is None:
            raise invalid(f"{name} is missing", name, code="missing_required_parameter")
        return value

    def prompt(self, name: str, *, most: int) -> str:
        """Read a text that says what to draw, and may not be blank."""
        value = self.required(name, most=most)
        try:
            require_prompt(name, value)
        except UsageError as error:
            raise invalid(str(error), name) from None
        return value

    def text(self, name: str, *, most: int) -> str | None:
        """Read a text of at most `most` characters."""
        value = self._left.pop(name, None)
        if value is None:
            return None
        if not isinstance(value, str):
            raise invalid(f"{name} is {shown(value)}, but it must be a string", name)
        if len(value) > most:
            raise invalid(f"{name} has {len(value):,} characters, but it may have at most {most:,}", name)
        try:
            require_text(name, value)
        except UsageError as error:
            raise invalid(str(error), name) from None
        return value

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        """Read a whole number from `low` to `high`."""
        value = self._left.pop(name, None)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise invalid(f"{name} is {shown(value)}, but it must be a whole number from {low} to {high}", name)
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """Read a number from `low` to `high`."""
        value = self._left.pop(name, None)
        if value is None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
            raise invalid(f"{name} is {shown(value)}, but it must be a number from {low:g} to {high:g}", name)
        return float(value)

    def seconds(self, name: str) -> float | None:
        """Read a number of seconds above 0."""
        return checked_seconds(self._left.pop(name, None), name)

    def choice(self, name: str, default: str, allowed: Sequence[str]) -> str:
        """Read one of the `allowed` words."""
        value = self._left.pop(name, None)
        if value is None:
            return default
        if not isinstance(value, str) or value not in allowed:
            raise invalid(f"{name} is {shown(value)}, but it must be one of {', '.join(allowed)}", name)
        return value

    def adapters(self, name: str, served: Sequence[str]) -> Adapters:
        """Read adapters in the form of `read_adapters`, all of which must be served."""
        value = self._left.pop(name, None)
        try:
            found = read_adapters("" if value is None else value)
            require_adapters(found, served)
        except UsageError as error:
            raise invalid(f"{name}: {error}", name) from None
        return found

    def flag(self, name: str, default: bool = False) -> bool:
        """Read true or false."""
        value = self._left.pop(name, None)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise invalid(f"{name} is {shown(value)}, but it must be true or false", name)
        return value


def checked_seconds(value: object, name: str) -> float | None:
    """Return a number of seconds above 0, or None if that is given. Raises ApiError for any other value."""
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e9:
        raise invalid(f"{name} is {shown(value)}, but it must be a number of seconds above 0", name)
    return float(value)
