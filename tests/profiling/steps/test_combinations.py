"""profiling/steps/combinations.py: labels, the default ones, random ones, and what users give."""

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.resolution import Resolution, parse_list
from patchedserve.profiling.steps.combinations import (
    Combination,
    default_combinations,
    parse_combinations,
    random_combinations,
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
    # All that there are, each once.
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
def test_bad_combinations(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_combinations(text, SIZES)
    assert parse_combinations(" 1, 0,1 ; 2,2,2", SIZES) == (squares(1, 0, 1), squares(2, 2, 2))
