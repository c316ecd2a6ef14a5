"""Which worker of a model gets a request. No torch."""

import random
from collections.abc import Sequence
from typing import Literal, Protocol, TypeVar

Balance = Literal["least", "random"]


class Pending(Protocol):
    """What is known of a worker: pixels times steps that it has still to do."""

    @property
    def pending(self) -> int: ...


Worker = TypeVar("Worker", bound=Pending)


class Balancer:
    """Chooses a worker.

    Args:
        balance: `least`: the one with the fewest pixel-steps pending, the first of equals. `random`: any, all alike.
        seed: of the random choices.
    """

    def __init__(self, balance: Balance = "least", seed: int = 0) -> None:
        self._balance, self._chance = balance, random.Random(seed)

    def choose(self, workers: Sequence[Worker]) -> Worker:
        """One of at least one."""
        if self._balance == "random":
            return workers[self._chance.randrange(len(workers))]
        return min(workers, key=lambda worker: worker.pending)
