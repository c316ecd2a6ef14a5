"""Plans that draw some images whole and others in strips: by the given times, never slower than all of one kind."""

import math
import random
from collections.abc import Sequence
from itertools import product

import pytest

from patchedserve.serving.parallel.plan import CallTimes, CallTimeTable, StripWork, duration, in_strips, shared_out


def taken_us(works: list[StripWork], shared: list[bool], speeds: list[float]) -> float:
    whole = [work.row_us for work, each in zip(works, shared, strict=True) if not each for _ in range(work.rows)]
    return sum(work.strips_us for work, each in zip(works, shared, strict=True) if each) + duration(whole, speeds)


def random_works(chance: random.Random) -> list[StripWork]:
    works = []
    for _ in range(chance.randint(1, 12)):
        rows, row_us = chance.choice((1, 2)), chance.choice((10.0, 40.0, 160.0, 640.0))
        works.append(StripWork(rows, row_us, rows * row_us / chance.uniform(0.5, 4)))
    return works


def test_plan_is_no_slower_than_all_whole_or_all_strips() -> None:
    chance, won = random.Random(0), 0
    for _ in range(2000):
        works, speeds = random_works(chance), [1.0] * chance.randint(2, 8)
        pure = min(taken_us(works, [each] * len(works), speeds) for each in (False, True))
        mixed = taken_us(works, in_strips(works, speeds), speeds)
        assert mixed <= pure * (1 + 1e-12)
        won += mixed < 0.95 * pure
    assert won > 200


def test_large_image_among_small_ones_is_split() -> None:
    large, small = StripWork(1, 400.0, 250.0), StripWork(1, 100.0, 90.0)
    assert in_strips([small, large, small], [1.0, 1.0]) == [False, True, False]
    # With two of them, each rank draws one.
    assert in_strips([large, large], [1.0, 1.0]) == [False, False]
    # The same holds for the two rows of a guided request.
    assert in_strips([StripWork(2, 400.0, 500.0)], [1.0, 1.0]) == [False]


def test_unsplittable_images_stay_whole_and_empty_batches_have_empty_plans() -> None:
    assert in_strips([StripWork(1, 10.0, math.inf), StripWork(1, 10.0, 2.0)], [1.0, 1.0]) == [False, False]
    assert in_strips([StripWork(1, 10.0, math.inf)], [1.0, 1.0]) == [False]
    assert in_strips([], [1.0, 1.0]) == []


@pytest.mark.parametrize(("speeds", "most"), [([1.0, 1.0], 7 / 6), ([1.0, 3.0], 2.0), ([1.0, 0.5, 2.0], 2.0)])
def test_assignment_is_close_to_optimal(speeds: list[float], most: float) -> None:
    """Longest first takes at most 4/3 - 1/(3n) of the best time for n equal ranks (Graham 1969), and at most twice the
    best time for unequal ones (Gonzalez, Ibarra and Sahni 1977)."""
    chance = random.Random(1)
    for _ in range(60):
        costs = [chance.uniform(1, 100) for _ in range(chance.randint(1, 7))]

        def end(ranks: Sequence[int], costs: list[float] = costs) -> float:
            return max(
                sum(cost for cost, each in zip(costs, ranks, strict=True) if each == rank) / speed
                for rank, speed in enumerate(speeds)
            )

        best = min(map(end, product(range(len(speeds)), repeat=len(costs))))
        assert duration(costs, speeds) == pytest.approx(end(shared_out(costs, speeds)))
        assert best <= end(shared_out(costs, speeds)) * (1 + 1e-12) <= most * best * (1 + 1e-9)


def test_unmeasured_sizes_use_the_nearest_measurement() -> None:
    times = CallTimeTable(
        [CallTimes(32, 32, 2, 100.0, 80.0), CallTimes(64, 64, 2, 400.0, 200.0), CallTimes(8, 8, 1, 9, None)]
    )
    assert times.work(32, 32, 2) == StripWork(2, 50.0, 80.0)
    assert times.work(64, 64, 1) == StripWork(1, 200.0, 100.0)
    assert times.work(64, 128, 2) == StripWork(2, 400.0, 400.0)
    assert times.work(8, 4, 1).strips_us == math.inf
    assert times.gains(8) == {"256x256": 1.25, "512x512": 2.0}
