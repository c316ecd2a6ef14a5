"""Some of the requests of `tests/benchmarks/fuzz_http.py`."""

from pathlib import Path

import pytest

from ..support.fuzz import fuzz
from ..support.http_server import HttpServer
from ..support.tiny_models import save_tiny, tiny_sdxl

pytestmark = pytest.mark.slow


@pytest.mark.exhaustive
def test_no_fuzzed_request_causes_a_server_error(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny", tiny_sdxl(), guidance_scale=3.0, resolutions=["32"], num_inference_steps=2)
    options = ("--max-steps", "4", "--system", "patched-fcfs", "--max-pixels", "4096")
    with HttpServer(model, tmp_path / "workspace", *options) as server:
        counts = fuzz(server.url, 800)
        assert server.process.poll() is None
    assert counts["200"]
    assert counts["400"]
