"""Prometheus metrics, named psctl_ and the stems that vLLM uses. No torch.

Labels are served sizes (others are `other`), codes, routes and owners of keys, but never users or ids.
"""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from ...data.resolution import Resolution
from ..core.step_row import StepRow
from .backend import Backend
from .errors import ApiError
from .front_end import Watcher
from .tickets import Ticket

_SECONDS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_COUNTS = (1, 2, 4, 8, 12, 16, 24, 32, 64)
CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics(Watcher):
    """Watcher that counts requests, images, steps and responses.

    Args:
        sizes: sizes that have a label of their own.
        backend: backend whose load is read at every scrape.

    Attributes:
        operator: owner of keys that sees the metrics of all owners; every other owner sees only its own.
    """

    def __init__(self, sizes: Sequence[Resolution], backend: Backend) -> None:
        self._sizes = frozenset(map(str, sizes))
        registry, by_key = CollectorRegistry(), CollectorRegistry()
        self._registry, self._by_key, self.operator = registry, by_key, ""

        def gauge(name: str, about: str) -> Gauge:
            return Gauge(f"psctl_{name}", about, registry=registry)

        def seconds(name: str, about: str) -> Histogram:
            return Histogram(f"psctl_{name}", about, buckets=_SECONDS, registry=registry)

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"psctl_{name}", about, labels, registry=registry)

        gauge("num_requests_running", "Images in the batch.").set_function(lambda: backend.load.num_running)
        gauge("num_requests_waiting", "Images that are not in the batch yet.").set_function(
            lambda: backend.load.num_waiting
        )
        gauge("pixel_steps_pending", "Pixels times steps still to be denoised.").set_function(
            lambda: backend.load.pixel_steps
        )
        self.predictor_scale = gauge("predictor_scale", "What predicted step latencies are multiplied by.")
        self.cache_reused_share = gauge("cache_reused_share", "Share of computation that the patch cache has saved.")
        self.templates_recorded = gauge("templates_recorded", "Records of templates made since the start.")
        self.batch_failures = gauge(
            "batch_failures", "Steps of batches that failed, as where memory is full, and were repeated in halves."
        )
        for local_gauge in (
            self.predictor_scale,
            self.cache_reused_share,
            self.templates_recorded,
            self.batch_failures,
        ):
            # Engines in processes of their own do not report them.
            local_gauge.set(float("nan"))
        self._ended = counter("request_success", "Images that have ended, by how.", "finished_reason")
        self._met = counter("slo_met", "Images in time.", "resolution")
        self._missed = counter("slo_missed", "Images that were late, or never came.", "resolution")
        self._edits = counter("edits", "Edits that were drawn, by whether they read their template's record.", "reused")
        self._rejected = counter("rejected", "Requests that were not let in.", "code")
        self.log_lines_lost = counter("log_lines_lost", "Lines of the log that nobody read in time.")
        self._answers = counter("http_requests", "Answers.", "route", "code")
        self._images_of = Counter("psctl_key_images", "Images of a key that were drawn.", ["key"], registry=by_key)
        self._work_of = Counter("psctl_key_pixel_steps", "Pixels times steps of these.", ["key"], registry=by_key)
        self._rejected_of = Counter(
            "psctl_key_rejected", "Requests of a key that were not let in.", ["key", "code"], registry=by_key
        )
        self._latency = seconds("e2e_request_latency_seconds", "From the request to its image.")
        self._queue = seconds("request_queue_time_seconds", "From the request to the batch.")
        self._prepare = seconds("request_prepare_time_seconds", "Text encoding and first latents.")
        self._denoise = seconds("request_denoise_time_seconds", "In the batch.")
        self._decode = seconds("request_decode_time_seconds", "From the last step to the image.")
        self._first = seconds("time_to_first_image_seconds", "From the request to its first image, partial or not.")
        self._step = Histogram(
            "psctl_step_duration_seconds", "Denoising steps.", buckets=_STEP_SECONDS, registry=registry
        )
        self._batch = Histogram("psctl_batch_size", "Images in a step.", buckets=_COUNTS, registry=registry)
        self._resolutions = Histogram(
            "psctl_batch_resolutions", "Different sizes in a step.", buckets=_COUNTS[:5], registry=registry
        )

    def exposition(self, key: str) -> bytes:
        """Return the metrics that the owner of a key may see, in Prometheus's text format."""
        by_key = generate_latest(self._by_key).splitlines(keepends=True)
        own = f'key="{key}"'.encode()
        lines = [line for line in by_key if line.startswith(b"#") or key == self.operator or own in line]
        return generate_latest(self._registry) + b"".join(lines)

    def on_row(self, row: StepRow) -> None:
        """Record a step."""
        self._step.observe(row.duration_s)
        self._batch.observe(row.active)
        self._resolutions.observe(len(row.resolutions))

    def on_answer(self, route: str, status: int, request_id: str) -> None:
        """Count a response."""
        self._answers.labels(route, str(status)).inc()

    def on_accepted(self, ticket: Ticket) -> None:
        """Do nothing: requests are counted when they end."""

    def on_rejected(self, error: ApiError, request_id: str, key: str) -> None:
        """Count a rejected request."""
        self._rejected.labels(error.code).inc()
        if key:
            self._rejected_of.labels(key, error.code).inc()

    def on_over(self, ticket: Ticket) -> None:
        """Record the images and latencies of a ticket that has ended."""
        if ticket.first_image_s is not None:
            self._first.observe(ticket.first_image_s)
        if ticket.key and ticket.drawn:
            generation, num_drawn = ticket.generation, len(ticket.drawn)
            self._images_of.labels(ticket.key).inc(num_drawn)
            self._work_of.labels(ticket.key).inc(num_drawn * generation.pixels_seen * generation.num_steps)
        for record in ticket.records:
            self._ended.labels(record.status).inc()
            size = str(record.resolution)
            if record.slo_s is not None and record.status != "cancelled":
                (self._met if record.slo_met else self._missed).labels(size if size in self._sizes else "other").inc()
            if record.reused is not None and record.status == "completed":
                self._edits.labels(str(record.reused).lower()).inc()
            for histogram, seconds in (
                (self._latency, record.latency_s),
                (self._queue, record.queueing_s),
                (self._prepare, record.prepare_s),
                (self._denoise, record.denoise_s),
                (self._decode, record.decode_s),
            ):
                if seconds is not None:
                    histogram.observe(seconds)
