"""Trace files: JSONL, CSV and the `Request(...)` lines of other benchmark clients, told apart by their first line."""

import ast
import csv
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TextIO

from ..errors import UsageError
from ..files import atomic_write
from ..requests import Request
from ..resolution import Resolution, parse
from .draws import RequestDraws

TRACE_FIELDS = (
    "request_id",
    "arrival_s",
    "timestamp",
    "width",
    "height",
    "resolution",
    "prompt",
    "negative_prompt",
    "num_inference_steps",
    "guidance_scale",
    "seed",
    "slo_s",
    "slo_ms",
    "num_frames",
)
"""All that a line may say. arrival_s and timestamp are one thing (seconds), so are slo_s and slo_ms, width and height
and resolution (text, as "128x192"). num_frames must be 1: images only."""

_ALLOWED = f"allowed are {', '.join(TRACE_FIELDS)}"
_Line = tuple[int, dict[str, Any]]


@dataclass(frozen=True)
class TraceDefaults:
    """What requests of a trace file ask for where their lines say nothing.

    A missing prompt, resolution or seed is drawn as in a random trace of the same `seed`, so a file of mere arrival
    times becomes a full trace. With no `prompts` or no `resolutions`, a line without one is an error. A missing
    num_inference_steps follows the drawn resolution if there is one number of steps per resolution.
    """

    prompts: Sequence[str] = ()
    resolutions: Sequence[Resolution] = ()
    mix: Sequence[float] | None = None
    num_inference_steps: int | Sequence[int] = 30
    guidance_scale: float = 4.0
    seed: int = 0
    negative_prompt: str | None = None
    slo_s: float | None = None


def load_trace(path: str | Path, *, defaults: TraceDefaults | None = None) -> list[Request]:
    """Read a trace.

    Formats: JSONL (an object per line), CSV (the header names the fields), or lines such as
    `Request(request_id=0, timestamp=0.0, height=256, width=256, prompt='...')`, which are parsed and never run. The
    fields are `TRACE_FIELDS`; only the arrival must be there. An empty CSV cell and a JSON null count as missing. A
    missing request_id is the number of the request in the file, from 0.

    Raises:
        UsageError: the file cannot be read, is empty or has another form; a line is malformed, has an unknown or bad
            field, arrives before the line above it or repeats a request_id. The message starts with `file:line:`.
    """
    path = Path(path)
    defaults = TraceDefaults() if defaults is None else defaults
    requests: list[Request] = []
    line_of_id: dict[int, int] = {}
    draws = _draws(defaults)
    above = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, values in _read_lines(path, file):
                try:
                    request = _request(values, draws.next(len(requests)), defaults)
                    if request.request_id in line_of_id:
                        first = line_of_id[request.request_id]
                        raise UsageError(f"request_id {request.request_id} was given before, on line {first}")
                    if requests and request.arrival_s < requests[-1].arrival_s:
                        raise UsageError(
                            f"time goes back from {requests[-1].arrival_s} s on line {above} to {request.arrival_s} s, "
                            "but lines must be in order of arrival"
                        )
                except UsageError as error:
                    raise UsageError(f"{path}:{number}: {error}") from error
                requests.append(request)
                line_of_id[request.request_id] = above = number
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text") from error
    except OSError as error:
        raise UsageError(
            f"{path}: cannot read the trace: {error.strerror} (a trace is poisson, gamma, diurnal, azure or a file)"
        ) from error
    if not requests:
        raise UsageError(f"{path}: the trace is empty, but it must hold at least one request")
    return requests


def save_trace(path: str | Path, requests: Sequence[Request]) -> None:
    """Write a trace atomically as JSONL, from which `load_trace` (with no default SLO or negative prompt) reads back
    equal requests.

    Raises:
        OSError: the file cannot be written; nothing is left half-written.
    """
    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        for request in requests:
            values: dict[str, Any] = {}
            for field in fields(request):
                value = getattr(request, field.name)
                if isinstance(value, Resolution):
                    values |= value._asdict()
                elif value is not None:
                    values[field.name] = value
            file.write(json.dumps(values, ensure_ascii=False) + "\n")


def _draws(defaults: TraceDefaults) -> RequestDraws:
    # Stand-ins where there are no defaults: `_request` then asks for the field before the stand-in is used.
    return RequestDraws(
        prompts=defaults.prompts or [""],
        resolutions=defaults.resolutions or [Resolution(8, 8)],
        mix=defaults.mix,
        num_inference_steps=defaults.num_inference_steps,
        guidance_scale=defaults.guidance_scale,
        seed=defaults.seed,
        negative_prompt=defaults.negative_prompt,
        slo_s=defaults.slo_s,
    )


def _request(values: dict[str, Any], drawn: Request, defaults: TraceDefaults) -> Request:
    """The request of one line: what it says, and `drawn` for the rest."""
    unknown = [name for name in values if name not in TRACE_FIELDS]
    if unknown:
        raise UsageError(f"unknown field {unknown[0]!r}; {_ALLOWED}")
    given = {name: value for name, value in values.items() if value is not None}
    for one, other in (("arrival_s", "timestamp"), ("slo_s", "slo_ms"), ("resolution", "width")):
        if one in given and other in given:
            raise UsageError(f"{one} and {other} are both given, but they say the same thing: give one of them")
    if ("width" in given) != ("height" in given):
        raise UsageError("width and height must be given together")
    if "num_frames" in given and _int("num_frames", given.pop("num_frames")) != 1:
        raise UsageError("num_frames is not 1, but only images (one frame) can be served")

    changes = {name: convert(name, given[name]) for name, convert in _CONVERTERS.items() if name in given}
    if "timestamp" in given:
        changes["arrival_s"] = _float("timestamp", given["timestamp"])
    if "slo_ms" in given:
        changes["slo_s"] = _float("slo_ms", given["slo_ms"]) / 1000
    if "width" in given:
        changes["resolution"] = Resolution(_int("width", given["width"]), _int("height", given["height"]))
    for name, default in (("arrival_s", None), ("resolution", defaults.resolutions), ("prompt", defaults.prompts)):
        if name not in changes and not default:
            what = "timestamp (or arrival_s)" if name == "arrival_s" else name
            raise UsageError(f"{what} is missing, and there is no default for it; {_ALLOWED}")
    return replace(drawn, **changes)


def _int(name: str, value: object) -> int:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass  # the error below says it better
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}, but it must be a whole number")
    return value


def _float(name: str, value: object) -> float:
    try:
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            return float(value)
    except (ValueError, OverflowError):
        pass  # the error below says it better
    raise UsageError(f"{name} is {value!r}, but it must be a finite number")


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{name} is {value!r}, but it must be text")
    return value


def _resolution(name: str, value: object) -> Resolution:
    return parse(str(value))


_CONVERTERS: dict[str, Callable[[str, object], Any]] = {
    "request_id": _int,
    "arrival_s": _float,
    "resolution": _resolution,
    "prompt": _text,
    "negative_prompt": _text,
    "num_inference_steps": _int,
    "guidance_scale": _float,
    "seed": _int,
    "slo_s": _float,
}


def _read_lines(path: Path, file: TextIO) -> Iterator[_Line]:
    """Line number and fields of each request; the first line that is not blank tells the format."""
    first, number = "", 0
    for number, first in enumerate(file, start=1):  # noqa: B007 (both are used after the loop)
        if first.strip():
            break
    file.seek(0)
    head = first.lstrip("\ufeff \t")
    if head.startswith("{"):
        yield from _read_objects(path, file, _parse_json)
    elif head.startswith("Request("):
        yield from _read_objects(path, file, _parse_call)
    elif head.strip():
        yield from _read_csv(path, file, number)


def _read_objects(path: Path, file: TextIO, parse_line: Callable[[str], dict[str, Any]]) -> Iterator[_Line]:
    for number, line in enumerate(file, start=1):
        text = line.strip().removeprefix("\ufeff")
        if text:
            try:
                yield number, parse_line(text)
            except (ValueError, RecursionError, MemoryError) as error:
                raise UsageError(f"{path}:{number}: {error}") from error


def _parse_json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError("the line must be one JSON object, as the first line is")
    return value


def _parse_call(text: str) -> dict[str, Any]:
    form = "the line must be Request(name=value, ...) with plain values"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # prompts with stray backslashes
            warnings.simplefilter("ignore", DeprecationWarning)
            node = ast.parse(text, mode="eval").body
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id != "Request":
            raise UsageError(form)
        if node.args or any(keyword.arg is None for keyword in node.keywords):
            raise UsageError(form)
        return _unique([(str(keyword.arg), ast.literal_eval(keyword.value)) for keyword in node.keywords])
    except SyntaxError as error:
        raise UsageError(f"{form}: {error.msg}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise UsageError(f"{twice} is given twice")
    return values


def _read_csv(path: Path, file: TextIO, header_line: int) -> Iterator[_Line]:
    reader = csv.reader(file, strict=True)
    names: list[str] = []
    above = 0
    try:
        for row in reader:
            number, above = above + 1, reader.line_num  # a quoted prompt may span lines: tell where the row begins
            if not any(cell.strip() for cell in row):
                continue
            if not names:
                names = _header(path, number, row)
                continue
            if len(row) != len(names):
                raise UsageError(f"{path}:{number}: has {len(row)} columns, but the header has {len(names)}")
            yield number, {name: cell for name, cell in zip(names, row, strict=True) if cell.strip()}
    except csv.Error as error:
        raise UsageError(f"{path}:{reader.line_num}: malformed CSV: {error}") from error


def _header(path: Path, number: int, row: list[str]) -> list[str]:
    names = [name.strip().removeprefix("\ufeff") for name in row]
    if not {"timestamp", "arrival_s"} & set(names):
        raise UsageError(
            f"{path}:{number}: not a trace: the first line must be a JSON object, a Request(...) or a CSV header with "
            "timestamp or arrival_s"
        )
    for i, name in enumerate(names):
        if name not in TRACE_FIELDS:
            raise UsageError(f"{path}:{number}: unknown column {name!r}; {_ALLOWED}")
        if name in names[:i]:
            raise UsageError(f"{path}:{number}: column {name!r} is there twice")
    return names
