"""The line fitted to served batches: it finds the cost of steps, returns None for unknown batches, and adapts."""

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

from patchedserve.data.resolution import Resolution
from patchedserve.data.work import Work, resolution_of, work_of
from patchedserve.training.latency.learnt_line import MIN_OBSERVATIONS, LearntLine, LineState
from patchedserve.training.latency.online_correction import OnlineCorrection

S, M, L = (Resolution(side, side) for side in (128, 192, 256))
OWN_S = {S: 0.004, M: 0.009, L: 0.02}
FIRST_S = 0.01
"""Additional seconds of the step after a change."""


def cost_s(batch: Sequence[Resolution | Work]) -> float:
    sizes = [resolution_of(work) for work in batch]
    shares = [work.active_share if isinstance(work, Work) else 1.0 for work in batch]
    return 0.01 + 0.012 * len({*sizes}) + sum(OWN_S[size] * share for size, share in zip(sizes, shares, strict=True))


def some_batch(generator: random.Random, most: int = 12) -> list[Resolution | Work]:
    return sorted(generator.choices((S, M, L), k=generator.randint(1, most)))


def observe_steps(line: LearntLine, count: int, *, noise: float = 0.0, times: float = 1.0, seed: int = 0) -> None:
    """Observe steps of random batches, one in five of which is the first of its batch."""
    generator = random.Random(seed)
    for _ in range(count):
        is_first = generator.random() < 0.2
        batch = some_batch(generator)
        taken_s = times * (cost_s(batch) + is_first * FIRST_S) * math.exp(generator.gauss(0, noise))
        line.observe(batch, taken_s, 0.05, is_first=is_first)


@pytest.mark.parametrize("times", [1.0, 30.0])
def test_line_recovers_the_cost_of_steps(times: float) -> None:
    line = LearntLine()
    observe_steps(line, 600, noise=0.05, times=times)
    generator = random.Random(1)
    for batch in [[S], [L], [S, M, L], [M] * 16, *(some_batch(generator, 16) for _ in range(20))]:
        # One in five steps is the first of its batch.
        assert line.step_latency_s(batch) == pytest.approx(times * (cost_s(batch) + 0.2 * FIRST_S), rel=0.06)


def test_line_predicts_nothing_for_unseen_resolutions() -> None:
    line = LearntLine()
    assert line.step_latency_s([S]) is None
    for number in range(int(MIN_OBSERVATIONS) + 20):
        assert number >= MIN_OBSERVATIONS or line.step_latency_s([S, S]) is None
        line.observe([S] * (1 + number % 3), 0.01 * (1 + number % 3), 0.01, is_first=False)
    assert line.step_latency_s([S, S]) == pytest.approx(0.02, rel=0.02)
    assert line.step_latency_s([S, L]) is None
    assert line.step_latency_s([]) is None
    line.observe([L], 0.04, 0.01, is_first=False)
    assert line.step_latency_s([L]) is None
    for _ in range(3000):
        line.observe([L], 0.04, 0.01, is_first=False)
    assert line.step_latency_s([L]) == pytest.approx(0.04, rel=0.02)
    assert line.step_latency_s([S]) is None, "a resolution that nobody has asked for lately is forgotten"


@pytest.mark.parametrize("faded", [1e-30, 1e-308, 1e-322])
def test_resolutions_unseen_for_hours_do_not_distort_the_line(faded: float) -> None:
    line, generator = LearntLine(), random.Random(2)
    for _ in range(400):
        batch = generator.choices((S, M), k=generator.randint(1, 9))
        line.observe(batch, cost_s(batch), 0.05, is_first=False)
    state = line.state
    squares = [[*values, faded] for values in [*state.squares, [faded] * len(state.products)]]
    products, seen = [*state.products, faded], [*state.seen, 0.0]
    again = LearntLine(replace(state, sizes=[*state.sizes, str(L)], squares=squares, products=products, seen=seen))
    for _ in range(40):
        batch = generator.choices((S, M), k=generator.randint(1, 9))
        again.observe(batch, cost_s(batch), 0.05, is_first=False)
    assert again.step_latency_s([S, S, M]) == pytest.approx(cost_s([S, S, M]), rel=0.05)
    assert again.step_latency_s([S, L]) is None


def test_line_follows_the_mean_of_reusing_and_full_steps() -> None:
    """With a cache, a step takes a thirtieth of its time without, or all of it."""
    line, generator = LearntLine(), random.Random(0)
    for number in range(800):
        batch = some_batch(generator)
        line.observe(batch, cost_s(batch) * (1.0 if number % 4 == 0 else 1 / 30), cost_s(batch) / 3, is_first=False)
    for batch in ([S] * 3, [M] * 6, [S, S, M, L, L]):
        assert line.step_latency_s(batch) == pytest.approx(cost_s(batch) * (1 + 3 / 30) / 4, rel=0.2)


def test_edits_count_by_their_computed_share() -> None:
    line, generator = LearntLine(), random.Random(0)
    for _ in range(400):
        batch = [work_of(resolution_of(work), generator.choice([0.1, 0.4, 1.0])) for work in some_batch(generator)]
        line.observe(batch, cost_s(batch), 0.05, is_first=False)
    edit = [Work(*L, 0.25), M]
    assert line.step_latency_s(edit) == pytest.approx(cost_s(edit), rel=0.03)


def test_line_continues_from_saved_state() -> None:
    line = LearntLine()
    observe_steps(line, 203)
    state = line.state
    kept = LineState(**json.loads(json.dumps(asdict(state))))
    again = LearntLine(kept)
    assert again.state == state
    observe_steps(line, 5, seed=1)
    observe_steps(again, 8, seed=1)
    assert LearntLine(line.state).step_latency_s([S, L]) == pytest.approx(again.step_latency_s([S, L]), rel=0.01)
    damages: list[tuple[Callable[[LineState], LineState], str]] = [
        (lambda state: replace(state, sizes=state.sizes[:1]), "what was learnt of 1 resolutions has other columns"),
        (lambda state: replace(state, seen=[]), "has other columns"),
        (lambda state: replace(state, squares=state.squares[:2]), "has other columns"),
        (lambda state: replace(state, products=[math.nan, *state.products[1:]]), "is not finite"),
        (lambda state: replace(state, steps=math.inf), "is not finite"),
        (lambda state: replace(state, squares=[[-each for each in row] for row in state.squares]), "sum of squares"),
        (lambda state: replace(state, sizes=["huge", *state.sizes[1:]]), "huge"),
    ]
    for damage, message in damages:
        with pytest.raises(ValueError, match=message):
            LearntLine(damage(state))


class Table:
    """Step latencies with one of the errors that tables have."""

    def __init__(self, kind: str) -> None:
        self._kind, self._random, self._noisy = kind, random.Random(3), dict[Any, float]()

    def step_latency_s(self, active: Sequence[Any]) -> float:
        batch = tuple(sorted(active))
        match self._kind:
            case "right":
                return cost_s(batch)
            case "pure":  # mixing is free
                return 0.022 + sum(map(OWN_S.__getitem__, batch))
            case "half":
                return 0.5 * cost_s(batch)
            case "double":
                return 2 * cost_s(batch)
            case "mixing":  # mixing costs three times as much
                return cost_s(batch) + 0.024 * len({*batch})
            case "noise":
                return self._noisy.setdefault(batch, cost_s(batch) * math.exp(self._random.gauss(0, 0.3)))
            case _:  # the table of another machine, which is fast with large images
                return 0.003 + sum(OWN_S[size] * (0.3 if size == L else 1.2) for size in batch)


def errors_of(kind: str, count: int = 500) -> tuple[list[float], OnlineCorrection]:
    """Return |log(predicted / measured)| for steps that vary by a tenth, each predicted before it is measured."""
    correction, generator = OnlineCorrection(Table(kind)), random.Random(0)
    errors: list[float] = []
    batch: list[Any] = some_batch(generator)
    for _ in range(count):
        is_first = generator.random() < 0.2
        batch = some_batch(generator) if is_first else batch
        measured_s = (cost_s(batch) + is_first * FIRST_S) * math.exp(generator.gauss(0, 0.1))
        errors.append(abs(math.log(correction.step_latency_s(batch) / measured_s)))
        correction.observe(batch, measured_s, is_first=is_first)
    return errors, correction


@pytest.mark.parametrize("kind", ["pure", "half", "double", "mixing", "noise", "another"])
def test_wrong_table_is_corrected_within_a_minute_of_steps(kind: str) -> None:
    right, _ = errors_of("right")
    wrong, correction = errors_of(kind)
    assert sum(wrong[:50]) > 1.2 * sum(right[:50]), "the table is not wrong"
    assert sum(wrong[200:]) < 1.1 * sum(right[200:])
    drift = correction.drift()
    assert drift.first_error is not None
    assert drift.mean_error is not None
    assert drift.mean_error < drift.first_error
    assert kind in ("half", "double") or drift.line_share > 0.9


def test_correct_table_stays_accurate() -> None:
    right, correction = errors_of("right", 2000)
    noise = math.sqrt(2 / math.pi) * 0.1
    assert sum(right[500:]) / 1500 < 1.35 * noise
    assert correction.step_latency_s([S, L]) == pytest.approx(cost_s([S, L]) + 0.2 * FIRST_S, rel=0.1)


def test_line_is_used_only_near_the_table() -> None:
    """A line may predict anything for batches far from those served."""
    correction = OnlineCorrection(Table("right"))
    for number in range(300):
        correction.observe([S] * (1 + number % 2), 0.2 - 0.1 * (number % 2), is_first=False)
    assert correction.step_latency_s([S] * 16) <= 4.001 * cost_s([S] * 16) * correction.scale
