"""The latency model against DistriFusion's figures, both fitted and held out."""

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.models.published import published_config
from patchedserve.data.tables.published import printed_figures
from patchedserve.serving.parallel.cost import Call, Cost, Share
from patchedserve.serving.parallel.latency_model import Link, ParallelLatency, Waiting
from patchedserve.serving.parallel.strips import Strips

STEPS = 50
COST = Cost.of(published_config("sdxl"))
PRINTED = {
    (each.quantity, int(each.resolution.split("x")[0]), each.num_ranks): each.value
    for each in printed_figures("distrifusion")
}


def model(side: int, link: Link | None = None) -> ParallelLatency:
    return ParallelLatency.fit({n: PRINTED["latency_nocomm_s", side, n] / STEPS for n in (1, 8)}, link)


def sent(side: int, num_ranks: int, rows: int = 2) -> int:
    """Return the bytes that a device receives in a step if halos are gathered."""
    received = COST.received(
        Call(side // 8, side // 8, 77, rows), Share(Strips.of(side // 8, 4, (1.0,) * num_ranks), 0), "all"
    )
    return 2 * (received.key_values + received.halos)


def latency_s(side: int, waiting: Waiting, num_ranks: int) -> float:
    return STEPS * model(side).step_s(waiting, num_ranks, sent(side, num_ranks))


@pytest.mark.parametrize("side", [1024, 2048, 3840])
def test_table_2_is_fitted(side: int) -> None:
    for num_ranks in (1, 8):
        printed = PRINTED["latency_nocomm_s", side, num_ranks]
        assert latency_s(side, "nocomm", num_ranks) == pytest.approx(printed)
    for waiting in ("sync", "displaced"):
        assert latency_s(side, waiting, 8) == pytest.approx(PRINTED[f"latency_{waiting}_s", side, 8], rel=0.03)


@pytest.mark.parametrize(("num_ranks", "wanted"), [(2, 3.28), (4, 2.29)])
def test_table_1_is_held_out(num_ranks: int, wanted: float) -> None:
    found = latency_s(1024, "displaced", num_ranks)
    assert found == pytest.approx(wanted, abs=0.005)
    assert found == pytest.approx(PRINTED["latency_displaced_s", 1024, num_ranks], rel=0.05)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_figure_6_is_held_out(num_ranks: int) -> None:
    found = latency_s(3840, "nocomm", 1) / latency_s(3840, "displaced", num_ranks)
    assert found == pytest.approx(PRINTED["speedup_displaced_x", 3840, num_ranks], rel=0.07)


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_split_guidance_is_held_out(num_ranks: int) -> None:
    # Each half of the devices has one row, and strips twice as high.
    split_s = STEPS * model(3840).step_s("displaced", num_ranks, sent(3840, num_ranks // 2, rows=1))
    found = latency_s(3840, "nocomm", 1) / split_s
    assert found == pytest.approx(PRINTED["speedup_split_x", 3840, num_ranks], rel=0.07)


def test_waiting_time_follows_the_link() -> None:
    link = Link(sync_s=0.02, bytes_per_s=1e9, displaced_share=0.5)
    on_two = ParallelLatency(1.0, 4.0, link)
    assert [on_two.step_s(waiting, 2, 10**8) for waiting in ("nocomm", "sync", "displaced")] == [3.0, 3.12, 3.06]
    assert on_two.displaced_saves(2, 10**8) == pytest.approx(0.06 / 3.12)
    # A single device does not wait.
    assert on_two.step_s("sync", 1, 0) == on_two.step_s("displaced", 1, 0) == 5.0
    assert on_two.displaced_saves(1, 0) == 0.0


def test_more_than_two_measurements_are_fitted_by_least_squares() -> None:
    found = ParallelLatency.fit({1: 5.0, 2: 3.0, 4: 2.0, 8: 1.5})
    assert (found.serial_s, found.shared_s) == pytest.approx((1.0, 4.0))
    with pytest.raises(UsageError, match="measured on 1 number of devices"):
        ParallelLatency.fit({2: 1.0})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sync_s": -0.001}, "--sync-ms is -1,"),
        ({"bytes_per_s": 0.0}, "--bandwidth is 0 GB/s"),
        ({"displaced_share": 1.1}, "--displaced-share is 1.1"),
        ({"sync_s": float("nan")}, "--sync-ms is nan"),
    ],
)
def test_invalid_links_are_refused(given: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Link(**given)
