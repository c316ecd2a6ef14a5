"""The choice between synchronous and displaced calls."""

from contextlib import closing

import pytest
import torch

from patchedserve.serving.parallel.choice import choose
from patchedserve.serving.parallel.cost import Call, Share
from patchedserve.serving.parallel.latency_model import Link, ParallelLatency
from patchedserve.serving.parallel.options import ParallelOptions
from patchedserve.serving.parallel.strips import Strips
from patchedserve.serving.parallel.virtual import VirtualRanks

from ...support.random_models import sdxl_unet


@pytest.mark.parametrize(("sync_s", "mode"), [(0.0, "sync"), (0.05, "sync"), (0.12, "displaced")])
def test_displaced_is_chosen_if_it_saves_over_10_percent(sync_s: float, mode: str) -> None:
    """Two ranks compute for half a second, and displaced calls hide 55 % of the waiting."""
    found = choose(ParallelLatency(0.0, 1.0, Link(sync_s, 1e15, 0.45)), 2, 1000)
    assert found.mode == mode
    saved = 0.55 * sync_s / (0.5 + sync_s)
    assert f"save {saved:.0%} of" in found.reason


def test_link_is_measured_with_the_bytes_of_the_busiest_rank() -> None:
    with closing(VirtualRanks(sdxl_unet(), ParallelOptions("virtual:3"))) as virtual, virtual.end:
        ranks, model = virtual.ranks, virtual.ranks._model
        link = ranks.measure_link(torch.device("cpu"))
        assert link.sync_s > 0
        assert link.bytes_per_s > 0
        call, strips = Call(24, 16, 0, 2), Strips.of(24, model.unit, (1.0,) * 3)
        middle = model.cost.received(call, Share(strips, 1)).num_bytes(4)
        assert ranks.received_bytes(24, 16, 2) == middle, "it has two neighbours"
