"""Progress and partial images of one request while it is served."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image


class Watch:
    """Follows a request: receives each of its steps, and partial images that are spread evenly over its steps.

    A partial image shows the clean latents that a step predicts. There are none if the scheduler does not provide them.

    Args:
        num_partials: number of partial images.
        on_step: called with the number of steps done, from the collector's thread.
        may_lag: whether `on_step` may be called some time later, as waking that thread at every step slows the step.
        on_partial: called with the number of a partial image, from 0, and the image, from the collector's thread.
    """

    def __init__(
        self,
        *,
        num_partials: int = 0,
        on_step: Callable[[int], None] = lambda steps_done: None,
        may_lag: bool = False,
        on_partial: "Callable[[int, Image], None]" = lambda index, image: None,
    ) -> None:
        self.on_step, self.on_partial, self.may_lag = on_step, on_partial, may_lag
        self._num_partials, self._num_taken, self._num_drawn = num_partials, 0, 0

    def is_due(self, steps_done: int, num_steps: int) -> bool:
        """Return whether to make a partial image of this step."""
        if self._num_taken >= self._num_partials or steps_done >= num_steps:
            return False
        return steps_done >= math.ceil(num_steps * (self._num_taken + 1) / (self._num_partials + 1))

    def count_partial(self) -> None:
        """Count one more partial image that will be drawn."""
        self._num_taken += 1

    def show(self, image: "Image") -> None:
        """Call `on_partial` with a partial image."""
        self._num_drawn += 1
        self.on_partial(self._num_drawn - 1, image)
