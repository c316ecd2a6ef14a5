"""Plan of a count: which model, for which images, on how many devices."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...data.errors import UsageError
from ...data.resolution import RESOLUTION_MULTIPLE, Resolution
from ...serving.parallel.cost import Call, Cost
from ...serving.parallel.latency_model import Link
from ...serving.parallel.strips import Strips


@dataclass(frozen=True, slots=True)
class AccountingPlan:
    """Model, images and numbers of devices to count.

    Attributes:
        cost: cost of the model.
        text_length: number of text tokens.
        resolutions: resolutions of the images.
        num_ranks: numbers of devices, each more than one.
        link: link between devices.
        is_paper_model: whether DistriFusion's figures are of this model.
    """

    cost: Cost
    text_length: int
    resolutions: Sequence[Resolution]
    num_ranks: Sequence[int]
    link: Link
    is_paper_model: bool

    def __post_init__(self) -> None:
        for resolution in self.resolutions:
            try:
                self.strips(resolution, max(self.num_ranks, default=1))
            except UsageError as error:
                raise UsageError(f"resolution {resolution}: {error}") from None

    def call(self, resolution: Resolution, *, rows: int = 2) -> Call:
        """Return the call for an image; with guidance it has two rows."""
        width, height = (side // RESOLUTION_MULTIPLE for side in resolution)
        return Call(height, width, self.text_length, rows)

    def strips(self, resolution: Resolution, count: int) -> Strips:
        """Return `count` even strips of an image."""
        return Strips.of(self.call(resolution).height, self.cost.levels.unit, (1.0,) * count)

    def naive(self, resolution: Resolution, count: int) -> list[Call]:
        """Return the calls of devices that each draw their strip as a separate image."""
        whole = self.call(resolution)
        return [Call(height, whole.width, whole.text_length) for height in self.strips(resolution, count).heights(1)]

    def calls(self) -> list[Call]:
        """Return all distinct calls: of whole images, and of strips as separate images."""
        every = (self.naive(size, count) for size in self.resolutions for count in (1, *self.num_ranks))
        return list(dict.fromkeys(call for calls in every for call in calls))
