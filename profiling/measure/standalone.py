"""Standalone latency: how long a request takes alone on plain diffusers, the unit of SLOs (PatchedServe section 8).

There is one definition for all systems of every command that serves: it is measured end to end (text encoding,
denoising, decoding) through the plain engine, whatever engine is to serve, one request at a time on the idle machine,
and kept in the workspace's table `standalone.json`. (`psctl simulate` serves nothing: it adds up the stages by a table
of step latencies of the plain engine.) A measurement is used again only for the same model files, dtype, device, number
of CPU threads and torch version, and the same resolution, steps and kind of guidance. It is eager whatever is served:
a deadline says what a user waits for, not how the server was started.
"""

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.errors import RunError, UsageError
from ...data.files import write_json
from ...data.requests import Request
from ...data.resolution import Resolution

if TYPE_CHECKING:
    from ...serving.models.served import ServedModel

TABLE_FILE = "standalone.json"
_VERSION = 3  # those before are of a weaker plain engine, or do not say of which
_WARMUP_STEPS = 2


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What the latency of a request depends on. Sorts from small to large images."""

    resolution: Resolution
    num_inference_steps: int
    is_guided: bool


def shape_of(model: "ServedModel", request: Request) -> RequestShape:
    """Return the shape of a request as this model serves it; an edit counts as a new image of as many steps."""
    is_guided = model.family.uses_guidance(request.guidance_scale)
    return RequestShape(request.resolution, request.num_steps, is_guided)


def standalone_latencies(
    model: "ServedModel",
    requests: Iterable[Request],
    tables: Path,
    *,
    remeasure: bool = False,
    num_repeats: int = 3,
    on_measure: Callable[[RequestShape], None] | None = None,
) -> dict[RequestShape, float]:
    """Return the standalone latency in seconds of every shape among the requests, measuring those not yet known.

    Args:
        model, tables: what will serve them, whatever its engine, and the workspace's folder of tables for it.
        requests: a trace; its first request of each shape is what is measured.
        remeasure: measure again what is known.
        num_repeats: measurements per shape, after a warm-up; the median counts.
        on_measure: called before each shape that is measured.

    Raises:
        UsageError: if the table in the workspace is damaged.
        RunError: if a request fails while it is measured, or another table is damaged.
        OSError: if the table cannot be written, or the cache's predictor cannot be read.
        KeyboardInterrupt: on Ctrl-C; shapes that were measured before are kept.
    """
    from ...serving.models.build import as_plain

    model = as_plain(model, is_eager=True)
    examples: dict[RequestShape, Request] = {}
    for request in requests:
        shape = shape_of(model, request)
        image = replace(request, edit=None, traced=None, num_inference_steps=shape.num_inference_steps)
        examples.setdefault(shape, image)
    path = tables / TABLE_FILE
    known, context = read_standalone(path, or_empty=remeasure), context_key(model)
    latencies: dict[RequestShape, float] = {}
    for shape in sorted(
        examples, key=lambda shape: (shape.resolution.pixels, shape.resolution, shape.num_inference_steps)
    ):
        key = _encode(context | asdict(shape) | {"resolution": str(shape.resolution)})
        if remeasure or key not in known:
            if on_measure is not None:
                on_measure(shape)
            model.tune([example.resolution for example in examples], tables)
            _serve_alone(model, examples[shape], min(_WARMUP_STEPS, shape.num_inference_steps))
            known[key] = [_serve_alone(model, examples[shape], shape.num_inference_steps) for _ in range(num_repeats)]
            _write(path, known)
        latencies[shape] = statistics.median(known[key])
    return latencies


def _serve_alone(model: "ServedModel", request: Request, num_steps: int) -> float:
    from ...serving.engine.engine import Engine
    from ...serving.scheduling.policies import get_policy

    engine = Engine(model, get_policy("fcfs"), max_batch_size=1)
    engine.start()
    engine.submit(replace(request, request_id=0, num_inference_steps=num_steps, arrival_s=0.0, slo_s=None))
    engine.close()
    result = engine.run()
    if result.was_interrupted:
        raise KeyboardInterrupt
    record = result.records[0]
    if record.prepare_start_s is None or record.finish_s is None or record.status != "completed":
        raise RunError(f"measuring {request.resolution} alone failed: {record.reason}")
    return record.finish_s - record.prepare_start_s


def read_standalone(path: Path, *, or_empty: bool = False) -> dict[str, list[float]]:
    """Read the table: samples in seconds by key; empty if there is none, or one of an earlier version.

    Raises:
        UsageError: it is damaged, unless `or_empty` says that it is about to be replaced.
    """
    if not path.exists():
        return {}
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if table["version"] in range(1, _VERSION):
            return {}
        if table["version"] != _VERSION:
            raise ValueError(f"version {table['version']}")
        return {_encode(row["key"]): [float(sample) for sample in row["samples_s"]] for row in table["rows"]}
    except (ValueError, KeyError, TypeError) as error:
        if or_empty:
            return {}
        raise UsageError(f"{path} is damaged ({error}); delete it or use --remeasure") from error


def _write(path: Path, samples: dict[str, list[float]]) -> None:
    rows = [
        {"key": json.loads(key), "latency_s": statistics.median(values), "samples_s": values}
        for key, values in sorted(samples.items())
    ]
    write_json(path, {"version": _VERSION, "rows": rows})


def context_key(model: "ServedModel") -> dict[str, Any]:
    """What latencies of this model, engine and cache hold for. Raises OSError: the cache's predictor cannot be read."""
    from ..machine import run_facts

    about = run_facts(model).key()
    # The model counts by its files; guidance is each request's own, and part of its shape.
    for name in ("model", "guidance_scale", "is_guided"):
        del about[name]
    return about | {"cache": model.options.cache.identity()}


def _encode(key: dict[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)
