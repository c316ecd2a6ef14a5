"""Values derived from a model's weights and kept, such as other forms of a weight, or several weights joined."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

Made = TypeVar("Made")


class Derived(Generic[Made]):
    """A value derived from a weight: made at first use, and again when the weight's dtype or device has changed."""

    def __init__(self, make: Callable[[], Made]) -> None:
        self._make = make
        self._made: tuple[torch.dtype, torch.device, Made] | None = None

    def of(self, weight: Tensor) -> Made:
        """Return the value for the current dtype and device of the weight."""
        if self._made is None or self._made[0] != weight.dtype or self._made[1] != weight.device:
            self._made = weight.dtype, weight.device, self._make()
        return self._made[2]
