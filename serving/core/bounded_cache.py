"""Cache of tensors, bounded by their size."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class BoundedCache(Generic[Value]):
    """LRU cache whose values have at most `max_bytes` together. One thread at a time may use it.

    Args:
        max_bytes: bytes of values that are kept.
        bytes_of: size of a value.

    Attributes:
        num_bytes: bytes of the values.
    """

    def __init__(self, max_bytes: int, bytes_of: Callable[[Value], int]) -> None:
        self._max_bytes, self._bytes_of = max_bytes, bytes_of
        self.clear()

    def clear(self) -> None:
        """Forget all values."""
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def find(self, key: Hashable) -> Value | None:
        """Return the value of this key; None if it is not kept."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def keep(self, key: Hashable, value: Value) -> None:
        """Keep the value of a new key, and forget those that were not used for the longest time as needed."""
        self._values[key] = value
        self.num_bytes += self._bytes_of(value)
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._bytes_of(self._values.popitem(last=False)[1])
