"""Linear step latencies of edits: a fit recovers the coefficients, and a step takes the sum of its two passes."""

import random

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.resolution import Resolution
from patchedserve.data.work import Work
from patchedserve.serving.editing.step_latency import EditStepLatency, terms_of
from patchedserve.serving.scheduling.step_latency import TableLatency

S, L = Resolution(128, 128), Resolution(256, 256)
WHOLE = TableLatency({(S,): 0.02, (S, S): 0.03, (L,): 0.05})
LINE = (0.01, 0.002, 0.003, 0.02, 0.004)


def test_terms_match_manual_values() -> None:
    assert terms_of([Work(256, 256, 0.5), Work(256, 512, 0.25)]) == (1.0, 2.0, 3.0, 1.0, 1.5)


def test_known_line_is_recovered() -> None:
    rng, truth = random.Random(0), EditStepLatency(WHOLE, LINE)
    batches = [
        tuple(Work(*rng.choice((S, L)), rng.uniform(0.05, 0.6)) for _ in range(rng.randint(1, 8))) for _ in range(60)
    ]
    found = EditStepLatency.fitted(WHOLE, {batch: truth.step_latency_s(batch) for batch in batches})
    assert found.coefficients == pytest.approx(LINE, rel=1e-6)


def test_step_latency_is_the_sum_of_both_passes() -> None:
    latency, part = EditStepLatency(WHOLE, LINE), Work(256, 256, 0.5)
    alone_s = 0.01 + 0.002 + 0.003 + 0.01 + 0.002
    assert latency.step_latency_s([part]) == pytest.approx(alone_s)
    assert latency.step_latency_s([S, part, S]) == pytest.approx(0.03 + alone_s)
    assert latency.step_latency_s([L]) == 0.05


@pytest.mark.parametrize("measured", [{}, {(): 0.1}, {(Work(256, 256, 0.5),): 0.0}])
def test_uninformative_steps_are_refused(measured: dict[tuple[Work, ...], float]) -> None:
    with pytest.raises(UsageError, match="at least one, each of an edit and longer than 0 s"):
        EditStepLatency.fitted(WHOLE, measured)
