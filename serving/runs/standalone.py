"""Standalone latency: how long a request takes alone on plain diffusers, the unit of SLOs (PatchedServe section 8).

One definition applies to all systems of every serving command: the latency is measured end to end (text encoding,
denoising, decoding) through the plain engine, whichever engine serves, one request at a time on the idle machine. It is
kept in the workspace's table `standalone.json`. (`psctl simulate` serves nothing: it adds up the stages from a table of
step latencies of the plain engine.) A measurement is reused only for the same model files, dtype, device, number of CPU
threads and torch version, and the same resolution, steps and kind of guidance. It is eager whatever is served: a
deadline expresses how long a user waits, not how the server was started.

A kept measurement does not expire, so it must not reflect other load on the machine. A request is measured until three
samples agree, and the time that our threads waited for a core is recorded with them. A measurement whose samples do not
agree, or whose threads waited, is used with a warning; the first run that finds the machine quiet repeats it. The same
holds for a latency much longer than the time in which a run has served the request.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...data.checks import require_counts
from ...data.errors import RunError
from ...data.files import quarantine, write_json
from ...data.parsing import parse
from ...data.requests import Request, sizes_in_words
from ...data.resolution import Resolution
from .contention import MAX_WAITED, Contention, contention_now

if TYPE_CHECKING:
    from ..models.served import ServedModel

TABLE_FILE = "standalone.json"
_VERSION = 4  # earlier tables are of a weaker plain engine, do not name the engine, or record doubts differently
_WARMUP_STEPS = 2
AGREED = 1.1
"""Maximum ratio of the third smallest sample to the smallest for samples to agree."""
_NO_MATTER_S = 0.01
"""Seconds by which samples may differ in addition."""
MAX_SAMPLES = 9
BUDGET_S = 60.0
"""Seconds after which no further sample of a request begins."""
TOO_LONG = 1.5
"""Ratio to the time in which a request was served above which a kept latency is measured again, once."""
Doubted = Literal["no", "yes", "before"]


@dataclass(frozen=True, slots=True)
class RequestShape:
    """Properties of a request that its latency depends on."""

    resolution: Resolution
    num_inference_steps: int
    is_guided: bool
    references: tuple[Resolution, ...] = ()

    @property
    def in_words(self) -> str:
        """Its sizes (`sizes_in_words`)."""
        return sizes_in_words((self.resolution, *self.references))


@dataclass(frozen=True, slots=True)
class StandaloneMeasurement:
    """Standalone measurement of a request.

    Attributes:
        samples_s: latencies in seconds, in the order of measurement.
        waited: part of the time in which our threads were ready to run but waited for a core; None if unknown.
        doubted: whether a run has served the request in much less: `yes` until it is measured again, then `before`.

    Raises:
        UsageError: there is no sample.
    """

    samples_s: tuple[float, ...]
    waited: float | None = None
    doubted: Doubted = "no"

    def __post_init__(self) -> None:
        require_counts({"number of samples": len(self.samples_s)})

    @property
    def latency_s(self) -> float:
        """Median of the three smallest samples, which were taken when the machine was quietest."""
        return statistics.median(sorted(self.samples_s)[:3])

    @property
    def doubt(self) -> str | None:
        """Reason why the latency may be too long; None if there is no doubt."""
        if (self.waited or 0.0) > MAX_WAITED:
            return f"other work had the processor for {self.waited:.0%} of the time"
        if not self.agrees:
            return f"it took {min(self.samples_s):.3g} to {max(self.samples_s):.3g} s"
        return "a run has served it in much less" if self.doubted == "yes" else None

    @property
    def agrees(self) -> bool:
        """Whether the three smallest samples agree."""
        least_s = sorted(self.samples_s)[:3]
        return least_s[-1] <= AGREED * least_s[0] + _NO_MATTER_S


def shape_of(model: "ServedModel", request: Request) -> RequestShape:
    """Return the shape of a request as this model serves it; an edit counts as a new image with its number of steps."""
    is_guided = model.family.uses_guidance(request.guidance_scale)
    references = tuple(reference.resolution for reference in request.references)
    return RequestShape(request.resolution, request.num_steps, is_guided, references)


def standalone_latencies(
    model: "ServedModel",
    requests: Iterable[Request],
    tables: Path,
    *,
    remeasure: bool = False,
    num_repeats: int = 3,
    budget_s: float | None = None,
    on_measure: Callable[[RequestShape], None] | None = None,
    on_doubt: Callable[[str], None] = lambda doubt: None,
) -> dict[RequestShape, float]:
    """Return the standalone latency in seconds of every shape among the requests. Shapes that are not yet known are
    measured, and shapes in doubt are measured again if the machine is quiet.

    Args:
        model: served model, on any engine.
        tables: folder of tables in the model's workspace.
        requests: trace, whose first request of each shape is measured.
        remeasure: whether known shapes are measured again.
        num_repeats: minimum number of measurements per shape, after a warm-up, unless they take longer than `BUDGET_S`.
        budget_s: seconds after which no further shape is measured, and no further sample begins: shapes that are not
            known then are missing from the result. None measures all, 0 none.
        on_measure: called before each shape that is measured.
        on_doubt: called with a line that names a latency that may be too long, and the reason.

    Raises:
        RunError: if a request fails while it is measured.
        OSError: if the table cannot be written, or the cache's predictor cannot be read.
        KeyboardInterrupt: on Ctrl-C; shapes that were measured before it are kept.
    """
    from ..models.build import as_plain

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
    start_s = time.monotonic()
    for shape in sorted(
        examples,
        key=lambda shape: (shape.resolution.pixels, shape.resolution, shape.num_inference_steps, shape.references),
    ):
        key = _key_of(context, shape)
        if key in known and known[key].doubt is not None and is_quiet is None:
            is_quiet = (contention_now() or 0.0) <= MAX_WAITED
        left_s = math.inf if budget_s is None else start_s + budget_s - time.monotonic()
        if left_s <= 0 and key not in known:
            continue
        if left_s > 0 and (remeasure or key not in known or (known[key].doubt is not None and is_quiet)):
            if on_measure is not None:
                on_measure(shape)
            model.tune([example.resolution for example in examples], tables)
            _serve_alone(model, examples[shape], min(_WARMUP_STEPS, shape.num_inference_steps))
            was_doubted = key in known and known[key].doubted != "no"
            alone = partial(_serve_alone, model, examples[shape], shape.num_inference_steps)
            known[key] = replace(
                _measure(alone, num_repeats, min(BUDGET_S, left_s)), doubted="before" if was_doubted else "no"
            )
            _write(path, known)
        latencies[shape] = known[key].latency_s
        if (doubt := known[key].doubt) is not None:
            on_doubt(f"the standalone latency of {shape.in_words} may be too long, and with it SLOs: {doubt}")
    return latencies


def _measure(serve_alone: Callable[[], float], least: int, within_s: float) -> StandaloneMeasurement:
    """Take samples until they agree, there are `MAX_SAMPLES`, or the time is over."""
    samples_s: list[float] = []
    waited: list[float] = []
    start_s = time.monotonic()
    while not samples_s or (len(samples_s) < MAX_SAMPLES and time.monotonic() - start_s < within_s):
        with Contention() as contention:
            samples_s.append(serve_alone())
        waited += [] if contention.share is None else [contention.share]
        measured = StandaloneMeasurement(tuple(samples_s), statistics.median(waited) if waited else None)
        if len(samples_s) >= least and measured.agrees:
            break
    return measured


def doubt_standalone(
    model: "ServedModel", tables: Path, served_s: Mapping[RequestShape, float]
) -> dict[RequestShape, float]:
    """Mark latencies for a new measurement if requests were served exactly in less than 1 / `TOO_LONG` of them. A
    latency is marked at most once.

    Args:
        model, tables: as in `standalone_latencies`.
        served_s: shortest time in which a request of each shape was served.

    Returns:
        The kept latencies of the marked shapes, in seconds.

    Raises:
        OSError: as `standalone_latencies`.
    """
    from ..models.build import as_plain

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
    from ..engine.engine import Engine
    from ..scheduling.policies import get_policy

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


def read_standalone(path: Path) -> dict[str, StandaloneMeasurement]:
    """Return the measurements of the table by key; empty if there is no table, or one of an earlier version. A damaged
    or newer table is put aside with a warning. Raises OSError.
    """
    if not path.exists():
        return {}
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if table["version"] in range(1, _VERSION):
            return {}
        if table["version"] != _VERSION:
            raise ValueError(f"version {table['version']}")
        measured = parse(list[StandaloneMeasurement], table["rows"])
        return {_encode(row["key"]): each for row, each in zip(table["rows"], measured, strict=True)}
    except (ValueError, KeyError, TypeError) as error:
        quarantine(path, str(path), error)
        return {}


def _write(path: Path, known: dict[str, StandaloneMeasurement]) -> None:
    rows = [
        {"key": json.loads(key), "latency_s": measured.latency_s, **asdict(measured)}
        for key, measured in sorted(known.items())
    ]
    write_json(path, {"version": _VERSION, "rows": rows})


def context_key(model: "ServedModel") -> dict[str, Any]:
    """Return the key of the circumstances for which latencies of this model, engine and cache hold.

    Raises OSError if the cache's predictor cannot be read.
    """
    from .machine import run_facts

    about = run_facts(model).key()
    # The model's files identify it; guidance belongs to the request's shape.
    for name in ("model", "guidance_scale", "is_guided"):
        del about[name]
    return about | {"cache": model.options.cache.identity()}


def _key_of(context: dict[str, Any], shape: RequestShape) -> str:
    own = asdict(shape) | {"resolution": str(shape.resolution), "references": [str(size) for size in shape.references]}
    if not shape.references:
        del own["references"]  # as in tables of earlier versions
    return _encode(context | own)


def _encode(key: dict[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)
