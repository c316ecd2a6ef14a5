"""Work of a step for one request: the whole image, or the active cells of an edit over a record."""

from typing import NamedTuple

from .resolution import Resolution


class Work(NamedTuple):
    """Part of an image that a step computes for an edit; the rest is read from its template's record.

    Work on a whole image is its `Resolution`, so that both sort and hash together, and batches without edits consist of
    resolutions only; `work_of` creates either.

    Attributes:
        width, height: size of the image in pixels.
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
    """Return the work on this share of an image. Raises ValueError if the share is not above 0 and up to 1."""
    if not 0 < active_share <= 1:
        raise ValueError(f"active share is {active_share:g}, but it must be above 0 and up to 1")
    return resolution if active_share == 1 else Work(*resolution, active_share)


def resolution_of(work: Resolution | Work) -> Resolution:
    """Return the size of the image that is worked on."""
    return work.resolution if isinstance(work, Work) else work
