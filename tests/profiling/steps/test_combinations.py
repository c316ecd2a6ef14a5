"""profiling/steps/combinations.py: labels, and default, random and user-defined combinations."""

from collections import Counter

import numpy as np
import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.resolution import Resolution, parse_list
from patchedserve.data.tables.latency import read_latencies
from patchedserve.data.tables.published import published_table
from patchedserve.profiling.steps.combinations import (
    Combination,
    count_combinations,
    default_combinations,
    parse_combinations,
    random_combinations,
    single_combinations,
    stratified_combinations,
)

from ...support.bench_cases import SIZES, squares


@pytest.mark.parametrize(
    ("counts", "label"),
    [
        ((1, 0, 0), "S"),
        ((0, 1, 0), "M"),
        ((2, 2, 2), "SSMMLL"),
        ((0, 3, 3), "MMMLLL"),
        ((4, 4, 4), "4S 4M 4L"),
        ((0, 0, 16), "16L"),
    ],
)
def test_label_of_squares(counts: tuple[int, ...], label: str) -> None:
    assert squares(*counts).label == label


def test_letters_follow_size_not_order() -> None:
    assert Combination(parse_list("64,32"), (2, 1)).label == "SLL"
    assert Combination(parse_list("64,32"), (2, 1)).by_resolution == {"64x64": 2, "32x32": 1}
    assert Combination(parse_list("64x32,32"), (2, 1)).label == "32x32 + 2*64x32"
    assert Combination(parse_list("32,48,64,80"), (0, 0, 0, 3)).label == "3*80x80"


def test_default_combinations_cover_all_kinds() -> None:
    chosen = default_combinations(SIZES)
    labels = [combination.label for combination in chosen]
    assert len(chosen) == 21
    assert len(set(chosen)) == 21
    assert set(labels) >= {"S", "LLLL", "16M", "SM", "SL", "ML", "SML", "SSMMLL", "3S 3M 3L", "4S 4M 4L", "5S 5M 6L"}
    assert set(labels) >= {"8S 1M 1L", "2S 2M 12L"}
    for number in range(1, 21):
        some = default_combinations(tuple(Resolution(8 * side, 8) for side in range(1, number + 1)))
        assert len(set(some)) == len(some)
        assert {combination.is_mixed for combination in some} == ({False} if number == 1 else {False, True})


def test_random_combinations_are_seeded_and_differ() -> None:
    drawn = random_combinations(SIZES, 40, seed=3)
    assert drawn == random_combinations(SIZES, 40, seed=3)
    assert drawn != random_combinations(SIZES, 40, seed=4)
    assert len(set(drawn)) == 40
    assert {combination.num_requests for combination in drawn} <= set(range(1, 17))
    # All existing combinations, each once.
    assert len(set(random_combinations(SIZES[:2], 152, seed=0))) == 152
    with pytest.raises(UsageError, match=r"153 random combinations .* 1 to 152"):
        random_combinations(SIZES[:2], 153, seed=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,1", r"'1,1' has 2 numbers, but it must have 3, one for each of 32x32, 48x48, 64x64"),
        ("1,1,1;1,1,1,1", "has 4 numbers"),
        ("1,1,1;", "has 0 numbers"),
        ("", "has 0 numbers"),
        ("1,-1,1", "'1,-1,1' has a negative number"),
        ("0,0,0", "holds 0 requests"),
        ("0,0,257", "holds 257 requests, but it must hold 1 to 256"),
        ("1,x,1", "'1,x,1' has 'x'"),
        ("1,,1", "has ''"),
        ("1,1.5,1", "has '1.5'"),
        ("1,99999999999,1", "has '99999999999'"),
    ],
)
def test_invalid_combinations_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_combinations(text, SIZES)
    assert parse_combinations(" 1, 0,1 ; 2,2,2", SIZES) == (squares(1, 0, 1), squares(2, 2, 2))


def test_combinations_are_stratified() -> None:
    sizes = parse_list("128,192,256")
    drawn = stratified_combinations(sizes, 300, 16, seed=0)
    assert drawn == stratified_combinations(sizes, 300, 16, seed=0)
    assert drawn != stratified_combinations(sizes, 300, 16, seed=1)
    assert len(set(drawn)) == 300
    assert {each.counts for each in drawn[:6]} == {
        *((1, 0, 0), (0, 1, 0), (0, 0, 1)),
        *((16, 0, 0), (0, 16, 0), (0, 0, 16)),
    }
    by_size = Counter(each.num_requests for each in drawn)
    # All combinations of the smallest sizes, and about equally many of each larger size.
    assert [by_size[size] for size in (1, 2, 3, 4)] == [3, 6, 10, 15]
    assert set(by_size) == set(range(1, 17))
    assert all(20 <= by_size[size] <= 26 for size in range(6, 17))
    # Every batch of a single resolution is included; a uniform draw would include about 15 of the 48.
    assert sum(not each.is_mixed for each in drawn) == 48


@pytest.mark.parametrize("num_sizes", range(1, 7))
@pytest.mark.parametrize("count", [1, 16, 48, 300])
def test_stratified_combinations_identify_the_cost_of_mixing(num_sizes: int, count: int) -> None:
    """The columns for the constant, the requests of each resolution and the number of resolutions have full rank."""
    sizes = tuple(Resolution(64 * side, 64 * side) for side in range(1, num_sizes + 1))
    drawn = stratified_combinations(sizes, count, 16, seed=0)
    columns = np.array([[1, *each.counts, len(each.present)] for each in drawn])
    wanted = num_sizes + 1 + (num_sizes > 1)  # with one size, the number of resolutions is constant
    assert np.linalg.matrix_rank(columns) == wanted
    assert len(drawn) <= max(count, 2 * num_sizes + 2)


@pytest.mark.parametrize("model", ["emoji-xl", "emoji-3"])
def test_bundled_tables_identify_the_cost_of_mixing(model: str) -> None:
    path = published_table(model)
    assert path is not None
    rows = read_latencies(path).rows
    sizes = sorted({size for row in rows for size in row.counts})
    columns = np.array([[1, *(row.counts.get(size, 0) for size in sizes), len(row.counts)] for row in rows])
    assert np.linalg.matrix_rank(columns) == len(sizes) + 2


@pytest.mark.parametrize(("num_sizes", "largest"), [(1, 16), (2, 5), (3, 4), (5, 1)])
def test_stratified_combinations_are_bounded_by_all_combinations(num_sizes: int, largest: int) -> None:
    sizes = tuple(Resolution(8 * side, 8) for side in range(1, num_sizes + 1))
    drawn = stratified_combinations(sizes, 10_000, largest, seed=0)
    assert len(drawn) == len(set(drawn)) == count_combinations(num_sizes, largest)
    assert {each.num_requests for each in drawn} == set(range(1, largest + 1))


@pytest.mark.parametrize(
    ("count", "largest", "numbers"),
    [
        (2, 16, [1, 16]),
        (12, 16, [1, 3, 6, 16]),
        (24, 16, [1, 2, 3, 4, 5, 7, 11, 16]),
        (99, 16, list(range(1, 17))),
        (9, 1, [1]),
        (6, 2, [1, 2]),
    ],
)
def test_combinations_of_one_resolution(count: int, largest: int, numbers: list[int]) -> None:
    sizes = parse_list("32,48,64")
    drawn = single_combinations(sizes, count, largest)
    assert [max(combination.counts) for combination in drawn] == [number for number in numbers for _ in sizes]
    assert not any(combination.is_mixed for combination in drawn)
    assert len(set(drawn)) == len(drawn)
