"""SLOs of a trace in seconds."""

import json
from pathlib import Path

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.resolution import Resolution
from patchedserve.serving.models.defaults import ModelDefaults
from patchedserve.serving.runs.trace_requests import draw_trace
from patchedserve.serving.runs.trace_settings import TraceSettings, parse_slo

S, L = Resolution(128, 128), Resolution(256, 256)


def test_slos_in_seconds_by_resolution() -> None:
    assert [parse_slo("2.5")(size) for size in (S, L)] == [2.5, 2.5]
    slo_of = parse_slo("128x128=1.5, 256=3")
    assert [slo_of(size) for size in (S, L, Resolution(64, 64))] == [1.5, 3.0, None]


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "inf", "nan", "128=", "128=1,2", "1,2", "128=1,256=0"])
def test_invalid_slos_are_reported(text: str) -> None:
    with pytest.raises(UsageError, match=r"--slo is .*, but it must be seconds above 0"):
        parse_slo(text)


def test_requests_with_an_slo_keep_it(tmp_path: Path) -> None:
    lines = [{"prompt": "a hat", "resolution": "128x128", "arrival_s": 0.0, "slo_s": 9.0}]
    lines += [{"prompt": "a hat", "resolution": size, "arrival_s": 1.0} for size in ("128x128", "256x256")]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    requests = draw_trace(TraceSettings(trace=str(file), slo="128=1.5"), ModelDefaults())
    assert [request.slo_s for request in requests] == [9.0, 1.5, None]
