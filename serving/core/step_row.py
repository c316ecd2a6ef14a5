"""Record of one denoising iteration."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

from ...data.resolution import Resolution


@dataclass(frozen=True, slots=True)
class StepRow:
    """One denoising iteration; its fields are the columns of the steps table (`data.tables.STEPS`).

    Attributes:
        step: number of the iteration, from 0.
        start_s, duration_s: start of the step on the engine's clock and its duration, in seconds.
        active, waiting: number of requests in the batch, and of requests that have arrived and are not in it.
        resolutions: number of active requests of each resolution, by its name ("128x128").
        computed: number of these for which the model ran; the others reuse its predictions from earlier steps. None:
            all.
        schedule_s: seconds that the policy took since the previous step.
        pixels: number of pixels of the batch, with those of references; not in the table.
    """

    step: int
    start_s: float
    duration_s: float
    active: int
    waiting: int
    resolutions: dict[str, int]
    schedule_s: float = 0.0
    computed: dict[str, int] | None = None
    pixels: int = field(default=0, compare=False)

    @classmethod
    def of(
        cls,
        step: int,
        start_s: float,
        duration_s: float,
        batch: Sequence[Resolution],
        num_waiting: int,
        schedule_s: float = 0.0,
        computed: Sequence[Resolution] | None = None,
        pixels: int | None = None,
    ) -> Self:
        """Return the row of a step of `batch`, while `num_waiting` requests had arrived and were not in it. Without
        `pixels`, they are those of the resolutions.
        """
        seen = sum(size.pixels for size in batch) if pixels is None else pixels
        resolutions = dict(Counter(map(str, batch)))
        ran = None if computed is None else dict(Counter(map(str, computed)))
        return cls(step, start_s, duration_s, len(batch), num_waiting, resolutions, schedule_s, ran, seen)

    @property
    def ran(self) -> dict[str, int]:
        """Number of requests for which the model ran, by resolution."""
        return self.resolutions if self.computed is None else self.computed

    def to_row(self) -> dict[str, Any]:
        """Return a row of the steps table."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "pixels"}
