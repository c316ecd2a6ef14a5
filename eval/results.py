"""What a metric gives: an estimate, and everything that somebody needs who wants to compare it.

No torch here: gates and reports read results without loading a model.
"""

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, with_config

from ..data.errors import UsageError
from ..data.parsing import parse
from ..data.statistics import Estimate

Direction = Literal["higher", "lower"]


@with_config(ConfigDict(extra="forbid"))
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
        details: other facts about its making: checksums of weights, resolutions, counts.

    Raises:
        UsageError: the numbers are not an `Estimate`.
    """

    name: Annotated[str, Field(min_length=1)]
    value: float
    low: float | None
    high: float | None
    n: int
    unit: str = ""
    direction: Direction = "lower"
    seed: int = 0
    details: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            _ = self.estimate
        except UsageError as error:
            raise UsageError(f"{self.name}: {error}") from error

    @property
    def estimate(self) -> Estimate:
        """The number and its interval."""
        return Estimate(self.value, self.low, self.high, self.n)

    def to_json(self) -> dict[str, Any]:
        """A mapping that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """The result that `to_json` made `content` of. Raises UsageError."""
        return parse(cls, content)
