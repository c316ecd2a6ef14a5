"""What a step does for one request: the whole image, or the active cells of an edit over a record."""

from typing import NamedTuple

from .resolution import Resolution


class Work(NamedTuple):
    """A part of an image: what a step computes of an edit that reads the rest from its template's record.

    Work on a whole image is its `Resolution`, so that both sort and hash together and batches without edits are what
    they always were; `work_of` makes either.

    Attributes:
        width, height: of the image in pixels.
        active_share: share of its cells that are computed, above 0 and below 1.
    """

    width: int
    height: int
    active_share: float

    def __str__(self) -> str:
        return f"{self.active_share:.1%} of {self.resolution}"

    @property
    def resolution(self) -> Resolution:
        """Size of the whole image."""
        return Resolution(self.width, self.height)


def work_of(resolution: Resolution, active_share: float = 1.0) -> Resolution | Work:
    """The work on so much of an image. Raises ValueError: the share is not above 0 and up to 1."""
    if not 0 < active_share <= 1:
        raise ValueError(f"active share is {active_share:g}, but it must be above 0 and up to 1")
    return resolution if active_share == 1 else Work(*resolution, active_share)


def resolution_of(work: Resolution | Work) -> Resolution:
    """Size of the image that is worked on."""
    return work.resolution if isinstance(work, Work) else work
