"""2,000 requests of all kinds: each receives a response, and the server's resources are as before."""

import asyncio
from pathlib import Path

import pytest

from patchedserve.serving.server.front_end import _ENCODERS

from ..support.http_server import HttpServer
from ..support.soak import soak
from ..support.tiny_models import save_tiny, tiny_sdxl

pytestmark = pytest.mark.slow
COUNT = 2000


@pytest.mark.exhaustive
def test_soak(tmp_path: Path) -> None:
    sizes = ["32x32", "64x32"]
    model = save_tiny(tmp_path / "tiny", tiny_sdxl(), guidance_scale=3.0, resolutions=sizes, num_inference_steps=4)
    with HttpServer(model, tmp_path / "workspace", "--system", "patched-fcfs") as server:
        found = asyncio.run(soak(server.url, server.process.pid, num_requests=COUNT, sizes=sizes))
        assert server.stop() == 0
    assert sum(found.ended.values()) == COUNT, "none is lost"
    kinds = {"good 200", "bad 400", "slow 200", "leaves left", "leaves 200"}
    assert {*found.ended} <= kinds, found.ended
    assert found.ended["bad 400"]
    assert found.ended["leaves left"]
    assert found.num_open == 0
    start, half, end = found.usage
    assert end.rss_mb - half.rss_mb <= 40, found.usage
    # All threads except those that encode images exist from the start; each of these starts when the others are busy.
    assert end.threads <= start.threads + _ENCODERS, found.usage
    assert end.files <= half.files + 4, found.usage
    assert found.duration_s <= 240
