"""Random traces: arrivals with the right distribution, and contents independent of them."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution, parse_list
from patchedserve.data.traces.draws import parse_mix
from patchedserve.data.traces.traces import TraceConfig, assign_slos, generate_trace, limit_trace, retime

SIZES = parse_list("128,192,256")
PROMPTS = [f"prompt {i}" for i in range(10)]
BASE = TraceConfig(resolutions=SIZES)


def gaps_of(config: TraceConfig) -> np.ndarray:
    return np.diff([0.0, *(request.arrival_s for request in generate_trace(config, PROMPTS))])


def content(requests: list[Request]) -> list[Request]:
    return [replace(request, arrival_s=0.0) for request in requests]


@pytest.mark.product
@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.2, 3.0, 1000.0])
@pytest.mark.parametrize(("kind", "cv"), [("poisson", 1.0), ("gamma", 0.3), ("gamma", 1.0), ("gamma", 3.0)])
def test_gaps_have_the_requested_mean_and_variation(kind: Any, cv: float, rate: float) -> None:
    count = 20_000
    gaps = gaps_of(replace(BASE, kind=kind, cv=cv, request_rate=rate, num_prompts=count))
    error = 4 / math.sqrt(count)  # four standard errors of a mean of gaps with variation 1
    assert gaps.mean() * rate == pytest.approx(1, abs=error * cv)
    # The fourth moment of gamma gaps makes the error of the variation grow with the variation.
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=error * (1 + cv))


def test_poisson_gaps_are_exponential_and_not_clipped() -> None:
    gaps = np.sort(gaps_of(replace(BASE, request_rate=2.0, num_prompts=20_000)))
    expected = 1 - np.exp(-2.0 * gaps)
    distance = np.abs(expected - np.arange(1, len(gaps) + 1) / len(gaps)).max()
    assert distance < 1.63 / math.sqrt(len(gaps)), "Kolmogorov-Smirnov at 1 %"
    assert gaps.max() > 4, "vidur cuts gaps at three means; ours go on"


def test_first_request_arrives_after_one_gap_and_times_increase() -> None:
    for seed in range(50):
        arrivals = [request.arrival_s for request in generate_trace(replace(BASE, seed=seed), PROMPTS)]
        assert arrivals[0] > 0
        assert arrivals == sorted(arrivals)


def test_trace_depends_only_on_the_seed() -> None:
    one, two = (generate_trace(replace(BASE, seed=seed), PROMPTS) for seed in (0, 1))
    assert one == generate_trace(BASE, PROMPTS)
    assert [r.arrival_s for r in one] != [r.arrival_s for r in two]
    assert [r.seed for r in one] != [r.seed for r in two]
    assert [r.request_id for r in one] == list(range(32))


@pytest.mark.parametrize("change", [{"request_rate": 7.5}, {"kind": "gamma", "cv": 4.0}, {"request_rate": math.inf}])
def test_arrival_process_does_not_change_request_contents(change: dict[str, Any]) -> None:
    assert content(generate_trace(replace(BASE, **change), PROMPTS)) == content(generate_trace(BASE, PROMPTS))


def test_rate_scales_the_same_arrivals() -> None:
    slow, fast = (generate_trace(replace(BASE, request_rate=rate), PROMPTS) for rate in (1.0, 4.0))
    assert [r.arrival_s for r in slow] == pytest.approx([4 * r.arrival_s for r in fast])


def test_shorter_trace_is_a_prefix_of_the_longer_one() -> None:
    assert generate_trace(replace(BASE, num_prompts=100), PROMPTS)[:32] == generate_trace(BASE, PROMPTS)


def test_mix_changes_only_resolutions() -> None:
    one, two = generate_trace(BASE, PROMPTS), generate_trace(replace(BASE, mix=(0, 0, 1)), PROMPTS)
    assert {r.resolution for r in two} == {SIZES[2]}
    assert [replace(r, resolution=SIZES[2]) for r in one] == two


def test_resolutions_and_prompts_are_distributed_fairly() -> None:
    config = replace(BASE, mix=(5, 3, 2), num_prompts=10_000, num_inference_steps=(10, 20, 30))
    trace = generate_trace(config, PROMPTS)
    shares = Counter((request.resolution, request.num_inference_steps) for request in trace)
    for size, steps, weight in zip(SIZES, (10, 20, 30), (0.5, 0.3, 0.2), strict=True):
        assert shares[size, steps] / len(trace) == pytest.approx(weight, abs=0.02)
    for i in range(0, 100, len(PROMPTS)):
        assert {request.prompt for request in trace[i : i + len(PROMPTS)]} == set(PROMPTS)
    assert len({request.seed for request in trace}) > 9_990


def test_equal_mix_is_the_default() -> None:
    shares = Counter(request.resolution for request in generate_trace(replace(BASE, num_prompts=9_000), PROMPTS))
    assert all(count / 9_000 == pytest.approx(1 / 3, abs=0.02) for count in shares.values())


def test_trace_ends_at_its_duration_or_count() -> None:
    long = generate_trace(replace(BASE, num_prompts=100), PROMPTS)
    cut = generate_trace(replace(BASE, num_prompts=100, duration_s=20.0), PROMPTS)
    assert cut == [request for request in long if request.arrival_s <= 20]
    assert 0 < len(cut) < 100
    assert generate_trace(replace(BASE, num_prompts=None, duration_s=20.0), PROMPTS) == cut
    assert len(generate_trace(replace(BASE, num_prompts=3, duration_s=1e6), PROMPTS)) == 3


def test_infinite_rate_makes_all_arrive_at_once() -> None:
    assert {r.arrival_s for r in generate_trace(replace(BASE, request_rate=math.inf), PROMPTS)} == {0.0}


def test_config_values_reach_the_requests() -> None:
    config = replace(BASE, num_inference_steps=7, guidance_scale=2.5, slo_s=9.0)
    assert {(r.num_inference_steps, r.guidance_scale, r.slo_s) for r in generate_trace(config, PROMPTS)} == {
        (7, 2.5, 9)
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "uniform"}, "trace kind is 'uniform', but it must be one of poisson, gamma"),
        ({"request_rate": 0.0}, "request rate is 0, but it must be more than 0"),
        ({"request_rate": -2.0}, "request rate is -2"),
        ({"request_rate": math.nan}, "request rate is nan"),
        ({"num_prompts": 0}, "number of prompts is 0"),
        ({"duration_s": 0.0}, "duration is 0 s"),
        ({"duration_s": math.inf}, "duration is inf s"),
        ({"num_prompts": None}, "the trace never ends"),
        ({"num_prompts": None, "duration_s": 5.0, "request_rate": math.inf}, "the trace never ends"),
        ({"kind": "gamma", "cv": 0.0}, "cv is 0"),
        ({"kind": "gamma", "cv": math.nan}, "cv is nan"),
        ({"cv": 2.0}, "a poisson trace has a cv of 1: use gamma"),
        ({"resolutions": ()}, "there are no resolutions"),
        ({"resolutions": (Resolution(130, 128),)}, "width is 130"),
        ({"mix": (1.0, 1.0)}, "mix has 2 weights, but there are 3 resolutions"),
        ({"mix": (1.0, -1.0, 1.0)}, "every weight must be a finite number that is not negative"),
        ({"mix": (0.0, 0.0, 0.0)}, "at least one weight must be more than 0"),
        ({"num_inference_steps": 0}, "num_inference_steps is 0"),
        ({"num_inference_steps": (1, 2)}, "2 numbers of steps are given for 3 resolutions"),
        ({"guidance_scale": -1.0}, "guidance_scale is -1.0"),
        ({"seed": -1}, "seed is -1"),
        ({"slo_s": 0.0}, "slo_s is 0"),
    ],
)
def test_invalid_configs_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(BASE, **change)


def test_missing_prompts_and_empty_traces_are_refused() -> None:
    with pytest.raises(UsageError, match="there are no prompts"):
        generate_trace(BASE, [])
    with pytest.raises(UsageError, match=r"no request arrives within 0.001 s at 0.01 requests a second"):
        generate_trace(replace(BASE, request_rate=0.01, duration_s=0.001), PROMPTS)


def test_parse_mix() -> None:
    assert parse_mix("1,1, 2", SIZES) == (1, 1, 2)
    assert parse_mix("256=0.2, 128=0.5,192x192=0.3", SIZES) == (0.5, 0.3, 0.2)
    assert parse_mix("192=1", SIZES) == (0, 1, 0)
    assert parse_mix("3", SIZES[:1]) == (3,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "every weight must be a finite number"),
        ("1,2", "mix has 2 weights, but there are 3 resolutions"),
        ("1,2,x", "every weight must be a finite number"),
        ("1,2,-1", "every weight must be a finite number"),
        ("1,2,nan", "every weight must be a finite number"),
        ("1,2,inf", "every weight must be a finite number"),
        ("0,0,0", "at least one weight must be more than 0"),
        ("128=1,2", "either all of its items or none must be RESOLUTION=WEIGHT"),
        ("512=1", "mix names 512x512, but the resolutions are 128x128, 192x192, 256x256"),
        ("128=1,128x128=2", "128x128 may be named only once"),
        ("128=", "every weight must be a finite number"),
        ("=1", "resolution is ''"),
    ],
)
def test_invalid_mixes_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_mix(text, SIZES)


def test_limit_and_retime() -> None:
    trace = generate_trace(BASE, PROMPTS)
    assert limit_trace(trace) == trace
    assert limit_trace(trace, num_prompts=5) == trace[:5]
    assert limit_trace(trace, num_prompts=500, duration_s=9.0) == [r for r in trace if r.arrival_s <= 9]
    late = [replace(request, arrival_s=request.arrival_s + 1e6) for request in trace]
    fast = retime(late, speed=4.0, from_zero=True)
    assert fast[0].arrival_s == 0
    assert np.diff([r.arrival_s for r in fast]) * 4 == pytest.approx(np.diff([r.arrival_s for r in trace]), abs=1e-6)
    assert content(fast) == content(trace)
    assert retime(trace) == trace
    assert retime([]) == []


def test_invalid_limits_and_speeds_are_refused() -> None:
    trace = generate_trace(BASE, PROMPTS)
    bad: list[dict[str, Any]] = [{"num_prompts": 0}, *({"duration_s": value} for value in (0.0, math.nan, 1e-9))]
    for arguments in bad:
        with pytest.raises(UsageError):
            limit_trace(trace, **arguments)
    for speed in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(UsageError, match="speed is"):
            retime(trace, speed=speed)


def test_slos_scale_with_the_request_and_explicit_slos_are_kept() -> None:
    trace = generate_trace(BASE, PROMPTS)
    trace[3] = replace(trace[3], slo_s=0.25)
    served = assign_slos(trace, lambda request: request.resolution.pixels / 1e5, 5.0)
    for i, request in enumerate(served):
        assert request.slo_s == pytest.approx(0.25 if i == 3 else request.resolution.pixels / 2e4)
    with pytest.raises(UsageError, match="SLO scale is -1"):
        assign_slos(trace, lambda request: 1.0, -1.0)
