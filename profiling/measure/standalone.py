"""Standalone latency: how long a request takes alone on plain diffusers, the unit of SLOs (PatchedServe section 8).

There is one definition for all systems of every command that serves: it is measured end to end (text encoding,
denoising, decoding) through the plain engine, whatever engine is to serve, one request at a time on the idle machine,
and kept in the workspace's table `standalone.json`. (`psctl simulate` serves nothing: it adds up the stages by a table
of step latencies of the plain engine.) A measurement is used again only for the same model files, dtype, device, number
of CPU threads and torch version, and the same resolution, steps and kind of guidance. It is eager whatever is served:
a deadline says what a user waits for, not how the server was started.

What is kept is used for ever, so it must not tell of what the machine was busy with: a request is measured until three
samples agree, with how long our threads waited for a core meanwhile. What did not agree, or waited, is used with a
warning, and measured again by the first run that finds the machine quiet. So is what a run has served in much less.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from ...data.errors import RunError
from ...data.files import put_aside, write_json
from ...data.requests import Request
from ...data.resolution import Resolution
from .contention import MOST_WAITED, Contention, contention_now

if TYPE_CHECKING:
    from ...serving.models.served import ServedModel

TABLE_FILE = "standalone.json"
_VERSION = 4  # those before are of a weaker plain engine, do not say of which, or tell of doubts in other words
_WARMUP_STEPS = 2
AGREED = 1.1
"""The third least of the samples over the least, at most, where they agree."""
_NO_MATTER_S = 0.01
"""Seconds by which samples may differ besides."""
MOST_SAMPLES = 9
BUDGET_S = 60.0
"""Seconds after which no further sample of a request is begun."""
TOO_LONG = 1.5
"""As much longer than a request was served in, and what is kept is measured again, once."""
Doubted = Literal["no", "yes", "before"]


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What the latency of a request depends on. Sorts from small to large images."""

    resolution: Resolution
    num_inference_steps: int
    is_guided: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a request.

    Attributes:
        samples_s: in the order in which they were taken.
        waited: share of the time in which our threads wanted a core that they waited for one; None: it is not known.
        doubted: whether a run has served it in much less: `yes` until it is measured again, and `before` from then on.
    """

    samples_s: tuple[float, ...]
    waited: float | None = None
    doubted: Doubted = "no"

    @property
    def latency_s(self) -> float:
        """Median of the three least, which are those of the quietest moments."""
        return statistics.median(sorted(self.samples_s)[:3])

    @property
    def doubt(self) -> str | None:
        """Why it may be too long; None if it is sure."""
        if (self.waited or 0.0) > MOST_WAITED:
            return f"other work had the processor for {self.waited:.0%} of the time"
        if not self.agrees:
            return f"it took {min(self.samples_s):.3g} to {max(self.samples_s):.3g} s"
        return "a run has served it in much less" if self.doubted == "yes" else None

    @property
    def agrees(self) -> bool:
        """Whether its three least samples do."""
        least_s = sorted(self.samples_s)[:3]
        return least_s[-1] <= AGREED * least_s[0] + _NO_MATTER_S


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
    on_doubt: Callable[[str], None] = lambda doubt: None,
) -> dict[RequestShape, float]:
    """Return the standalone latency in seconds of every shape among the requests, measuring those not yet known, and
    those in doubt if the machine is quiet now.

    Args:
        model, tables: what will serve them, whatever its engine, and the workspace's folder of tables for it.
        requests: a trace; its first request of each shape is what is measured.
        remeasure: measure again what is known.
        num_repeats: the least measurements per shape, after a warm-up, unless they take longer than `BUDGET_S`.
        on_measure: called before each shape that is measured.
        on_doubt: told in one line which latencies may be too long, and why.

    Raises:
        RunError: if a request fails while it is measured.
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
    known, context = read_standalone(path), context_key(model)
    latencies: dict[RequestShape, float] = {}
    is_quiet: bool | None = None
    for shape in sorted(
        examples, key=lambda shape: (shape.resolution.pixels, shape.resolution, shape.num_inference_steps)
    ):
        key = _key_of(context, shape)
        if key in known and known[key].doubt is not None and is_quiet is None:
            is_quiet = (contention_now() or 0.0) <= MOST_WAITED
        if remeasure or key not in known or (known[key].doubt is not None and is_quiet):
            if on_measure is not None:
                on_measure(shape)
            model.tune([example.resolution for example in examples], tables)
            _serve_alone(model, examples[shape], min(_WARMUP_STEPS, shape.num_inference_steps))
            was_doubted = key in known and known[key].doubted != "no"
            alone = partial(_serve_alone, model, examples[shape], shape.num_inference_steps)
            known[key] = replace(_measure(alone, num_repeats), doubted="before" if was_doubted else "no")
            _write(path, known)
        latencies[shape] = known[key].latency_s
        if (doubt := known[key].doubt) is not None:
            on_doubt(f"the standalone latency of {shape.resolution} may be too long, and with it SLOs: {doubt}")
    return latencies


def _measure(serve_alone: Callable[[], float], least: int) -> Measured:
    """Take samples until they agree, or there are too many, or no time is left."""
    samples_s: list[float] = []
    waited: list[float] = []
    start_s = time.monotonic()
    while not samples_s or (len(samples_s) < MOST_SAMPLES and time.monotonic() - start_s < BUDGET_S):
        with Contention() as contention:
            samples_s.append(serve_alone())
        waited += [] if contention.share is None else [contention.share]
        measured = Measured(tuple(samples_s), statistics.median(waited) if waited else None)
        if len(samples_s) >= least and measured.agrees:
            break
    return measured


def doubt_standalone(
    model: "ServedModel", tables: Path, served_s: Mapping[RequestShape, float]
) -> dict[RequestShape, float]:
    """Note which latencies are to be measured again: requests were served, exactly, in less than two thirds of them.
    Of each this is done once.

    Args:
        model, tables: as in `standalone_latencies`.
        served_s: the least that a request of each shape was served in.

    Returns:
        What is kept of those shapes, in seconds.

    Raises:
        OSError: as `standalone_latencies`.
    """
    from ...serving.models.build import as_plain

    path, context = tables / TABLE_FILE, context_key(as_plain(model, is_eager=True))
    known, doubted_s = read_standalone(path), dict[RequestShape, float]()
    for shape, seconds in served_s.items():
        kept = known.get(key := _key_of(context, shape))
        if kept is not None and kept.doubted == "no" and kept.latency_s > TOO_LONG * seconds:
            known[key] = replace(kept, doubted="yes")
            doubted_s[shape] = kept.latency_s
    if doubted_s:
        _write(path, known)
    return doubted_s


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


def read_standalone(path: Path) -> dict[str, Measured]:
    """Read the table: what was measured by key; empty if there is none, or one of an earlier version, or it is damaged,
    which is warned of. Raises OSError.
    """
    if not path.exists():
        return {}
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if table["version"] in range(1, _VERSION):
            return {}
        if table["version"] != _VERSION:
            raise ValueError(f"version {table['version']}")
        return {_encode(row.pop("key")): _read_row(**row) for row in table["rows"]}
    except (ValueError, KeyError, TypeError) as error:
        put_aside(path, str(path), error)
        return {}


def _read_row(
    samples_s: list[float], latency_s: float, waited: float | None = None, doubted: Doubted = "no"
) -> Measured:
    if not samples_s or doubted not in get_args(Doubted):
        raise ValueError(f"a row has the samples {samples_s}, and doubted is {doubted!r}")
    return Measured(tuple(map(float, samples_s)), waited, doubted)


def _write(path: Path, known: dict[str, Measured]) -> None:
    rows = [
        {"key": json.loads(key), "latency_s": measured.latency_s, **asdict(measured)}
        for key, measured in sorted(known.items())
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


def _key_of(context: dict[str, Any], shape: RequestShape) -> str:
    return _encode(context | asdict(shape) | {"resolution": str(shape.resolution)})


def _encode(key: dict[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)
