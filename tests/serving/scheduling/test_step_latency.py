"""Step latencies from tables: exact where measured, plausible in between, a clear error where nothing is known."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.resolution import Resolution
from patchedserve.data.work import work_of
from patchedserve.serving.scheduling.step_latency import MemoisedLatency, PerResolutionLatency, TableLatency

S, M, L = Resolution(128, 128), Resolution(192, 192), Resolution(256, 256)


def true_s(batch: Sequence[Resolution]) -> float:
    """Overhead until the device is full, then work: a curve that no line can follow."""
    return 0.002 * len(set(batch)) + max(0.02, sum({S: 0.003, M: 0.006, L: 0.01}[size] for size in batch))


def random_batch(rng: random.Random) -> tuple[Resolution, ...]:
    return tuple(rng.choice((S, M, L)) for _ in range(rng.randint(1, 16)))


def test_measured_batches_use_their_measured_latency() -> None:
    table = TableLatency({(S,): 0.02, (L, S): 0.05, (S, S, L): 0.04})
    assert table.step_latency_s([S]) == 0.02
    assert table.step_latency_s([S, L]) == table.step_latency_s((L, S)) == 0.05
    assert table.step_latency_s([S, L, S]) == 0.04
    assert (table.resolutions, table.max_batch_size) == ((S, L), 3)


def test_known_line_is_recovered() -> None:
    def line_s(batch: Sequence[Resolution]) -> float:
        return 0.01 + 0.003 * len(set(batch)) + sum({S: 0.002, M: 0.005, L: 0.009}[size] for size in batch)

    rng = random.Random(0)
    table = TableLatency({tuple(sorted(batch)): line_s(batch) for batch in (random_batch(rng) for _ in range(40))})
    for _ in range(200):
        batch = random_batch(rng)
        assert table.step_latency_s(batch) == pytest.approx(line_s(batch), rel=1e-6)


def test_between_measured_batches_the_error_is_small() -> None:
    rng = random.Random(1)
    table = TableLatency({tuple(sorted(batch)): true_s(batch) for batch in (random_batch(rng) for _ in range(300))})
    errors = [abs(table.step_latency_s(batch) / true_s(batch) - 1) for batch in (random_batch(rng) for _ in range(300))]
    # The line alone is off by 8 % on average.
    assert sum(errors) / len(errors) < 0.04
    assert max(errors) < 0.35


def test_more_requests_than_measured_take_longer() -> None:
    table = TableLatency({(S,): 0.02, (S, S): 0.03, (S,) * 4: 0.05})
    table.step_latency_s((S,) * 3)
    assert (table.max_batch_size, table.num_too_large) == (4, 0)
    assert table.step_latency_s((S,) * 8) > 0.05
    assert table.num_too_large == 1
    assert table.step_latency_s((S,) * 16) > table.step_latency_s((S,) * 8)
    # The latency of one request does not predict that of two.
    with pytest.raises(
        UsageError, match="asked for a batch of 2 requests, but all batches of the latency table have 1"
    ):
        TableLatency({(S,): 0.02, (L,): 0.03}).step_latency_s((S, S))


@pytest.mark.parametrize(
    ("latencies", "message"),
    [
        ({}, "the latency table is empty"),
        ({(): 1.0}, "a batch of no requests"),
        ({(S,): 0.0}, "the latency of 128x128 is 0 s, but it must be above 0"),
        ({(S,): float("inf")}, "is inf s"),
        ({(S, L): 1.0, (L, S): 1.0}, "has 128x128, 256x256 twice"),
    ],
)
def test_bad_tables(latencies: dict[tuple[Resolution, ...], float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TableLatency(latencies)


def test_references_count_as_parts_of_an_image() -> None:
    table = TableLatency({(S,) * count: 0.01 + 0.02 * count for count in (1, 2, 4)})
    assert table.step_latency_s([work_of(S, 1.5)]) == pytest.approx(0.04)
    assert table.step_latency_s([work_of(S, 2.0)]) == pytest.approx(table.step_latency_s([S, S]))
    with pytest.raises(UsageError, match=r"knows nothing of 50.0% of 128x128"):
        table.step_latency_s([work_of(S, 0.5)])
    plain = PerResolutionLatency(table)
    assert plain.step_latency_s([S, work_of(S, 1.5), work_of(S, 1.5)]) == pytest.approx(0.03 + 0.07)


def test_unknown_sizes_and_empty_batches_are_refused() -> None:
    table = TableLatency({(S,): 0.02, (L, L): 0.05})
    with pytest.raises(UsageError, match="knows nothing of 192x192, but only of 128x128, 256x256"):
        table.step_latency_s([S, M])
    with pytest.raises(UsageError, match="no requests has no step latency"):
        table.step_latency_s([])


def test_plain_engine_runs_one_pass_per_resolution() -> None:
    table = TableLatency({(S, S): 0.03, (L,): 0.04, (L, S, S): 0.05})
    assert table.step_latency_s([S, L, S]) == 0.05
    assert PerResolutionLatency(table).step_latency_s([S, L, S]) == pytest.approx(0.07)


def test_cached_latency_is_predicted_once_per_batch() -> None:
    asked: list[tuple[Resolution, ...]] = []

    class Counting:
        def step_latency_s(self, active: Sequence[Any]) -> float:
            asked.append(tuple(active))
            return true_s(active)

    memory = MemoisedLatency(Counting())
    for batch in ([S, L], (L, S), [L, S], [S], (S,)):
        assert memory.step_latency_s(batch) == true_s(batch)
    assert asked == [(S, L), (S,)]
