"""Trace files: JSONL, CSV and the `Request(...)` lines of other benchmark clients, recognised by their first line."""

import ast
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, TextIO

from pydantic import BeforeValidator, ConfigDict, PlainValidator, Strict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from ..adapters import Adapters, adapters_text, read_adapters
from ..checks import require_text
from ..errors import UsageError
from ..files import atomic_write
from ..parsing import NamedResolution
from ..records import csv_rows, keys_given_twice, open_text, parse_json, parsed_lines, unique_keys
from ..requests import Request, TracedEdit
from ..resolution import Resolution
from .draws import RequestDraws, TraceDefaults
from .edits import traced_edit
from .traces import TRACE_KINDS


def not_bool(value: object) -> object:
    """Refuse true and false, which Python counts among the numbers."""
    if isinstance(value, bool):
        raise ValueError("a truth value is not a number")
    return value


Number = Annotated[float, BeforeValidator(not_bool)]
Whole = Annotated[int, BeforeValidator(not_bool)]
Text = Annotated[str, Strict()]
Flag = Annotated[bool, BeforeValidator(lambda value: {"true": True, "false": False}.get(str(value), value)), Strict()]
"""A boolean, also as CSV files write it."""
Names = Annotated[
    tuple[Text, ...],
    BeforeValidator(lambda value: tuple(value.split(";")) if isinstance(value, str) else value),
]
"""Several names: a list, or text with semicolons between them, as CSV files write it."""
Adapting = Annotated[Adapters, PlainValidator(lambda value: read_adapters(value))]


class TraceLine(TypedDict, total=False):
    """Fields of a line; numbers may also be text, because CSV has nothing else.

    arrival_s and timestamp (seconds) are synonyms, as slo_s and slo_ms are, and width with height and resolution (text,
    as "128x192"). num_frames must be 1, because only images are served. image, mask, references, mask_ratio and
    strength belong to edits. lora names adapters (`read_adapters`). cache is whether steps may reuse the results of
    earlier ones, yields whether a request takes no steps while others wait. priority ranks the waiting requests of one
    owner; lower ones are admitted earlier. weight is the part of its owner in the batch, relative to other owners.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # pyright: ignore[reportGeneralTypeIssues]
    request_id: Whole
    arrival_s: Number
    timestamp: Number
    width: Whole
    height: Whole
    resolution: NamedResolution
    prompt: Text
    negative_prompt: Text
    num_inference_steps: Whole
    guidance_scale: Number
    seed: Whole
    slo_s: Number
    slo_ms: Number
    num_frames: Whole
    fallback: Text
    image: Text
    mask: Text
    references: Names
    mask_ratio: Number
    strength: Number
    lora: Adapting
    cache: Flag
    yields: Flag
    owner: Text
    priority: Whole
    weight: Number


TRACE_FIELDS = tuple(TraceLine.__annotations__)
_USUAL = {"fallback": "light", "cache": True, "yields": False, "owner": "", "priority": 0, "weight": 1.0}
"""Defaults of fields that a line omits."""
_OF_EDITS = ("image", "mask", "mask_ratio", "strength", "references")
_ALLOWED = f"allowed are {', '.join(TRACE_FIELDS)}"
_KINDS = {"int": "a whole number", "float": "a finite number", "string": "text", "bool": "true or false"}
_adapter = TypeAdapter(TraceLine)
_Line = tuple[int, dict[str, Any]]


def load_trace(path: str | Path, *, defaults: TraceDefaults | None = None) -> list[Request]:
    """Read a trace.

    Formats: JSONL (an object per line), CSV (the header names the fields), or lines such as
    `Request(request_id=0, timestamp=0.0, height=256, width=256, prompt='...')`, which are parsed and never executed.
    The fields are `TRACE_FIELDS`; only the arrival is required. An empty CSV cell and a JSON null count as missing. A
    missing request_id is the number of the request in the file, from 0. A missing prompt, resolution or seed is drawn
    as in a random trace of the same seed, so that a file of arrival times alone becomes a full trace.

    Args:
        path: path of the file.
        defaults: values of omitted fields; without prompts or without resolutions, a line that names none is an error.
            A missing num_inference_steps follows the drawn resolution if there is one number of steps per resolution.

    Raises:
        UsageError: the file cannot be read, is empty or has another form; a line is malformed, has an unknown or bad
            field, arrives before the line above it or repeats a request_id. The message starts with `file:line:`.
    """
    path = Path(path)
    defaults = TraceDefaults() if defaults is None else defaults
    requests: list[Request] = []
    line_of_id: dict[int, int] = {}
    # Values that are drawn without defaults are not used: `_request` then requires the field.
    prompts, resolutions = defaults.prompts or [""], defaults.resolutions or [Resolution(8, 8)]
    draws = RequestDraws(replace(defaults, prompts=prompts, resolutions=resolutions))
    above = 0
    with open_text(path, "the trace", f" (a trace is {', '.join(TRACE_KINDS)} or a file)") as file:
        for number, values in _read_lines(path, file):
            try:
                request = _request(values, draws.next(len(requests)), defaults, path.parent)
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
    if not requests:
        raise UsageError(f"{path}: the trace is empty, but it must hold at least one request")
    return requests


def save_trace(path: str | Path, requests: Sequence[Request]) -> None:
    """Write a trace atomically as JSONL, from which `load_trace` (with no default SLO or negative prompt) reads equal
    requests.

    Raises:
        OSError: the file cannot be written; no partial file is left.
    """
    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        for request in requests:
            values: dict[str, Any] = {}
            for field in fields(request):
                value = getattr(request, field.name)
                if isinstance(value, Resolution):
                    values |= value._asdict()
                elif isinstance(value, TracedEdit):
                    by_mask = {"mask": value.mask, "mask_ratio": value.mask_ratio, "strength": value.strength}
                    values |= {"image": value.image} | (by_mask if value.mask else {})
                    values |= {"references": value.references} if value.references else {}
                elif field.name == "edit":
                    assert value is None or request.traced is not None, "pixels do not go into traces"
                elif field.name in ("references", "controls"):
                    is_traced = field.name == "references" and request.traced is not None
                    assert not value or is_traced, "pixels do not go into traces"
                elif field.name == "adapters":
                    if value:
                        values["lora"] = adapters_text(value)
                elif value is not None and value != _USUAL.get(field.name):
                    values[field.name] = value
            file.write(json.dumps(values, ensure_ascii=False) + "\n")


def _request(values: Mapping[str, Any], drawn: Request, defaults: TraceDefaults, folder: Path) -> Request:
    """Return the request of one line of a file in this folder, with omitted fields from `drawn`."""
    changes = _checked({name: value for name, value in values.items() if value is not None})
    for one, other in (("arrival_s", "timestamp"), ("slo_s", "slo_ms"), ("resolution", "width")):
        if one in changes and other in changes:
            raise UsageError(f"{one} and {other} are both given, but they say the same thing: give one of them")
    if ("width" in changes) != ("height" in changes):
        raise UsageError("width and height must be given together")
    if changes.pop("num_frames", 1) != 1:
        raise UsageError("num_frames is not 1, but only images (one frame) can be served")
    if "timestamp" in changes:
        changes["arrival_s"] = changes.pop("timestamp")
    if "slo_ms" in changes:
        changes["slo_s"] = changes.pop("slo_ms") / 1000
    if "width" in changes:
        changes["resolution"] = Resolution(changes.pop("width"), changes.pop("height"))
    for name, default in (("arrival_s", None), ("resolution", defaults.resolutions), ("prompt", defaults.prompts)):
        if name not in changes and not default:
            what = "timestamp (or arrival_s)" if name == "arrival_s" else name
            raise UsageError(f"{what} is missing, and there is no default for it; {_ALLOWED}")
    if "lora" in changes:
        changes["adapters"] = changes.pop("lora")
    if any(name in changes for name in _OF_EDITS):
        if "image" not in changes:
            raise UsageError("image is missing, but edits need one")
        image, mask, ratio, strength, references = (changes.pop(name, None) for name in _OF_EDITS)
        changes["traced"] = traced_edit(image, mask, ratio, strength, references or (), folder)
    return replace(drawn, **changes)


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found = {**_adapter.validate_python(values)}
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
    else:
        for name, value in found.items():
            if isinstance(value, str):
                require_text(name, value)
        return found
    name, kind, cause = problem["loc"][0], problem["type"], problem.get("ctx", {}).get("error")
    if kind == "extra_forbidden":
        raise UsageError(f"unknown field {name!r}; {_ALLOWED}")
    if isinstance(cause, UsageError):
        raise cause
    allowed = _KINDS.get(kind.partition("_")[0], "a number")
    raise UsageError(f"{name} is {problem['input']!r}, but it must be {allowed}")


def _read_lines(path: Path, file: TextIO) -> Iterator[_Line]:
    """Return an iterator over line number and fields of each request; the first non-blank line decides the format."""
    head = next((text for line in file if (text := line.lstrip("\ufeff \t")).strip()), "")
    file.seek(0)
    if head.startswith("{"):
        return parsed_lines(path, file, _parse_object)
    if head.startswith("Request("):
        return parsed_lines(path, file, _parse_call)
    return _read_csv(path, file)


def _parse_object(text: str) -> dict[str, Any]:
    value = parse_json(text, unique_keys)
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
    except SyntaxError as error:
        raise UsageError(f"{form}: {error.msg}") from error
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id != "Request":
        raise UsageError(form)
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise UsageError(form)
    return unique_keys([(str(keyword.arg), ast.literal_eval(keyword.value)) for keyword in node.keywords])


def _read_csv(path: Path, file: TextIO) -> Iterator[_Line]:
    names: list[str] = []
    for number, row in csv_rows(path, file):
        if not any(cell.strip() for cell in row):
            continue
        if not names:
            names = _header(path, number, row)
        elif len(row) != len(names):
            raise UsageError(f"{path}:{number}: has {len(row)} columns, but the header has {len(names)}")
        else:
            yield number, {name: cell for name, cell in zip(names, row, strict=True) if cell.strip()}


def _header(path: Path, number: int, row: list[str]) -> list[str]:
    names = [name.strip().removeprefix("\ufeff") for name in row]
    if not {"timestamp", "arrival_s"} & set(names):
        raise UsageError(
            f"{path}:{number}: not a trace: the first line must be a JSON object, a Request(...) or a CSV header with "
            "timestamp or arrival_s"
        )
    unknown = [name for name in names if name not in TRACE_FIELDS]
    twice = keys_given_twice([(name, None) for name in names])
    if unknown:
        raise UsageError(f"{path}:{number}: unknown column {unknown[0]!r}; {_ALLOWED}")
    if twice:
        raise UsageError(f"{path}:{number}: column {twice[0]!r} occurs twice")
    return names
