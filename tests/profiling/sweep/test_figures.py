"""Figures of a sweep, computed by hand: intervals, sustained rates, ratios, pooling, agreement."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from patchedserve.data.statistics import wilson_interval
from patchedserve.profiling.sweep.figures import FinishedRun, agreement, point_figures, sweep_figures
from patchedserve.profiling.sweep.held import SustainedRate, best_sustained, ratio, share_interval, sustained_rate
from patchedserve.profiling.sweep.report import band_of, tables_of


def run(
    latencies: Sequence[float | None],
    system: str = "patchedserve",
    rate: float = 1.0,
    seed: int = 0,
    duration_s: float = 10.0,
    engine: Any = "real",
) -> FinishedRun:
    """Return a run of requests with an SLO of 2 s and these latencies; None: discarded."""
    done = np.array([each for each in latencies if each is not None])
    lost = len(latencies) - len(done)
    statuses = {"completed": len(done), "discarded": lost}
    return FinishedRun(
        engine, system, rate, seed, int((done <= 2.0).sum()), statuses, {"too late": lost}, done, duration_s
    )


def test_point_pools_its_seeds() -> None:
    point = point_figures([run([1.0, 2.0, 2.5, None]), run([0.5, 3.0], seed=1, duration_s=5.0)])
    assert (point["num_requests"], point["num_met"], point["num_runs"]) == (6, 3, 2)
    assert point["slo_attainment_rate"] == 0.5
    # Two seeds are too few to estimate their spread.
    assert (point["interval_low"], point["interval_high"]) == wilson_interval(3, 6)
    assert point["interval_over"] == "requests"
    assert point["attainment_by_seed"] == {"0": 0.5, "1": 0.5}
    assert point["goodput_qps"] == 3 / 15
    # Statistics of 1, 2, 2.5, 0.5 and 3.
    assert (point["latency_mean"], point["latency_p50"], point["latency_p95"]) == pytest.approx((1.8, 2.0, 2.9))
    assert (point["completed_requests"], point["discarded_requests"], point["failed_requests"]) == (5, 1, 0)
    assert point["discarded_by_reason"] == {"too late": 1}


def test_point_reports_the_worst_resolution() -> None:
    sizes = [{"128x128": (1, 4), "256x256": (3, 4)}, {"128x128": (2, 2)}]
    runs = [replace(run([1.0]), met_by_resolution=each, seed=seed) for seed, each in enumerate(sizes)]
    point = point_figures(runs)
    assert point["slo_attainment_by_resolution"] == {"128x128": 0.5, "256x256": 0.75}
    assert point["slo_attainment_worst"] == 0.5
    assert tables_of({"engines": {"real": sweep_figures(runs)}, "agreement": None})[1].rows[0][3] == "50.0% (128x128)"


def test_point_without_finished_requests() -> None:
    point = point_figures([run([None, None])])
    assert (point["slo_attainment_rate"], point["latency_p50"], point["latency_mean"]) == (0, None, None)


def test_point_averages_figures_of_the_engines() -> None:
    runs = [run([1.0]), run([1.0], seed=1), run([1.0], seed=2)]
    figures = [{"batch_size_mean": 2.0, "cache": {"saved_computation": 0.5}}, {"batch_size_mean": 4.0}, {}]
    point = point_figures([replace(each, figures=own) for each, own in zip(runs, figures, strict=True)])
    assert (point["batch_size_mean"], point["saved_computation"], point["predictor_scale"]) == (3.0, 0.5, None)


def test_held_rates() -> None:
    shares = {2.0: 0.98, 1.0: 1.0, 3.0: 0.90, 4.0: 0.99}
    # From 98 % at 2 to 90 % at 3: 95 % at 2.375. The higher share at 4 does not count.
    for attainment, rate in ((0.95, 2.375), (0.99, 1.5)):
        held = sustained_rate(shares, attainment)
        assert held.where == "between"
        assert held.rate == pytest.approx(rate)
    assert sustained_rate(shares, 0.90) == SustainedRate("beyond", 4.0)
    assert sustained_rate({1.0: 0.5, 2.0: 0.99}, 0.9) == SustainedRate("below", 1.0)
    # The share is held exactly at the last measured rate before it falls.
    assert sustained_rate({1.0: 0.95, 2.0: 0.0}, 0.95) == SustainedRate("between", 1.0)
    assert sustained_rate({1.0: 1.0}, 0.95) == SustainedRate("beyond", 1.0)
    with pytest.raises(ValueError, match="no rate"):
        sustained_rate({}, 0.9)


@pytest.mark.parametrize(
    ("mine", "base", "kind", "value"),
    [
        (("between", 3.0), ("between", 2.0), "exact", 1.5),
        (("beyond", 4.0), ("between", 2.0), "least", 2.0),
        (("between", 3.0), ("beyond", 4.0), "most", 0.75),
        (("below", 1.0), ("between", 2.0), "most", 0.5),
        (("between", 3.0), ("below", 1.0), "least", 3.0),
        (("beyond", 4.0), ("beyond", 4.0), "unknown", None),
        (("below", 1.0), ("below", 1.0), "unknown", None),
    ],
)
def test_ratios_state_when_they_are_bounds(mine: Any, base: Any, kind: str, value: float | None) -> None:
    assert ratio(SustainedRate(*mine), SustainedRate(*base)) == {"value": value, "kind": kind}


def test_best_of_the_baselines() -> None:
    low, middle, far = SustainedRate("below", 1.0), SustainedRate("between", 3.0), SustainedRate("beyond", 2.0)
    assert best_sustained([low, middle, far]) == far
    assert best_sustained([low, SustainedRate("between", 1.5), middle]) == middle


def test_figures_of_a_sweep() -> None:
    good, bad = [1.0] * 20, [1.0] * 10 + [5.0] * 10
    runs = [
        *(run(good, "bucketed", rate) for rate in (1.0, 2.0)),
        run(bad, "bucketed", 3.0),
        *(run(good, "patchedserve", rate) for rate in (3.0, 1.0, 2.0)),
        run([1.0, 9.0], "patchedserve", 4.0),
    ]
    found = sweep_figures(runs)
    assert [(point["policy"], point["request_rate"]) for point in found["points"]] == [
        *(("bucketed", rate) for rate in (1.0, 2.0, 3.0)),
        *(("patchedserve", rate) for rate in (1.0, 2.0, 3.0, 4.0)),
    ]
    bucketed, slack = found["policies"]
    assert (bucketed["mean_attainment"], slack["mean_attainment"]) == pytest.approx((2.5 / 3, 3.5 / 4))
    for policy, rate in ((bucketed, 2.1), (slack, 3.1)):
        held = {"where": "between", "rate": pytest.approx(rate)}
        assert policy["held_rates"]["0.95"] == {**held, "low": None, "high": None, "by_seed": {"0": held}}
    assert slack["ratio_at_95"] == {"value": pytest.approx(3.1 / 2.1), "kind": "exact", "low": None, "high": None}
    assert found["baselines"] == ["bucketed"]
    assert sweep_figures([run(good)])["policies"][0]["ratio_at_95"] is None


def test_agreement_of_simulator_and_engine() -> None:
    runs = [
        run([1.0, 1.0, 3.0, 1.0]),
        run([1.0, 1.0, 1.0, 1.0], engine="simulator"),
        run([1.0, 1.0], rate=2.0),
        run([1.0, 1.5], rate=2.0, engine="simulator"),
        # The simulator has not served this point.
        run([1.0], rate=3.0),
    ]
    found = agreement(runs)
    first, second = found["rows"]
    assert (first["attainment_difference_points"], first["latency_difference"]) == pytest.approx((25.0, -1 / 3))
    assert (second["attainment_difference_points"], second["latency_difference"]) == pytest.approx((0.0, 0.25))
    assert found["max_attainment_difference_points"] == 25.0
    assert found["mean_latency_difference"] == pytest.approx((1 / 3 + 0.25) / 2)
    # Neither run has its batch sizes or its capacity.
    assert (first["step_difference"], first["load"]) == (None, None)
    empty = agreement([run([1.0])])
    assert (empty["rows"], empty["max_latency_difference"]) == ([], None)


def test_agreement_at_equal_batch_size_and_by_load() -> None:
    steps: list[Any] = [
        {"1": [10, 1.0], "4": [10, 2.0], "8": [5, 9.0]},
        {"1": [1, 0.11], "4": [3, 0.66], "16": [9, 9.0]},
    ]
    runs = [
        replace(run([1.0], rate=rate, engine=engine), figures={"steps_by_batch": own, "capacity_qps": 4.0})
        for rate in (1.0, 3.7)
        for engine, own in zip(("real", "simulator"), steps, strict=True)
    ]
    runs += [replace(run([1.3], rate=1.0, seed=1)), run([1.0], rate=1.0, seed=1, engine="simulator")]
    found = agreement(runs)
    # Ten steps each of 0.11 and 0.22 s compared with 3 s: steps of 8 and 16 requests are on one side only.
    assert [row["step_difference"] for row in found["rows"]] == pytest.approx([0.1, 0.1])
    assert [row["load"] for row in found["rows"]] == [0.25, 0.925]
    assert found["max_step_difference"] == pytest.approx(0.1)
    assert found["max_latency_difference_below_saturation"] == pytest.approx(1 - 1 / 1.15)
    assert found["max_latency_difference_near_saturation"] == 0
    table = tables_of({"engines": {}, "agreement": found})[0]
    assert table.rows[0][2] == "25%"
    assert table.rows[0][-1] == "+10.0%"
    assert "Below 90% of capacity mean latency is within 13.0%. From there on" in table.note


def test_tables_show_bounds_and_lost_requests() -> None:
    runs = [run([1.0, None], "bucketed"), run([1.0, 1.0], "patchedserve")]
    result = {"engines": {"real": sweep_figures(runs)}, "agreement": None}
    held, points = tables_of(result)
    assert held.rows[0] == ("bucketed", "50.0%", "below 1/s", "below 1/s", "below 1/s", "-")
    assert held.rows[1] == ("patchedserve", "100.0%", "beyond 1/s", "beyond 1/s", "beyond 1/s", "at least 1.00x")
    assert points.rows[0][2:6] == ("50.0%", "-", "9.5% to 90.5%", "requests (Wilson)")
    assert "as if requests were independent" in points.note
    assert points.rows[0][-1] == "1 too late"
    assert all(len(row) == len(table.columns) for table in (held, points) for row in table.rows)


def shares(*by_rate: float, policy: str, seed: int) -> list[FinishedRun]:
    """Return runs of 100 requests at rates 1, 2, ..., with these shares in time."""
    return [
        run([1.0] * round(100 * share) + [None] * round(100 - 100 * share), policy, rate, seed)
        for rate, share in enumerate(by_rate, 1)
    ]


def three_seeds(last: float = 0.85) -> list[FinishedRun]:
    """Return runs of two systems; `last` is the share of patchedserve at the highest rate with the third seed."""
    return [
        *shares(1.0, 0.90, 0.5, policy="bucketed", seed=0),
        *shares(1.0, 0.95, 0.5, policy="bucketed", seed=1),
        *shares(1.0, 0.85, 0.5, policy="bucketed", seed=2),
        *shares(1.0, 1.0, 0.90, policy="patchedserve", seed=0),
        *shares(1.0, 1.0, 0.93, policy="patchedserve", seed=1),
        *shares(1.0, 1.0, last, policy="patchedserve", seed=2),
    ]


def test_three_seeds_give_intervals_over_seeds() -> None:
    found = sweep_figures(three_seeds())
    points = {(point["policy"], point["request_rate"]): point for point in found["points"]}
    # Computed by hand: 0.85, 0.90 and 0.95; sd 0.05, and Student's 4.3027 at two degrees of freedom.
    middle = points["bucketed", 2.0]
    half = 4.3027 * 0.05 / math.sqrt(3)
    assert middle["interval_over"] == "seeds"
    assert (middle["interval_low"], middle["interval_high"]) == (pytest.approx(0.9 - half, abs=1e-4), 1.0)
    # Seeds that agree give Wilson's interval, not a point.
    first = points["patchedserve", 1.0]
    assert (first["interval_low"], first["interval_high"]) == wilson_interval(300, 300)
    bucketed, slack = found["policies"]
    held = [each["rate"] for each in bucketed["held_rates"]["0.95"]["by_seed"].values()]
    assert held == pytest.approx([1.5, 2.0, 1 + 1 / 3])
    logs = np.log(held)
    low, high = np.exp(logs.mean() + np.array([-1, 1]) * 4.3027 * logs.std(ddof=1) / math.sqrt(3))
    at_95 = bucketed["held_rates"]["0.95"]
    assert (at_95["low"], at_95["high"]) == pytest.approx((low, high), rel=1e-4)
    assert at_95["low"] < at_95["rate"] < at_95["high"]
    # Ratios are computed within seeds.
    ratios = np.log([2.5 / 1.5, (2 + 5 / 7) / 2, (2 + 1 / 3) / (1 + 1 / 3)])
    low, high = np.exp(ratios.mean() + np.array([-1, 1]) * 4.3027 * ratios.std(ddof=1) / math.sqrt(3))
    assert (slack["ratio_at_95"]["low"], slack["ratio_at_95"]["high"]) == pytest.approx((low, high), rel=1e-4)
    assert (bucketed["ratio_at_95"]["low"], bucketed["ratio_at_95"]["high"]) == (1.0, 1.0)
    held_table, points_table = tables_of({"engines": {"real": found}, "agreement": None})
    assert f"({at_95['low']:.3g} to {at_95['high']:.3g})" in str(held_table.rows[0][3])
    assert f"({low:.2f} to {high:.2f})" in str(held_table.rows[1][-1])
    assert {row[5] for row in points_table.rows} == {"3 seeds"}
    assert "Student" in points_table.note
    assert "independent" not in points_table.note


def test_seed_with_only_a_bound_gives_no_interval_of_held_rates() -> None:
    slack = sweep_figures(three_seeds(last=0.97))["policies"][1]
    held = slack["held_rates"]["0.95"]
    assert (held["where"], held["by_seed"]["2"]["where"]) == ("between", "beyond")
    assert (held["low"], held["high"]) == (None, None)
    assert (slack["ratio_at_95"]["kind"], slack["ratio_at_95"]["low"]) == ("exact", None)


def test_seed_without_a_rate_is_excluded_from_held_rates() -> None:
    bucketed = sweep_figures(three_seeds()[:8])["policies"][0]
    assert set(bucketed["held_rates"]["0.95"]["by_seed"]) == {"0", "1"}
    assert bucketed["held_rates"]["0.95"]["low"] is None


def test_intervals_over_seeds_have_coverage_for_correlated_requests() -> None:
    # Each day is good or bad as a whole: 75 to 95 % of its 200 requests are in time.
    rng = np.random.default_rng(0)
    holds = dict.fromkeys(("seeds", "requests"), 0)
    for _ in range(1000):
        met = rng.binomial(200, np.clip(rng.normal(0.85, 0.05, 5), 0, 1))
        low, high, over = share_interval(met.tolist(), [200] * 5)
        assert over == "seeds"
        holds["seeds"] += low <= 0.85 <= high
        low, high = wilson_interval(int(met.sum()), 1000)
        holds["requests"] += low <= 0.85 <= high
    assert 930 <= holds["seeds"] <= 985
    assert holds["requests"] < 750


def test_seeds_are_weighted_by_their_number_of_requests() -> None:
    low, high, _ = share_interval([90, 10, 45], [100, 20, 50])
    equal = share_interval([90, 50, 90], [100, 100, 100])
    assert low < 145 / 170 < high
    # The bad seed is short: it affects the share less than if it were as long as the others.
    assert high - low < equal.high - equal.low


def test_plot_states_the_meaning_of_the_shaded_band() -> None:
    found = {"engines": {"real": sweep_figures(three_seeds())}}
    assert band_of(found) == "shaded: 95 % over seeds (Student)"
    assert "(Wilson)" in band_of({"engines": {"real": sweep_figures(three_seeds()[:3])}})
