"""Turns of the sides of an experiment: other load on the machine, and its drift, affect all sides alike. No torch."""

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

Side = TypeVar("Side")


def rotated(sides: Sequence[Side], number: int) -> tuple[Side, ...]:
    """Return the sides of a round or cell in the order of their turns: each number begins with the next side."""
    first = number % len(sides)
    return (*sides[first:], *sides[:first])


def turns(sides: Sequence[Side], num_rounds: int, *, num_warmups: int = 1) -> Iterator[tuple[int, Side]]:
    """Yield the number of the round and the side for every turn. Rounds with negative numbers warm up."""
    for number in range(-num_warmups, num_rounds):
        for side in rotated(sides, number):
            yield number, side


def shuffled(cells: Iterable[Side], seed: int, number: int) -> list[Side]:
    """Return the cells in the random order of one round."""
    order = list(cells)
    random.Random(seed * 1_000_003 + number).shuffle(order)
    return order
