"""Diurnal and recorded arrivals: rates and shapes."""

import math
from itertools import islice, pairwise

import numpy as np
import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.traces.arrivals import diurnal_arrivals, gamma_arrivals, scaled_arrivals
from patchedserve.data.traces.traces import TraceConfig, generate_trace


def diurnal(
    count: int, amplitude: float = 0.8, seed: int = 0, rate: float = 5.0, period_s: float = 100.0
) -> np.ndarray:
    return np.array(list(islice(diurnal_arrivals(np.random.default_rng(seed), rate, amplitude, period_s), count)))


def test_diurnal_time_change_is_exact() -> None:
    # Exactness: the integral of the rate maps the arrivals to those of a Poisson process of rate 1.
    times = diurnal(2000)
    integral = 5.0 * (times + 0.8 * 100 / (2 * math.pi) * (1 - np.cos(2 * math.pi * times / 100)))
    unit = np.cumsum(np.random.default_rng(0).standard_exponential(2000))
    assert integral == pytest.approx(unit, rel=1e-9)
    assert (np.diff(times) > 0).all()


def test_diurnal_rate_has_the_requested_swing() -> None:
    times = diurnal(20_000)
    # 40 days of 100 s; the rate averages 5, and 5 * (1 +- 0.8 * 2 / pi) over the halves of a day.
    assert len(times) / times[-1] == pytest.approx(5.0, rel=0.03)
    busy = np.mean((times % 100) < 50)
    assert busy == pytest.approx((1 + 0.8 * 2 / math.pi) / 2, abs=0.01)


def test_diurnal_without_swing_is_poisson() -> None:
    rng = np.random.default_rng(3)
    assert diurnal(50, amplitude=0.0, seed=3) == pytest.approx(list(islice(gamma_arrivals(rng, 5.0, 1.0), 50)))


def test_recorded_arrivals_keep_their_shape_at_any_rate() -> None:
    recorded = [10.0, 10.5, 14.0, 14.0, 20.0]
    scaled = scaled_arrivals(recorded, 2.0)
    # 4 gaps in 10 s are 0.4 per second; the scaled trace is five times as fast.
    assert scaled == pytest.approx([0.0, 0.1, 0.8, 0.8, 2.0])
    for arrivals in ([], [1.0], [3.0, 3.0]):
        with pytest.raises(UsageError, match=f"{len(arrivals)} recorded arrivals span no time"):
            scaled_arrivals(arrivals, 1.0)


def test_traces_of_both_kinds() -> None:
    config = TraceConfig(kind="diurnal", request_rate=4.0, num_prompts=None, duration_s=200.0, period_s=100.0, seed=2)
    requests = generate_trace(config, ["a", "b"])
    assert requests == generate_trace(config, ["a", "b"])
    assert 650 < len(requests) < 950
    assert all(one.arrival_s < other.arrival_s for one, other in pairwise(requests))

    recorded = TraceConfig(kind="recorded", request_rate=2.0, num_prompts=None, arrivals_s=(0.0, 0.5, 4.0, 4.0, 10.0))
    assert [one.arrival_s for one in generate_trace(recorded, ["a"])] == pytest.approx([0.0, 0.1, 0.8, 0.8, 2.0])
    # The first requests have the requested rate.
    some = TraceConfig(kind="recorded", request_rate=2.0, num_prompts=3, arrivals_s=(0.0, 0.5, 4.0, 4.0, 10.0))
    assert [one.arrival_s for one in generate_trace(some, ["a"])] == pytest.approx([0.0, 0.125, 1.0])
    # The contents of requests do not depend on their arrival times.
    poisson = generate_trace(TraceConfig(num_prompts=3), ["a", "b"])
    assert [one.seed for one in generate_trace(some, ["a", "b"])] == [one.seed for one in poisson]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "diurnal", "amplitude": 1.1}, "amplitude is 1.1, but it must be from 0 to 1"),
        ({"kind": "diurnal", "period_s": 0.0}, "period is 0 s"),
        ({"kind": "diurnal", "request_rate": math.inf}, "request rate is inf, but a diurnal trace needs a finite one"),
        ({"kind": "diurnal", "num_prompts": None}, "the trace never ends"),
        ({"kind": "recorded"}, "a recorded trace needs arrivals"),
        ({"kind": "recorded", "arrivals_s": (1.0,), "cv": 2.0}, "cv is 2, but a recorded trace takes none: use gamma"),
        ({"kind": "recorded", "arrivals_s": (0.0, 1.0), "request_rate": 0.0}, "request rate is 0"),
    ],
)
def test_invalid_settings_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TraceConfig(**fields)
