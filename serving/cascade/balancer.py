"""Choice of a worker for a request. No torch."""

import random
from collections.abc import Sequence
from typing import Literal, Protocol, TypeVar

Balance = Literal["least", "random"]


class HasPendingWork(Protocol):
    """A worker with pending work: the pixels times steps of its unfinished requests."""

    @property
    def pending_pixel_steps(self) -> int: ...


Worker = TypeVar("Worker", bound=HasPendingWork)


class Balancer:
    """Chooses a worker.

    Args:
        balance: `least`: the worker with the fewest pending pixel-steps, the first one of a tie. `random`: any worker,
            with equal probability.
        seed: seed of the random choices.
    """

    def __init__(self, balance: Balance = "least", seed: int = 0) -> None:
        self._balance, self._chance = balance, random.Random(seed)

    def choose(self, workers: Sequence[Worker]) -> Worker:
        """Return one of the workers, of which there must be at least one."""
        if self._balance == "random":
            return workers[self._chance.randrange(len(workers))]
        return min(workers, key=lambda worker: worker.pending_pixel_steps)
