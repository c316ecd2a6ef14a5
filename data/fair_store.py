"""What several owners keep within one bound, so that one of them cannot push out what the others have."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class FairStore(Generic[Value]):
    """Values by name. Where they are larger than the bound, the owner whose values are the largest together loses the
    one that was used longest ago: who has less than an equal part loses nothing to others.

    Args:
        max_size: of all sizes together.

    Attributes:
        size: of all that is kept.
    """

    def __init__(self, max_size: float) -> None:
        self._max_size, self.size = max_size, 0.0
        self._entries: dict[str, OrderedDict[str, tuple[Value, float]]] = {}
        self._sizes: dict[str, float] = {}
        self._owners: dict[str, str] = {}

    def put(self, owner: str, name: str, value: Value, size: float) -> None:
        """Keep a value in place of that of the same name; one that is larger than the bound is not kept."""
        self.pop(name)
        if size > self._max_size:
            return
        self._entries.setdefault(owner, OrderedDict())[name] = value, size
        self._owners[name] = owner
        self._sizes[owner] = self._sizes.get(owner, 0.0) + size
        self.size += size
        while self.size > self._max_size:
            self.pop(next(iter(self._entries[largest(self._sizes)])))

    def get(self, name: str) -> Value | None:
        """A value, if it is kept."""
        owner = self._owners.get(name)
        return None if owner is None else self._entries[owner][name][0]

    def touch(self, name: str) -> None:
        """A value that is kept is the last of its owner's to go."""
        self._entries[self._owners[name]].move_to_end(name)

    def pop(self, name: str) -> Value | None:
        """Take a value out, if it is kept."""
        owner = self._owners.pop(name, None)
        if owner is None:
            return None
        value, size = self._entries[owner].pop(name)
        self.size -= size
        self._sizes[owner] -= size
        if not self._entries[owner]:
            del self._entries[owner], self._sizes[owner]
        return value

    def evict_while(self, should_evict: Callable[[Value], bool]) -> None:
        """Take out each owner's first values, in the order of their use, as long as this holds for them."""
        for owner in list(self._entries):
            while (of_owner := self._entries.get(owner)) and should_evict(next(iter(of_owner.values()))[0]):
                self.pop(next(iter(of_owner)))

    def values(self) -> list[Value]:
        """All values, owner by owner."""
        return [value for entries in self._entries.values() for value, _ in entries.values()]

    def __contains__(self, name: str) -> bool:
        return name in self._owners

    def __len__(self) -> int:
        return len(self._owners)


def largest(sizes: dict[str, float]) -> str:
    """The owner who has most; of equals the first."""
    return max(sizes, key=sizes.__getitem__)
