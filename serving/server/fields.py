"""The fields of a body, taken one by one: each is checked, and what is left is refused by name."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...data.adapters import Adapters, read_adapters, require_adapters
from ...data.checks import require_prompt, require_text
from ...data.errors import UsageError
from .errors import ApiError, invalid

LORA = "lora"
MAX_USER = 256
_ADAPTERS = (LORA, "loras", "adapter", "adapters")
NOT_HERE = {
    "complexity": "nothing is planned before an image is drawn; quality says how many steps it takes",
    "frame_count": "images are not animated",
    "frame_duration_ms": "images are not animated",
    "svg": "images are made of pixels: output_format is png, jpeg or webp",
    "markup": "a mask says what is edited",
}
"""OpenAI's fields that are refused, and why."""
_MAX_SHOWN = 60


def unsupported(name: str) -> ApiError | None:
    """The refusal of a field that is one of `NOT_HERE`, or a part of one as forms name it (`svg[model]`); else None."""
    field = name.partition("[")[0]
    if field not in NOT_HERE:
        return None
    return invalid(f"the field {field} is not supported: {NOT_HERE[field]}", field, code="unsupported_parameter")


def shown(value: object) -> str:
    """A value as an error repeats it: on one line, and short."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


class Fields:
    """Takes the fields of a body one by one; null is as good as none. What nobody took is unknown."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._left = dict(body)

    def has(self, name: str) -> bool:
        """Whether a field is given and not null."""
        return self._left.get(name) is not None

    def end(self) -> None:
        """Raise ApiError if a field is left."""
        for name, value in self._left.items():
            if (refusal := unsupported(name)) is not None:
                if value is None:
                    continue
                raise refusal
            told = f"the field {shown(name)} is unknown"
            if name == LORA:
                told += ": no adapters are served here; psctl serve --adapter NAME=PATH lets requests name them"
            elif name in _ADAPTERS:
                told += f": requests name their adapters in the field {LORA}"
            raise invalid(told, name[:MAX_USER], code="unknown_parameter")

    def required(self, name: str, *, most: int) -> str:
        """Text that must be there."""
        value = self.text(name, most=most)
        if value is None:
            raise invalid(f"{name} is missing", name, code="missing_required_parameter")
        return value

    def prompt(self, name: str, *, most: int) -> str:
        """Text that says what to draw."""
        value = self.required(name, most=most)
        try:
            require_prompt(name, value)
        except UsageError as error:
            raise invalid(str(error), name) from None
        return value

    def text(self, name: str, *, most: int) -> str | None:
        """Text of at most so many characters."""
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

    def whole(self, name: str, default: int, low: int, high: int) -> int:
        """A whole number in a range."""
        value = self._left.pop(name, None)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise invalid(f"{name} is {shown(value)}, but it must be a whole number from {low} to {high}", name)
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """A number in a range."""
        value = self._left.pop(name, None)
        if value is None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
            raise invalid(f"{name} is {shown(value)}, but it must be a number from {low:g} to {high:g}", name)
        return float(value)

    def seconds(self, name: str) -> float | None:
        """A number of seconds above 0."""
        return checked_seconds(self._left.pop(name, None), name)

    def word(self, name: str, default: str, allowed: Sequence[str]) -> str:
        """One of a few words."""
        value = self._left.pop(name, None)
        if value is None:
            return default
        if not isinstance(value, str) or value not in allowed:
            raise invalid(f"{name} is {shown(value)}, but it must be one of {', '.join(allowed)}", name)
        return value

    def adapters(self, name: str, served: Sequence[str]) -> Adapters:
        """Adapters that are served, see `read_adapters`."""
        value = self._left.pop(name, None)
        try:
            found = read_adapters("" if value is None else value)
            require_adapters(found, served)
        except UsageError as error:
            raise invalid(f"{name}: {error}", name) from None
        return found

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self._left.pop(name, None)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise invalid(f"{name} is {shown(value)}, but it must be true or false", name)
        return value


def checked_seconds(value: object, name: str) -> float | None:
    """A number of seconds above 0, or None as it is given. Raises ApiError: it is anything else."""
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e9:
        raise invalid(f"{name} is {shown(value)}, but it must be a number of seconds above 0", name)
    return float(value)
