"""OpenTelemetry traces of requests: a span for each request, and under it a span for each stage. No torch."""

from collections import deque
from collections.abc import Callable, Mapping
from importlib.metadata import version
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ...data.errors import MissingExtraError
from ..core.request_state import RequestRecord
from ..core.step_row import StepRow
from .errors import ApiError
from .front_end import Watcher
from .tickets import Ticket

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_MOST_ROWS = 20_000
"""Latest steps that are kept for the batches of requests in them."""
_MOST_EVENTS = 100
"""Changes of the batch that a span records."""
_STAGES = (
    ("prepare", "prepare_start_s", "prepare_end_s"),
    ("queue", "prepare_end_s", "admitted_s"),
    ("denoise", "admitted_s", "denoise_end_s"),
    ("decode", "denoise_end_s", "finish_s"),
)


class Traces(Watcher):
    """Watcher that exports spans.

    A request's span continues the trace of its `traceparent` header. The span of the denoise stage has the batches that
    the image was in: their number of steps, mean and largest size, and an event for each change of their composition.

    Args:
        exporter: exports the spans, in a thread of its own.
        has_batches: returns whether `on_row` receives the steps of one engine, whose clock is that of its requests.
    """

    def __init__(self, exporter: "SpanExporter", has_batches: Callable[[], bool] = lambda: True) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self.has_batches = has_batches
        self._provider = TracerProvider(resource=Resource.create({"service.name": "psctl"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("psctl", version("psctl"))
        self._rows: deque[StepRow] = deque(maxlen=_MOST_ROWS)

    def close(self) -> None:
        """Export the spans that are left."""
        self._provider.shutdown()

    def on_row(self, row: StepRow) -> None:
        """Keep a step for the spans of the requests in its batch."""
        self._rows.append(row)

    def on_accepted(self, ticket: Ticket) -> None:
        """Do nothing: a request is exported when it has ended."""

    def on_rejected(self, error: ApiError, request_id: str, key: str) -> None:
        """Do nothing: a request that is not admitted has no stages."""

    def on_answer(self, route: str, status: int, request_id: str) -> None:
        """Do nothing: responses are in the log and the metrics."""

    def on_over(self, ticket: Ticket) -> None:
        """Export the spans of a request."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        generation, records = ticket.generation, ticket.records
        attributes: dict[str, Any] = {
            "psctl.request_id": ticket.request_id,
            "psctl.key": ticket.key,
            "psctl.status": ticket.status,
            "psctl.size": str(generation.resolution),
            "psctl.num_inference_steps": generation.num_steps,
            "psctl.images": len(generation.seeds),
        }
        if ticket.slo_s is not None:
            attributes["psctl.slo_s"] = ticket.slo_s
        span = self._tracer.start_span(
            "edit" if generation.kind == "image_edit" else "generate",
            TraceContextTextMapPropagator().extract(ticket.trace_context),
            kind=trace.SpanKind.SERVER,
            attributes=attributes,
            start_time=_ns(ticket.created_s),
        )
        if ticket.error is not None:
            span.set_status(trace.StatusCode.ERROR, f"{ticket.error.code}: {ticket.error.message}")
        ends_s = [ticket.created_s]
        inside = trace.set_span_in_context(span)
        for record in records:
            # The engine's clock has another zero.
            zero_s = ticket.created_s - record.arrival_s
            for name, began, ended in _STAGES:
                began_s, ended_s = getattr(record, began), getattr(record, ended)
                if began_s is None or ended_s is None:
                    continue
                stage = self._tracer.start_span(
                    name,
                    inside,
                    attributes={"psctl.image": ticket.numbers.index(record.request_id)},
                    start_time=_ns(zero_s + began_s),
                )
                if name == "denoise" and self.has_batches():
                    self._add_batches(stage, record, zero_s)
                stage.end(_ns(zero_s + ended_s))
                ends_s.append(zero_s + ended_s)
        span.end(_ns(max(ends_s)))

    def _add_batches(self, stage: Any, record: RequestRecord, zero_s: float) -> None:
        assert record.admitted_s is not None
        assert record.denoise_end_s is not None
        size = str(record.resolution)
        rows = [
            row
            for row in self._rows
            if record.admitted_s <= row.start_s < record.denoise_end_s and size in row.resolutions
        ]
        if not rows:
            return
        stage.set_attribute("psctl.batch.steps", len(rows))
        stage.set_attribute("psctl.batch.mean_size", sum(row.active for row in rows) / len(rows))
        stage.set_attribute("psctl.batch.largest_size", max(row.active for row in rows))
        changes = [rows[0], *(after for before, after in pairwise(rows) if after.resolutions != before.resolutions)]
        for row in changes[:_MOST_EVENTS]:
            stage.add_event("batch", _composition(row), _ns(zero_s + row.start_s))


def otlp_traces(endpoint: str) -> Traces:
    """Return traces that are exported to a collector, by OTLP over HTTP. Raises MissingExtraError."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise MissingExtraError(error.name or "opentelemetry-exporter-otlp-proto-http", "otel") from error
    return Traces(OTLPSpanExporter(endpoint))


def trace_context_of(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that name the trace which a request belongs to."""
    return {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}


def _composition(row: StepRow) -> dict[str, Any]:
    return {
        "psctl.batch.size": row.active,
        "psctl.batch.waiting": row.waiting,
        **{f"psctl.batch.of.{size}": count for size, count in sorted(row.resolutions.items())},
    }


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
