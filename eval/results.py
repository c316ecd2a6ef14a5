"""What a metric gives: a value with its 95 % interval, and everything that somebody needs who wants to compare it.

No torch here: gates and reports read results without loading a model.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self, get_args

from ..data.errors import UsageError

Direction = Literal["higher", "lower"]


@dataclass(frozen=True, slots=True)
class MetricResult:
    """One metric of one set of images.

    Attributes:
        name: such as `fid`, or with the judge, because figures of two judges cannot be compared: `clip[emoji-clip]`.
        value: the metric.
        low, high: 95 % interval; None where the sample is too small to tell (a single image).
        n: number of images or pairs behind it.
        unit: "dB" or "" for none.
        direction: whether a higher or a lower value is better.
        seed: of the interval's random draws.
        details: what else tells how it was made: checksums of weights, resolutions, counts.

    Raises:
        UsageError: a field is not of its kind; results are read from files that people edit.
    """

    name: str
    value: float
    low: float | None
    high: float | None
    n: int
    unit: str = ""
    direction: Direction = "lower"
    seed: int = 0
    details: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise UsageError(f"metric name is {self.name!r}, but it must be text")
        for name, value in (("value", self.value), ("low", self.low), ("high", self.high)):
            if value is None and name != "value":
                continue
            if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
                raise UsageError(f"{self.name}: {name} is {value!r}, but it must be a finite number")
        if (self.low is None) != (self.high is None):
            raise UsageError(f"{self.name}: the interval is {self.low!r} to {self.high!r}; give both ends or none")
        if self.low is not None and self.high is not None and not self.low <= self.high:
            raise UsageError(f"{self.name}: the interval {self.low:g} to {self.high:g} has its ends exchanged")
        if not isinstance(self.n, int) or isinstance(self.n, bool) or self.n < 1:
            raise UsageError(f"{self.name}: n is {self.n!r}, but it must be a whole number of at least 1")
        if self.direction not in get_args(Direction):
            raise UsageError(f"{self.name}: direction is {self.direction!r}, but it must be 'higher' or 'lower'")

    def to_json(self) -> dict[str, Any]:
        """A mapping that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """The result that `to_json` made `content` of.

        Raises:
            UsageError: it is no such mapping, or a field is missing, unknown or of another kind.
        """
        if not isinstance(content, Mapping):
            raise UsageError(f"a metric result must be a mapping, but it is {content!r}")
        known = {each.name for each in fields(cls)}
        wrong = sorted(set(content) - known) or sorted({"name", "value", "low", "high", "n"} - set(content))
        if wrong:
            raise UsageError(f"metric result {content.get('name', '')!r}: field {wrong[0]!r} is missing or unknown")
        return cls(**content)
