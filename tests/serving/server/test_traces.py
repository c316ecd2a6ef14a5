"""OpenTelemetry spans of requests: their stages, times and batches, and their way to a collector."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.request_state import RequestRecord
from patchedserve.serving.core.step_row import StepRow
from patchedserve.serving.models.defaults import ModelDefaults
from patchedserve.serving.server.limits import Limits
from patchedserve.serving.server.protocol import ModelFacts, parse_generation
from patchedserve.serving.server.tickets import Ticket

from ...conftest import RunPsctl
from ...support.http_server import HttpServer, small_model

SMALL, LARGE = Resolution(64, 64), Resolution(128, 64)
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_spans_have_stages_times_and_batches() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from patchedserve.serving.server.traces import Traces

    exporter = InMemorySpanExporter()
    traces = Traces(exporter)
    facts = ModelFacts("tiny", ModelDefaults(4, 3.0, SMALL, (SMALL, LARGE)))
    wanted = parse_generation({"prompt": "a cat", "n": 2}, facts, Limits())
    context = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    ticket = Ticket(
        wanted, None, lambda *_: None, cast(Any, None), traces.on_over, "web", "mine", trace_context=context
    )
    ticket.numbers, ticket.created_s = [7, 8], 1000.0
    done = RequestRecord.of(Request(7, "a cat", SMALL, arrival_s=50.0))
    done.prepare_start_s, done.prepare_end_s, done.admitted_s, done.denoise_end_s = 51.0, 52.0, 54.0, 58.0
    done.close("completed", 59.0)
    cancelled = RequestRecord.of(Request(8, "a cat", SMALL, arrival_s=50.0))
    cancelled.close("cancelled", 51.0, "its client has left")
    ticket.records = [done, cancelled]
    alone, mixed = [SMALL], [SMALL, LARGE, LARGE]
    for step, batch in enumerate([alone, alone, mixed, mixed, mixed, alone, [LARGE]]):
        traces.on_row(StepRow.of(step, 53.0 + step, 0.9, batch, 2))
    traces.on_over(ticket)
    traces.close()

    spans = {span.name: span for span in exporter.get_finished_spans()}
    root = spans.pop("generate")
    assert root.context is not None
    assert f"{root.context.trace_id:032x}" == TRACE
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == PARENT
    assert (root.start_time, root.end_time) == (1000 * 10**9, 1009 * 10**9)
    assert root.attributes is not None
    assert root.attributes["psctl.request_id"] == "mine"
    assert (root.attributes["psctl.size"], root.attributes["psctl.images"]) == ("64x64", 2)
    times = {"prepare": (1001, 1002), "queue": (1002, 1004), "denoise": (1004, 1008), "decode": (1008, 1009)}
    assert {name: (span.start_time, span.end_time) for name, span in spans.items()} == {
        name: (began * 10**9, ended * 10**9) for name, (began, ended) in times.items()
    }
    assert all(span.parent is not None and span.parent.span_id == root.context.span_id for span in spans.values())
    assert all((span.attributes or {})["psctl.image"] == 0 for span in spans.values())
    # Steps at 54 to 57: alone, then three in the batch of three.
    attributes = dict(spans["denoise"].attributes or {})
    assert (attributes["psctl.batch.steps"], attributes["psctl.batch.largest_size"]) == (4, 3)
    assert attributes["psctl.batch.mean_size"] == (1 + 3 * 3) / 4
    events = [(event.timestamp // 10**9, dict(event.attributes or {})) for event in spans["denoise"].events]
    waiting = {"psctl.batch.waiting": 2}
    assert events == [
        (1004, {"psctl.batch.size": 1, "psctl.batch.of.64x64": 1, **waiting}),
        (1005, {"psctl.batch.size": 3, "psctl.batch.of.64x64": 1, "psctl.batch.of.128x64": 2, **waiting}),
    ]


class Collector:
    """A collector of OTLP over HTTP.

    Attributes:
        url: its address.
        spans: spans that it has received.
    """

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.spans: list[Any] = []
        found = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        found.extend(scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.proto")
    found = Collector()
    yield found
    found.close()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_server_exports_to_a_collector(collector: Collector, tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    with HttpServer(
        small_model(tmp_path / "tiny"), tmp_path / "workspace", "--otlp-traces-endpoint", collector.url
    ) as server:

        def ask(size: str) -> httpx.Response:
            body = {"prompt": "a cat", "size": size, "slo": 600}
            return httpx.post(f"{server.url}/v1/images/generations", json=body, headers=headers, timeout=60)

        with ThreadPoolExecutor() as pool:
            assert [each.status_code for each in pool.map(ask, ["32x32", "64x32"])] == [200, 200]
        assert server.stop() == 0
    roots = {span.span_id: span for span in collector.spans if span.name == "generate"}
    assert len(roots) == 2
    assert all((span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT) for span in roots.values())
    for root_id, root in roots.items():
        stages = [span for span in collector.spans if span.parent_span_id == root_id]
        assert [span.name for span in stages] == ["prepare", "queue", "denoise", "decode"]
        times = [root.start_time_unix_nano, *(span.start_time_unix_nano for span in stages), root.end_time_unix_nano]
        assert times == sorted(times)
        denoise = {each.key: each.value for each in stages[2].attributes}
        assert denoise["psctl.batch.steps"].int_value == 4
        assert stages[2].events[0].name == "batch"


def test_wrong_endpoint_and_missing_extra(run_psctl: RunPsctl) -> None:
    done = run_psctl("serve", "--http", "--otlp-traces-endpoint", "localhost:4317")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "must be like http://localhost:4318/v1/traces" in done.stderr
    if find_spec("opentelemetry.exporter") is None or find_spec("opentelemetry.exporter.otlp") is None:
        done = run_psctl("serve", "--http", "--port", "0", "--otlp-traces-endpoint", "http://localhost:1/v1/traces")
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert "install it with: pip install 'psctl[otel]'" in done.stderr
