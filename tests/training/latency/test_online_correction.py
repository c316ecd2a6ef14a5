"""The online correction of step latencies: it follows the machine in the sum of all steps, except outliers."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from patchedserve.data.resolution import Resolution
from patchedserve.training.latency.online_correction import LEAST_SCALE, MOST_SCALE, RECENT, WEIGHT, OnlineCorrection

S, L = Resolution(128, 128), Resolution(256, 256)


class PixelLaw:
    """A predictor with a simple law."""

    def step_latency_s(self, active: Sequence[Any]) -> float:
        return 0.01 + sum(size.pixels for size in active) * 1e-7


def steps(count: int, factor: float, *, noise: float = 0.0, seed: int = 0) -> list[tuple[list[Resolution], float]]:
    generator = random.Random(seed)
    batches = [[S] * generator.randint(1, 8) + [L] * generator.randint(0, 8) for _ in range(count)]
    return [
        (batch, PixelLaw().step_latency_s(batch) * factor * math.exp(generator.gauss(0, noise))) for batch in batches
    ]


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.0, 1.3, 3.0])
def test_correction_converges_to_the_machine_factor(factor: float) -> None:
    correction = OnlineCorrection(PixelLaw())
    for batch, measured_s in steps(800, factor, noise=0.05):
        correction.observe(batch, measured_s)
    drift = correction.drift()
    assert drift.num_observations == 800
    assert drift.scale == correction.scale == pytest.approx(factor, rel=0.03)
    assert correction.step_latency_s([S, L]) == pytest.approx(PixelLaw().step_latency_s([S, L]) * factor, rel=0.03)
    assert drift.mean_error is not None
    assert drift.mean_uncorrected_error is not None
    # The noise alone has a mean error of 0.05 * sqrt(2 / pi).
    assert drift.mean_error < 0.05
    assert drift.mean_uncorrected_error == pytest.approx(abs(1 / factor - 1), abs=0.06)


def test_correction_follows_changes_by_its_weight() -> None:
    correction = OnlineCorrection(PixelLaw())
    for _ in range(100):
        correction.observe([S], PixelLaw().step_latency_s([S]))
    assert correction.scale == pytest.approx(1.0)
    scales = []
    for _ in range(300):
        correction.observe([S], 2 * PixelLaw().step_latency_s([S]))
        scales.append(correction.scale)
    assert scales == sorted(scales)
    # Half of the change is corrected after log 0.5 / log 0.98 = 34.3 steps.
    assert math.log(0.5) / math.log(1 - WEIGHT) == pytest.approx(34.3, abs=0.05)
    assert scales[33] < 1.5 < scales[34]
    assert scales[-1] == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize("costs", [(0.2, 0.2, 0.2, 1.0), (1.0, 1.0, 1.0, 3.0), (0.5,)])
def test_steps_of_a_request_add_up(costs: tuple[float, ...]) -> None:
    """Among cached steps one in four is full, and some steps are first: their sum is what counts for a deadline."""
    correction = OnlineCorrection(PixelLaw())
    trace = [(batch, s * costs[number % len(costs)]) for number, (batch, s) in enumerate(steps(1200, 1.2))]
    promised_s = measured_s = 0.0
    for number, (batch, step_s) in enumerate(trace):
        if number >= 600:
            promised_s += correction.step_latency_s(batch)
            measured_s += step_s
        correction.observe(batch, step_s)
    assert promised_s == pytest.approx(measured_s, rel=0.02)
    assert correction.scale == pytest.approx(1.2 * sum(costs) / len(costs), rel=0.1)


def test_time_between_steps_counts_for_planning_but_not_for_the_table() -> None:
    correction = OnlineCorrection(PixelLaw())
    for number, (batch, measured_s) in enumerate(steps(400, 1.0)):
        # Every fourth step is followed by a gap of 1.2 times the step.
        correction.observe(batch, measured_s, between_s=1.2 * measured_s if number % 4 == 0 else 0.0)
    assert correction.pace == pytest.approx(1.3, abs=0.05)
    assert correction.step_latency_s([S]) == pytest.approx(correction.pace * PixelLaw().step_latency_s([S]), rel=0.02)
    drift = correction.drift()
    assert (drift.scale, drift.mean_error) == (pytest.approx(1.0), pytest.approx(0.0, abs=0.01))
    assert drift.pace == correction.pace
    # A gap of an hour, in which the process was stopped, counts as five steps.
    before = correction.pace
    correction.observe([S], PixelLaw().step_latency_s([S]), between_s=3600.0)
    assert before < correction.pace < before + 0.25
    assert OnlineCorrection(PixelLaw(), pace=1.5).step_latency_s([S]) == 1.5 * PixelLaw().step_latency_s([S])
    with pytest.raises(ValueError, match=r"pace is 0\.5, but it must be from 1 to 4"):
        OnlineCorrection(PixelLaw(), pace=0.5)


def test_outlier_counts_as_a_long_step() -> None:
    correction = OnlineCorrection(PixelLaw())
    for number, (batch, measured_s) in enumerate(steps(400, 1.2)):
        correction.observe(batch, 60.0 if number == 200 else measured_s)
        if number == 199:
            assert correction.scale == pytest.approx(1.2, rel=0.02)
        if number == 200:
            assert 1.2 < correction.scale < 1.2 * 1.25
    assert correction.scale == pytest.approx(1.2, rel=0.01)


def test_slow_first_step_is_not_fully_counted() -> None:
    correction = OnlineCorrection(PixelLaw())
    correction.observe([S], 50.0)
    assert correction.scale == pytest.approx(1 + 0.02 * 4)


@pytest.mark.parametrize(("factor", "bound"), [(1000.0, MOST_SCALE), (1e-6, LEAST_SCALE)])
def test_factor_is_bounded_and_recovers(factor: float, bound: float) -> None:
    correction = OnlineCorrection(PixelLaw())
    for batch, measured_s in steps(500, factor):
        correction.observe(batch, measured_s)
        assert LEAST_SCALE <= correction.scale <= MOST_SCALE
    assert correction.scale == pytest.approx(bound)
    for batch, measured_s in steps(400, 1.0):
        correction.observe(batch, measured_s)
    # The factor recovers from the bound without delay.
    assert correction.scale == pytest.approx(1.0, rel=0.01)


def test_drift_forgets_old_steps() -> None:
    correction = OnlineCorrection(PixelLaw())
    assert correction.drift().mean_error is None
    for factor, expected in ((2.0, 0.5), (1.0, 0.0)):
        for batch, measured_s in steps(RECENT, factor):
            correction.observe(batch, measured_s)
        assert correction.drift().mean_uncorrected_error == pytest.approx(expected)
    assert correction.drift().num_observations == 2 * RECENT


@pytest.mark.parametrize("measured_s", [0.0, -1.0, math.nan, math.inf])
def test_impossible_times_are_internal_errors(measured_s: float) -> None:
    correction = OnlineCorrection(PixelLaw())
    with pytest.raises(ValueError, match="took"):
        correction.observe([S], measured_s)
    with pytest.raises(ValueError, match="a step of 0 requests"):
        correction.observe([], 1.0)
    assert correction.drift().num_observations == 0


def test_time_after_the_last_step_is_learnt() -> None:
    correction = OnlineCorrection(PixelLaw())
    assert correction.after_steps_s(S) is None
    correction.observe_end(S, 0.4)
    assert correction.after_steps_s(S) == 0.4
    for _ in range(7):
        correction.observe_end(S, 0.2)
    assert correction.after_steps_s(S) == pytest.approx(0.3, abs=0.005)
    assert correction.after_steps_s(L) is None


def test_stall_during_decoding_is_forgotten() -> None:
    correction = OnlineCorrection(PixelLaw())
    for _ in range(20):
        correction.observe_end(S, 0.05)
    correction.observe_end(S, 20.0)
    assert correction.after_steps_s(S) == pytest.approx(0.05 + 0.1 * (0.25 - 0.05)), "counts as five times as long"
    # The first value, with no other to compare it with.
    correction = OnlineCorrection(PixelLaw(), after_s={S: 20.0})
    correction.observe_end(S, 0.05)
    assert (correction.after_steps_s(S) or 0.0) < 0.25
    # A decoder that took no time can become slower.
    correction = OnlineCorrection(PixelLaw())
    correction.observe_end(S, 0.0)
    correction.observe_end(S, 0.05)
    assert correction.after_steps_s(S) == 0.05
