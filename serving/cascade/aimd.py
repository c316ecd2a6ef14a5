"""Clipper's batch sizes: one size larger after every batch that was in time, half as large after one that was not.

Source: Crankshaw et al., NSDI 2017 (additive increase, multiplicative decrease). No torch.
"""

import math
from collections.abc import Sequence


class Aimd:
    """Limit on the batch size of one model, adapted by additive increase and multiplicative decrease.

    Args:
        batch_sizes: batch sizes to choose from, ascending.
    """

    def __init__(self, batch_sizes: Sequence[int]) -> None:
        self._batch_sizes = batch_sizes
        self._index = self._num_in_time = 0
        self._halved_s = -math.inf

    @property
    def batch_size(self) -> int:
        """The current limit."""
        return self._batch_sizes[self._index]

    def note(self, now_s: float, joined_s: float, *, was_in_time: bool) -> None:
        """Record the end of a request; as many requests in time as a batch holds count as one batch in time.

        Args:
            now_s: the current time.
            joined_s: start time of its batch. A late request changes nothing if its batch began before the last
                decrease.
            was_in_time: whether the request met its deadline.
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
