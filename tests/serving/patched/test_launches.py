"""No step asks more of a GPU than the committed table says: launches, waits for the device, copies from the host."""

import pytest

from ...support.family_kit import BUILDS
from ...support.launches import BATCHES, COUNTED, FILE, Counts, batch_counts, read_table

UPDATE = "python tests/benchmarks/launches.py --write --families "


@pytest.mark.product(most=1)
@pytest.mark.slow
@pytest.mark.parametrize("batch", [*reversed(BATCHES)])
@pytest.mark.parametrize("family", BUILDS)
def test_steps_ask_no_more_of_a_gpu(family: str, batch: str) -> None:
    found, known = {batch: batch_counts(family, batch)}, {batch: read_table()[family][batch]}
    more, fewer = (changes(known, found, sign) for sign in (1, -1))
    assert not more, f"{family} asks more of a GPU: {'; '.join(more)}"
    assert not fewer, f"{family} asks less of a GPU ({'; '.join(fewer)}); commit it: {UPDATE}{family}"
    assert found == known


def changes(known: dict[str, Counts], found: dict[str, Counts], sign: int) -> list[str]:
    """Return a description of every number that has risen (`sign` 1) or fallen (-1)."""
    return [
        f"{batch}: {known[batch][phase][column]} -> {number} {column} a {phase}"
        for batch, counts in found.items()
        for phase, numbers in counts.items()
        for column, number in numbers.items()
        if (number - known[batch][phase][column]) * sign > 0
    ]


def test_changes_of_the_table_are_named() -> None:
    known = {"one image": {"step": dict.fromkeys(COUNTED.values(), 5)}}
    found = {"one image": {"step": {"launches": 6, "waits": 4, "copies": 5}}}
    assert changes(known, found, 1) == ["one image: 5 -> 6 launches a step"]
    assert changes(known, found, -1) == ["one image: 5 -> 4 waits a step"]


def test_table_has_every_family() -> None:
    assert all(list(batches) == list(BATCHES) for batches in read_table().values())
    assert list(read_table()) == list(BUILDS), f"{FILE.name} is of other families; rewrite it: {UPDATE}FAMILY,..."
