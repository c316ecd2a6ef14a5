"""Controls: images that guide where things are drawn, each read by one ControlNet (Zhang et al. 2023). No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .adapters import check_adapter_name
from .edits import Picture, require_rgb
from .errors import UsageError
from .resolution import Resolution

MAX_SCALE, MAX_CONTROLS = 10.0, 8


@dataclass(frozen=True, slots=True, eq=False)
class Control(Picture):
    """An image for one ControlNet, and how much it counts.

    Attributes:
        name: name of the ControlNet.
        image: (height, width, 3) uint8, of the size of the image that is drawn: edges, depth, a pose, as the net reads.
        scale: factor of what the net adds to the model, from 0 to `MAX_SCALE`.
        start, end: part of the steps in which it counts, from 0 to 1, as `control_guidance_start` and `_end` of the
            pipelines of diffusers.

    Raises:
        UsageError: a field is out of its range.
    """

    name: str
    image: NDArray[np.uint8]
    scale: float = 1.0
    start: float = 0.0
    end: float = 1.0

    def __post_init__(self) -> None:
        check_adapter_name(self.name, "ControlNet")
        require_rgb(f"the image of control {self.name}", self.image)
        for field, value, most in (("scale", self.scale, MAX_SCALE), ("start", self.start, 1), ("end", self.end, 1)):
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= most:
                raise UsageError(
                    f"{field} of control {self.name} is {value!r}, but it must be a number from 0 to {most:g}"
                )
        if self.start >= self.end:
            raise UsageError(
                f"control {self.name} starts at {self.start:g}, but it must end later, not at {self.end:g}"
            )

    def fitted(self, resolution: Resolution) -> Self:
        """Return it with its image scaled to a size, as pipelines of diffusers scale images."""
        image = Image.fromarray(self.image).resize(resolution, Image.Resampling.LANCZOS)
        return type(self)(self.name, np.asarray(image), self.scale, self.start, self.end)


def check_controls(controls: Sequence[Control], resolution: Resolution) -> None:
    """Raise UsageError if there are too many controls, or one is named twice or has another size than the image."""
    if len(controls) > MAX_CONTROLS:
        raise UsageError(f"a request has {len(controls)} controls, but it may have at most {MAX_CONTROLS}")
    names = [control.name for control in controls]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"control {twice} is given twice: give one image for each ControlNet")
    for control in controls:
        if control.resolution != resolution:
            raise UsageError(
                f"the image of control {control.name} has {control.resolution} pixels, but the one that is drawn has "
                f"{resolution}"
            )


def require_controls(names: Sequence[str], known: Sequence[str]) -> None:
    """Raise UsageError if a ControlNet is not among those that are served."""
    for name in names:
        if name not in known:
            served = f"there are {', '.join(known)}" if known else "none is served: see --controlnet NAME=PATH"
            raise UsageError(f"ControlNet {name} is unknown; {served}")
