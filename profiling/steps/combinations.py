"""Combinations: how many requests of each resolution are in a batch. This module imports no torch.

A latency model needs many combinations (300 random ones in PatchedServe section 6.1), a benchmark a few informative
ones. Short names follow figure 5 of the paper.
"""

import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations as choose
from itertools import cycle, pairwise, product
from typing import Any

from ...data.errors import UsageError
from ...data.resolution import Resolution, format_batch

MAX_REQUESTS = 256
"""Maximum number of requests in one combination."""
_FULL = 16
"""Requests in a full batch, the default of `psctl serve --max-batch-size`."""
_LETTERS = {1: "S", 2: "SL", 3: "SML"}
_MAX_LETTERS = 6


@dataclass(frozen=True, slots=True)
class Combination:
    """Requests by resolution: `counts[i]` of `resolutions[i]`.

    Raises:
        UsageError: the counts do not match the resolutions, or one is negative, or they add up to 0 or to more than
            `MAX_REQUESTS`.
    """

    resolutions: tuple[Resolution, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        given = f"combination {','.join(map(str, self.counts))!r}"
        if len(self.counts) != len(self.resolutions):
            sizes = ", ".join(map(str, self.resolutions))
            raise UsageError(
                f"{given} has {len(self.counts)} numbers, but it must have {len(self.resolutions)}, one for each of "
                f"{sizes}"
            )
        if min(self.counts) < 0:
            raise UsageError(f"{given} has a negative number, but each must be a number of requests, 0 or more")
        if not 1 <= self.num_requests <= MAX_REQUESTS:
            raise UsageError(f"{given} holds {self.num_requests} requests, but it must hold 1 to {MAX_REQUESTS}")

    @property
    def num_requests(self) -> int:
        return sum(self.counts)

    @property
    def is_mixed(self) -> bool:
        """Whether there are requests of more than one resolution."""
        return len(self.present) > 1

    @property
    def present(self) -> dict[Resolution, int]:
        """Number of requests by resolution, without resolutions that have none."""
        pairs = zip(self.resolutions, self.counts, strict=True)
        return {resolution: count for resolution, count in pairs if count}

    @property
    def num_pixels(self) -> int:
        return sum(resolution.pixels * count for resolution, count in self.present.items())

    @property
    def by_resolution(self) -> dict[str, int]:
        """Number of requests by resolution, including resolutions that have none."""
        return {str(resolution): count for resolution, count in zip(self.resolutions, self.counts, strict=True)}

    @property
    def columns(self) -> dict[str, Any]:
        """Columns that identify the combination, with which a row of a benchmark begins."""
        return {
            "combination": self.by_resolution,
            "label": self.label,
            "requests": self.num_requests,
            "is_mixed": self.is_mixed,
        }

    @property
    def label(self) -> str:
        """Short name: letters for up to three square resolutions ("SML", "4S 4M 4L"), otherwise sizes
        ("2*128x192 + 256x256").
        """
        letters, counts = letters_of(self.resolutions), self.present
        if not letters:
            return format_batch(counts)
        named = [(letter, counts[resolution]) for resolution, letter in letters.items() if resolution in counts]
        if self.num_requests <= _MAX_LETTERS:
            return "".join(letter * count for letter, count in named)
        return " ".join(f"{count}{letter}" for letter, count in named)


def letters_of(resolutions: Sequence[Resolution]) -> dict[Resolution, str]:
    """Return the letter of each resolution from small to large; empty unless they are one to three squares."""
    if len(resolutions) not in _LETTERS or any(width != height for width, height in resolutions):
        return {}
    return dict(zip(sorted(resolutions), _LETTERS[len(resolutions)], strict=True))


def parse_combinations(text: str, resolutions: tuple[Resolution, ...]) -> tuple[Combination, ...]:
    """Parse combinations such as `"1,1,1;2,2,2"`: separated by semicolons, with one number for each resolution.

    Raises:
        UsageError: a combination is malformed, or `Combination` refuses it.
    """
    parsed = []
    for part in text.split(";"):
        items = [item.strip() for item in part.split(",")] if part.strip() else []
        wrong = [item for item in items if not re.fullmatch(r"-?[0-9]{1,6}", item)]
        if wrong:
            raise UsageError(
                f"combination {part.strip()!r} has {wrong[0]!r}, but numbers between commas are wanted, as in 1,1,2"
            )
        parsed.append(Combination(resolutions, tuple(map(int, items))))
    return tuple(parsed)


def default_combinations(resolutions: tuple[Resolution, ...]) -> tuple[Combination, ...]:
    """Return about 20 combinations of up to 16 requests: single resolutions, pairs, even mixes and uneven ones."""
    size = len(resolutions)

    def filled(others: int, counts: dict[int, int]) -> tuple[int, ...]:
        return tuple(counts.get(index, others) for index in range(size))

    rows = [filled(0, {index: count}) for index in range(size) for count in (1, 4, _FULL)]
    if size > 1:
        rows += [filled(0, {first: 1, second: 1}) for first, second in choose(range(size), 2)]
        rows += [filled(count, {}) for count in (1, 2, 3, 4) if count * size <= _FULL]
        # A full batch, as even as possible; the largest resolutions take the remainder.
        rows.append(tuple((_FULL * (index + 1)) // size - (_FULL * index) // size for index in range(size)))
        for few, many in ((1, 8), (2, _FULL - 2 * (size - 1))):
            rows += [filled(few, {index: many}) for index in (0, size - 1) if many > few]
    return tuple(Combination(resolutions, row) for row in dict.fromkeys(rows))


def random_combinations(resolutions: tuple[Resolution, ...], count: int, seed: int) -> tuple[Combination, ...]:
    """Draw distinct combinations of 1 to 16 requests: first the number of requests, then uniformly a way to split it.

    Raises:
        UsageError: `count` is less than 1, or more than the number of distinct combinations.
    """
    size = len(resolutions)
    available = count_combinations(size, _FULL)
    if not 1 <= count <= available:
        raise UsageError(
            f"{count} random combinations were asked for, but {size} resolutions have 1 to {available} of up to "
            f"{_FULL} requests"
        )
    generator = random.Random(seed)
    drawn: dict[tuple[int, ...], None] = {}
    while len(drawn) < count:
        total = generator.randint(1, _FULL)
        # Stars and bars: the stars between two neighbouring bars are the requests of one resolution.
        bars = [-1, *sorted(generator.sample(range(total + size - 1), size - 1)), total + size - 1]
        drawn[tuple(right - left - 1 for left, right in pairwise(bars))] = None
    return tuple(Combination(resolutions, row) for row in drawn)


def count_combinations(num_resolutions: int, max_batch_size: int) -> int:
    """Return the number of distinct combinations of 1 to `max_batch_size` requests."""
    return math.comb(max_batch_size + num_resolutions, num_resolutions) - 1


def stratified_combinations(
    resolutions: tuple[Resolution, ...], count: int, max_batch_size: int, seed: int
) -> tuple[Combination, ...]:
    """Draw distinct combinations that cover small and large batches, and pure and mixed ones, evenly.

    The result always begins with one request of each resolution and the largest batch of each, the corners between
    which a latency model interpolates, and a small and a large batch of all resolutions. Pairs follow: without mixed
    batches a model cannot learn the cost of mixing, and a short table would have none. The rest are drawn in turn from
    all batch sizes and, within a batch size, in turn from all numbers of distinct resolutions. A uniform draw among all
    ways to split a batch would contain almost no batch of a single resolution, which is what a policy that never mixes
    runs.

    If fewer than `count` combinations exist, all are returned. The corners and the batches of all resolutions are
    returned even if `count` is smaller.
    """
    generator = random.Random(seed)
    size = len(resolutions)
    chosen = dict.fromkeys(_pure(size, dict.fromkeys((1, max_batch_size))))
    chosen |= dict.fromkeys(_even(size, range(size), max_batch_size))
    pairs = [row for pair in choose(range(size), 2) for row in _even(size, pair, max_batch_size)]
    random.Random(seed).shuffle(pairs)
    chosen |= dict.fromkeys(pairs[: max(0, count - len(chosen))])
    held = Counter(map(sum, chosen))
    strata = [(total, _splits(total, size, generator, chosen)) for total in range(1, max_batch_size + 1)]
    for least in itertools.count(1):
        if not strata or len(chosen) >= count:
            break
        generator.shuffle(strata)
        for total, stratum in list(strata):
            if held[total] >= least:  # filled by combinations that are always included
                continue
            drawn = next(stratum, None)
            if drawn is None:
                strata.remove((total, stratum))
            elif len(chosen) < count:
                chosen[drawn] = None
                held[total] += 1
    return tuple(Combination(resolutions, row) for row in chosen)


def single_combinations(
    resolutions: tuple[Resolution, ...], count: int, max_batch_size: int
) -> tuple[Combination, ...]:
    """Return about `count` combinations of one resolution each, the only ones that passes of the plain engine have.

    Every resolution gets the same numbers of requests, denser among the small ones; 1 and `max_batch_size` are always
    included.
    """
    wanted = min(max_batch_size, max(2, count // len(resolutions)))
    places = [max_batch_size ** (index / (wanted - 1)) for index in range(wanted)] if wanted > 1 else [1.0]
    numbers: list[int] = []
    for index, place in enumerate(places):
        # If rounding repeats a number, the next free one is used; room is left for the numbers to come.
        low = numbers[-1] + 1 if numbers else 1
        numbers.append(min(max(low, round(place)), max_batch_size - (wanted - 1 - index)))
    return tuple(Combination(resolutions, row) for row in _pure(len(resolutions), numbers))


def _pure(size: int, numbers: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """Yield the counts of batches of one resolution: for each number, one batch of every resolution."""
    for number, index in product(numbers, range(size)):
        yield tuple(number if index == other else 0 for other in range(size))


def _even(size: int, members: Sequence[int], max_batch_size: int) -> Iterator[tuple[int, ...]]:
    """Yield one request of each member resolution, and their largest batch, as even as possible; omits what does not
    fit a batch.
    """
    for number in dict.fromkeys((len(members), max_batch_size)):
        if len(members) <= number <= max_batch_size:
            each, rest = divmod(number, len(members))
            counts = {member: each + (place < rest) for place, member in enumerate(members)}
            yield tuple(counts.get(index, 0) for index in range(size))


def _splits(
    total: int, size: int, generator: random.Random, taken: Container[tuple[int, ...]]
) -> Iterator[tuple[int, ...]]:
    """Yield, at random, the ways to split `total` requests not in `taken`, over 1, 2, ... resolutions in turn."""
    left = {number: math.comb(size, number) * math.comb(total - 1, number - 1) for number in range(1, size + 1)}
    left = {number: ways for number, ways in left.items() if ways}
    seen: set[tuple[int, ...]] = set()
    for number in cycle(tuple(left)):
        while left[number]:
            row = [0] * size
            bars = [0, *sorted(generator.sample(range(1, total), number - 1)), total]
            for index, (low, high) in zip(generator.sample(range(size), number), pairwise(bars), strict=True):
                row[index] = high - low
            drawn = tuple(row)
            if drawn in seen:
                continue
            seen.add(drawn)
            left[number] -= 1
            if drawn not in taken:
                yield drawn
                break
        if not any(left.values()):
            return
