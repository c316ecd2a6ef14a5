"""Something made from a model's weight and kept: other forms of it, several put together."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

Made = TypeVar("Made")


class Derived(Generic[Made]):
    """Something made from a weight: at first use, and anew when the weight's dtype or device has changed."""

    def __init__(self, make: Callable[[], Made]) -> None:
        self._make = make
        self._made: tuple[torch.dtype, torch.device, Made] | None = None

    def of(self, weight: Tensor) -> Made:
        """What is made, for the weight as it is now."""
        if self._made is None or self._made[0] != weight.dtype or self._made[1] != weight.device:
            self._made = weight.dtype, weight.device, self._make()
        return self._made[2]
