"""Work of a step for one request: the whole image, the active cells of an edit over a record, or an image and its
references.
"""

import math
from typing import NamedTuple

from .resolution import Resolution


class Work(NamedTuple):
    """Part of an image that a step computes for an edit, as the rest is read from its template's record; or an image
    together with references, which count by their pixels.

    Work on a whole image is its `Resolution`, so that both sort and hash together, and batches without edits consist of
    resolutions only; `work_of` creates either.

    Attributes:
        width, height: size of the image in pixels.
        active_share: what is computed as a share of the image: above 0 and below 1 for a part, above 1 with references.
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
    """Return the work on this share of an image. Raises ValueError if the share is not above 0 and finite."""
    if not 0 < active_share < math.inf:
        raise ValueError(f"active share is {active_share:g}, but it must be above 0 and finite")
    return resolution if active_share == 1 else Work(*resolution, active_share)


def resolution_of(work: Resolution | Work) -> Resolution:
    """Return the size of the image that is worked on."""
    return work.resolution if isinstance(work, Work) else work


def share_of(work: Resolution | Work) -> float:
    """Return what is computed as a share of the image."""
    return work.active_share if isinstance(work, Work) else 1.0


def is_part(work: Resolution | Work) -> bool:
    """Return whether this is a part of an image."""
    return share_of(work) < 1
