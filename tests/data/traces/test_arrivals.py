"""Arrivals that swing, and recorded ones: rates, shapes, files."""

import math
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.traces.arrivals import diurnal_arrivals, gamma_arrivals, read_arrivals, scaled_arrivals
from patchedserve.data.traces.traces import TraceConfig, generate_trace


def diurnal(
    count: int, amplitude: float = 0.8, seed: int = 0, rate: float = 5.0, period_s: float = 100.0
) -> np.ndarray:
    return np.array(list(islice(diurnal_arrivals(np.random.default_rng(seed), rate, amplitude, period_s), count)))


def test_diurnal_time_change_is_exact() -> None:
    # What makes it exact: put through the integral of the rate, the arrivals are those of a Poisson process of rate 1.
    times = diurnal(2000)
    integral = 5.0 * (times + 0.8 * 100 / (2 * math.pi) * (1 - np.cos(2 * math.pi * times / 100)))
    unit = np.cumsum(np.random.default_rng(0).standard_exponential(2000))
    assert integral == pytest.approx(unit, rel=1e-9)
    assert (np.diff(times) > 0).all()


def test_diurnal_swings_as_asked() -> None:
    times = diurnal(20_000)
    # 40 days of 100 s; the rate averages 5, and 5 * (1 +- 0.8 * 2 / pi) over the halves of a day.
    assert len(times) / times[-1] == pytest.approx(5.0, rel=0.03)
    busy = np.mean((times % 100) < 50)
    assert busy == pytest.approx((1 + 0.8 * 2 / math.pi) / 2, abs=0.01)


def test_no_swing_is_poisson() -> None:
    rng = np.random.default_rng(3)
    assert diurnal(50, amplitude=0.0, seed=3) == pytest.approx(list(islice(gamma_arrivals(rng, 5.0, 1.0), 50)))


def test_recorded_arrivals_keep_their_shape_at_any_rate() -> None:
    recorded = [10.0, 10.5, 14.0, 14.0, 20.0]
    scaled = scaled_arrivals(recorded, 2.0)
    # 4 gaps in 10 s are 0.4 a second; five times as fast.
    assert scaled == pytest.approx([0.0, 0.1, 0.8, 0.8, 2.0])
    for arrivals in ([], [1.0], [3.0, 3.0]):
        with pytest.raises(UsageError, match=f"{len(arrivals)} recorded arrivals span no time"):
            scaled_arrivals(arrivals, 1.0)


def test_files_of_arrivals(tmp_path: Path) -> None:
    vidur, azure = tmp_path / "vidur.csv", tmp_path / "azure.csv"
    vidur.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n5.0,374,44\n9.314579,396,109\n")
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    assert read_arrivals(vidur) == pytest.approx((0.0, 4.314579))
    assert read_arrivals(azure) == pytest.approx((0.0, 4.314579), abs=1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a.csv: recorded arrivals must be CSV with a column arrived_at or TIMESTAMP"),
        ("time\n1\n", "a.csv: recorded arrivals must be CSV"),
        ("arrived_at\n", "a.csv: the trace is empty"),
        ("arrived_at,b\n1,2\nsoon,2\n", "a.csv:3: arrived_at is 'soon', which is not a time"),
        ("arrived_at,b\n1,2\nnan,2\n", "a.csv:3: arrived_at is 'nan', but it must be finite"),
        ("b,arrived_at\n1,2\n1\n", "a.csv:3: arrived_at is None"),
        ("arrived_at\n2\n1\n", "a.csv:3: time goes back"),
        ("TIMESTAMP\n2023-13-16 18:15:46\n", "a.csv:2: TIMESTAMP is '2023-13-16 18:15:46', which is not a time"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_arrivals(tmp_path / "a.csv")
    with pytest.raises(UsageError, match="cannot read the arrivals: No such file"):
        read_arrivals(tmp_path / "b.csv")


def test_traces_of_both_kinds() -> None:
    config = TraceConfig(kind="diurnal", request_rate=4.0, num_prompts=None, duration_s=200.0, period_s=100.0, seed=2)
    requests = generate_trace(config, ["a", "b"])
    assert requests == generate_trace(config, ["a", "b"])
    assert 650 < len(requests) < 950
    assert all(one.arrival_s < other.arrival_s for one, other in pairwise(requests))

    recorded = TraceConfig(kind="azure", request_rate=2.0, num_prompts=None, arrivals_s=(0.0, 0.5, 4.0, 4.0, 10.0))
    assert [one.arrival_s for one in generate_trace(recorded, ["a"])] == pytest.approx([0.0, 0.1, 0.8, 0.8, 2.0])
    # The first of them have the rate that was asked for.
    some = TraceConfig(kind="azure", request_rate=2.0, num_prompts=3, arrivals_s=(0.0, 0.5, 4.0, 4.0, 10.0))
    assert [one.arrival_s for one in generate_trace(some, ["a"])] == pytest.approx([0.0, 0.125, 1.0])
    # What is asked for does not depend on when.
    poisson = generate_trace(TraceConfig(num_prompts=3), ["a", "b"])
    assert [one.seed for one in generate_trace(some, ["a", "b"])] == [one.seed for one in poisson]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "diurnal", "amplitude": 1.1}, "amplitude is 1.1, but it must be from 0 to 1"),
        ({"kind": "diurnal", "period_s": 0.0}, "period is 0 s"),
        ({"kind": "diurnal", "request_rate": math.inf}, "request rate is inf, but a diurnal trace needs a finite one"),
        ({"kind": "diurnal", "num_prompts": None}, "the trace never ends"),
        ({"kind": "azure"}, "an azure trace needs recorded arrivals"),
        ({"kind": "azure", "arrivals_s": (1.0,), "cv": 2.0}, "cv is 2, but a azure trace takes none: use gamma"),
        ({"kind": "azure", "arrivals_s": (0.0, 1.0), "request_rate": 0.0}, "request rate is 0"),
    ],
)
def test_bad_settings(fields: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TraceConfig(**fields)
