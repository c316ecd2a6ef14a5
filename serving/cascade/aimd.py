"""Clipper's batch sizes: larger by one size after every batch that was in time, half as large after one that was not.

Source: Crankshaw et al., NSDI 2017 (additive increase, multiplicative decrease). No torch.
"""

import math
from collections.abc import Sequence


class Aimd:
    """The largest batch that a model takes next.

    Args:
        batch_sizes: ascending.
    """

    def __init__(self, batch_sizes: Sequence[int]) -> None:
        self._batch_sizes = batch_sizes
        self._index = self._num_in_time = 0
        self._halved_s = -math.inf

    @property
    def batch_size(self) -> int:
        """Of now."""
        return self._batch_sizes[self._index]

    def note(self, now_s: float, joined_s: float, *, was_in_time: bool) -> None:
        """A request has ended; as many in time as a batch holds are a batch in time.

        Args:
            now_s: the time.
            joined_s: when its batch began: one that began before the last decrease, and is late, too, changes nothing.
            was_in_time: whether it was.
        """
        if was_in_time:
            self._num_in_time += 1
            if self._num_in_time >= self.batch_size:
                self._num_in_time = 0
                self._index = min(self._index + 1, len(self._batch_sizes) - 1)
        elif joined_s > self._halved_s:
            half = self.batch_size / 2
            self._index = max((index for index, size in enumerate(self._batch_sizes) if size <= half), default=0)
            self._num_in_time, self._halved_s = 0, now_s
