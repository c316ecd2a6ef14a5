"""Rate curves: files, shapes, and arrivals that follow them."""

from pathlib import Path

import numpy as np
import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.traces.curves import Curve
from patchedserve.data.traces.traces import TraceConfig, generate_trace


def test_arrivals_follow_the_curve() -> None:
    curve = Curve((0.0, 1.0, 3.0, 4.0), (0.0, 1.0, 0.2, 0.2)).scaled(2.0, 50.0, 400.0)
    assert (min(curve.rates), max(curve.rates), curve.times_s[-1]) == (2.0, 50.0, 400.0)
    arrivals_s = np.array(list(curve.arrivals(np.random.default_rng(0))))
    assert (np.diff(arrivals_s) >= 0).all()
    edges = np.arange(0, 401, 20.0)
    counts = np.histogram(arrivals_s, edges)[0]
    wanted = [
        np.trapezoid(np.interp(x := np.linspace(a, a + 20, 2001), curve.times_s, curve.rates), x) for a in edges[:-1]
    ]
    off = (counts - wanted) / np.sqrt(wanted)
    # 20 counts of a Poisson process, which are about normal when standardised.
    assert np.abs(off).max() < 4
    assert 0.4 < np.mean(off**2) < 2.0


def test_constant_curve_gives_a_poisson_process() -> None:
    curve = Curve((0.0, 2.0), (3.0, 3.0)).scaled(5.0, 5.0, 4000.0)
    gaps_s = np.diff(list(curve.arrivals(np.random.default_rng(1))))
    assert gaps_s.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(1.0, abs=0.03)


def test_trace_of_a_curve_is_seeded() -> None:
    curve = Curve.in_the_box().scaled(1.0, 8.0, 120.0)
    config = TraceConfig(kind="shape", num_prompts=None, duration_s=120.0, curve=curve, seed=3)
    one, other = generate_trace(config, ["a", "b"]), generate_trace(config, ["a", "b"])
    assert one == other
    assert one[-1].arrival_s <= 120
    assert 300 < len(one) < 800


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a,b\n1,2\n", "columns time_s and rate"),
        ("time_s,rate\n0,1\n2,2\n1,3\n", ":4: time goes back"),
        ("time_s,rate\n0,1\n1,x\n", ":3: rate is 'x'"),
        ("time_s,rate\n0,1\n1,-2\n", ":3: rate is -2"),
        ("time_s,rate\n0,1\n", "at least two"),
        ("", "columns time_s and rate"),
    ],
)
def test_invalid_curve_files_are_refused_with_line_number(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "curve.csv"
    path.write_text(text)
    with pytest.raises(UsageError, match=reason):
        Curve.read(path)


def test_curve_starts_at_the_first_time_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    path.write_text("hour,time_s,rate\n0,100,4\n1,110,6\n")
    assert Curve.read(path) == Curve((0.0, 10.0), (4.0, 6.0))


@pytest.mark.parametrize(("low", "high"), [(-1.0, 2.0), (3.0, 2.0), (0.0, 0.0), (1.0, float("inf"))])
def test_rates_out_of_range_are_refused(low: float, high: float) -> None:
    with pytest.raises(UsageError, match="must rise from 0"):
        Curve.in_the_box().scaled(low, high, 10.0)
    with pytest.raises(UsageError, match="flat"):
        Curve((0.0, 1.0), (2.0, 2.0)).scaled(1.0, 2.0, 10.0)
