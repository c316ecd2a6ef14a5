"""The online correction of step latencies: it follows the machine, and single steps do not lead it astray."""

import math
import random
from collections.abc import Sequence

import pytest

from patchedserve.data.resolution import Resolution
from patchedserve.training.online_correction import CorrectionSettings, OnlineCorrection

S, L = Resolution(128, 128), Resolution(256, 256)


class PixelLaw:
    """A predictor by a simple law."""

    def step_latency_s(self, active: Sequence[Resolution]) -> float:
        return 0.01 + sum(size.pixels for size in active) * 1e-7


def steps(count: int, factor: float, *, noise: float = 0.0, seed: int = 0) -> list[tuple[list[Resolution], float]]:
    generator = random.Random(seed)
    batches = [[S] * generator.randint(1, 8) + [L] * generator.randint(0, 8) for _ in range(count)]
    return [
        (batch, PixelLaw().step_latency_s(batch) * factor * math.exp(generator.gauss(0, noise))) for batch in batches
    ]


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.0, 1.3, 3.0])
def test_converges_to_the_factor_of_the_machine(factor: float) -> None:
    correction = OnlineCorrection(PixelLaw())
    for batch, measured_s in steps(400, factor, noise=0.05):
        correction.observe(batch, measured_s)
    drift = correction.drift()
    assert drift.num_observations == 400
    assert drift.scale == correction.scale == pytest.approx(factor, rel=0.03)
    assert correction.step_latency_s([S, L]) == pytest.approx(PixelLaw().step_latency_s([S, L]) * correction.scale)
    assert drift.mean_error is not None
    assert drift.mean_uncorrected_error is not None
    # What the noise alone gives on average: 0.05 * sqrt(2 / pi).
    assert drift.mean_error < 0.05
    assert drift.mean_uncorrected_error == pytest.approx(abs(1 / factor - 1), abs=0.06)


def test_follows_a_change_at_the_pace_of_its_weight() -> None:
    correction = OnlineCorrection(PixelLaw(), CorrectionSettings(weight=0.05))
    for batch, measured_s in steps(100, 1.0):
        correction.observe(batch, measured_s)
    assert correction.scale == pytest.approx(1.0)
    scales = []
    for batch, measured_s in steps(100, 2.0):
        correction.observe(batch, measured_s)
        scales.append(correction.scale)
    assert scales == sorted(scales)
    # Two of the five steps of a median must have changed before it does; then a half of the rest is made up in 14.
    assert scales[1] == pytest.approx(1.0)
    assert scales[2 + 13] == pytest.approx(math.sqrt(2), rel=0.02)
    assert scales[-1] == pytest.approx(2.0, rel=0.01)


def test_single_outliers_change_nothing() -> None:
    correction = OnlineCorrection(PixelLaw())
    for number, (batch, measured_s) in enumerate(steps(200, 1.2)):
        # Every fourth step is the first of a new batch, and one took a minute.
        outlier = 60.0 if number == 100 else measured_s * 3 if number % 4 == 0 else measured_s
        correction.observe(batch, outlier)
    assert correction.scale == pytest.approx(1.2, rel=0.001)


def test_a_slow_first_step_does_not_count_in_full() -> None:
    correction = OnlineCorrection(PixelLaw())
    correction.observe([S], 50.0)
    assert correction.scale == 1.0
    for batch, measured_s in steps(4, 1.0):
        correction.observe(batch, measured_s)
    assert correction.scale == pytest.approx(1.0)


@pytest.mark.parametrize(("factor", "bound"), [(1000.0, 4.0), (1e-6, 0.25)])
def test_factor_is_bounded_and_comes_back(factor: float, bound: float) -> None:
    correction = OnlineCorrection(PixelLaw())
    for batch, measured_s in steps(500, factor):
        correction.observe(batch, measured_s)
        assert 0.25 <= correction.scale <= 4.0
    assert correction.scale == pytest.approx(bound)
    for batch, measured_s in steps(200, 1.0):
        correction.observe(batch, measured_s)
    # No time is lost on what lies beyond the bound.
    assert correction.scale == pytest.approx(1.0, rel=0.01)


def test_drift_forgets_what_is_long_past() -> None:
    correction = OnlineCorrection(PixelLaw(), CorrectionSettings(recent=10))
    assert correction.drift().mean_error is None
    for factor, expected in ((2.0, 0.5), (1.0, 0.0)):
        for batch, measured_s in steps(10, factor):
            correction.observe(batch, measured_s)
        assert correction.drift().mean_uncorrected_error == pytest.approx(expected)
    assert correction.drift().num_observations == 20


@pytest.mark.parametrize("measured_s", [0.0, -1.0, math.nan, math.inf])
def test_impossible_times_are_our_fault(measured_s: float) -> None:
    correction = OnlineCorrection(PixelLaw())
    with pytest.raises(ValueError, match="took"):
        correction.observe([S], measured_s)
    with pytest.raises(ValueError, match="a step of 0 requests"):
        correction.observe([], 1.0)
    assert correction.drift().num_observations == 0


@pytest.mark.parametrize(
    "wrong",
    [{"weight": 0.0}, {"weight": 1.1}, {"median_of": 0}, {"recent": 0}, {"max_scale": 0.9}, {"max_scale": math.inf}],
)
def test_wrong_settings(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        CorrectionSettings(**wrong)  # type: ignore[arg-type]
