"""Recorded traces of production services, in the formats in which they were published. No torch.

A recording has the arrivals of its requests, and what the format says of each request: size, steps, seed, prompt, user.
Everything else is drawn, as in a random trace. `files` reads the traces that psctl itself writes.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import UsageError
from ..records import csv_rows, json_type, open_text
from ..requests import Request
from ..resolution import Resolution
from ..tables.schemas import parquet_file

_SECONDS, _CLOCK = "arrived_at", "TIMESTAMP"
_MOMENT = re.compile(
    r"((?P<year>\d{4})[/-](?P<month>\d\d?)[/-](?P<day>\d\d?)|(?P<other>\d{8}|\d{4}-?W\d\d-?\d))"
    r"([Tt ](?P<clock>\d\d?(:\d\d?){0,2}|\d{4}|\d{6})([.,](?P<fraction>\d+))?"
    r" ?(?P<zone>[Zz]|UTC|GMT|(?P<sign>[+\u2212-])(?P<hours>[01]\d|2[0-3]):?(?P<minutes>[0-5]\d)?)?)?",
    re.ASCII,
)
_NS = 10**9
_UNKNOWN_USER = "deleted_account"
_TWO_CALLS = (5, 6, 7)
"""DiffusionDB's samplers that call the model twice a step: k_heun, k_dpm_2 and k_dpm_2_ancestral."""
_NUM_SAMPLERS = 9
_MAX_STEPS = 1000
_ANY = Request(0, "", Resolution(8, 8))


@dataclass(frozen=True, slots=True)
class Recording:
    """Requests of a recorded trace, in order of arrival.

    Attributes:
        arrivals_s: seconds from the first arrival.
        fields: fields of `Request` that the file gives for each arrival; empty if it gives none but arrivals. Sizes are
            those of the file, which a model may not serve.
    """

    arrivals_s: tuple[float, ...]
    fields: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Selection:
    """Part of a recording.

    Attributes:
        owners: names of users, separated by commas, or a number of users to draw; None for all.
        limit: maximum number of requests, the first ones; None for all.
        seed: seed of all random choices.
    """

    owners: str | None = None
    limit: int | None = None
    seed: int = 0

    def names(self, path: Path, known: Iterable[str]) -> set[str]:
        """Return the selected users of a file. Raises UsageError if there are too few, or one is unknown."""
        there = {*known} - {_UNKNOWN_USER}
        given = self.owners or ""
        if not given.isdecimal():
            wanted = {name.strip() for name in given.split(",")}
            if missing := sorted(wanted - there - {_UNKNOWN_USER}):
                raise UsageError(f"{path}: --owners names {missing[0]!r}, which has no requests in it")
            return wanted
        if not 0 < int(given) <= len(there):
            raise UsageError(f"{path}: --owners is {given}, but it must be from 1 to {len(there)}, the users in it")
        order = np.random.default_rng(self.seed).permutation(len(there))[: int(given)]
        ranked = sorted(there)
        return {ranked[place] for place in order}


@dataclass(frozen=True, slots=True)
class _Row:
    """A request of a file: time in nanoseconds, user (None if the format has none), fields, and number of images."""

    time_ns: int
    owner: str | None
    fields: Mapping[str, Any]
    count: int = 1


def read_recording(kind: str, path: str | Path, selection: Selection | None = None) -> Recording:
    """Read a recorded trace of a kind of `READERS`.

    * azure: CSV with a column `arrived_at` (seconds; the processed Azure LLM traces of vidur) or `TIMESTAMP` (date and
      time, as ISO 8601 and pandas write them; the same traces as Azure published them), in order of arrival. Offsets
      from UTC may change within the file, as with daylight saving.
    * diffusiondb: `metadata.parquet` or `metadata-large.parquet` of DiffusionDB (Wang et al., 2022). Its times are
      whole minutes; the requests of a minute are spread over it, uniformly at random. A step of a sampler that calls
      the model twice counts as two, except for the last step, which calls it once.
    * gentd26: `lora_request_trace.csv` of Alibaba's GenTD26 (Lin et al., 2025). Only its text-to-image requests are
      used; a request for several images is as many requests at the same time.
    * katz: `diffusion_model_request_trace.json` of Katz (Li et al., 2025). Numeric times are seconds; users are its
      services.

    Rows that were published without a time, or without size or steps where others have them, are left out.

    Raises:
        UsageError: the file cannot be read, lacks a column or holds no request, or a row is malformed. The message
            names the line of a text file, or the row, counted from 0.
    """
    path, selection = Path(path), Selection() if selection is None else selection
    recording = READERS[kind](path, selection)
    if not recording.arrivals_s:
        raise UsageError(f"{path}: the trace is empty, but it must hold at least one arrival")
    return recording


def _azure(path: Path, selection: Selection) -> Recording:
    if selection.owners is not None:
        raise UsageError(f"--owners is {selection.owners}, but traces of kind azure name no users")
    arrivals: list[float] = []
    first = 0
    is_zoned = False
    with open_text(path, "the arrivals") as file:
        rows = csv_rows(path, file)
        _, names = next(rows, (1, []))
        column = next((name for name in (_SECONDS, _CLOCK) if name in names), None)
        if column is None:
            raise UsageError(f"{path}: recorded arrivals must be CSV with a column {_SECONDS} or {_CLOCK}")
        for number, row in rows:
            where = f"{path}:{number}"
            text = dict(zip(names, row, strict=False)).get(column)
            try:
                arrival, has_zone = (float(text or ""), False) if column == _SECONDS else _moment_ns(text or "")
            except ValueError as error:
                raise UsageError(f"{where}: {column} is {text!r}, which is not a time") from error
            if not math.isfinite(arrival):
                raise UsageError(f"{where}: {column} is {text!r}, but it must be finite")
            if not arrivals:
                first, is_zoned = number, has_zone
            elif has_zone != is_zoned:
                has, had = ("a zone", "none") if has_zone else ("no zone", "one")
                raise UsageError(f"{where}: {column} is {text!r}, with {has}, but line {first} has {had}")
            elif arrival < arrivals[-1]:
                raise UsageError(f"{where}: time goes back, but lines must be in order of arrival")
            arrivals.append(arrival)
    unit = 1 if column == _SECONDS else _NS
    return Recording(tuple((arrival - arrivals[0]) / unit for arrival in arrivals))


def _gentd26(path: Path, selection: Selection) -> Recording:
    return _recording(path, selection, _gentd26_rows(path))


def _gentd26_rows(path: Path) -> Iterator[_Row]:
    columns = ("gmt_create", "predict_type", "groupId", "num_images_per_prompt", "num_inference_steps")
    with open_text(path, "the trace") as file:
        rows = csv_rows(path, file)
        _, names = next(rows, (1, []))
        _require_columns(path, names, columns, "GenTD26")
        for number, cells in rows:
            where = f"{path}:{number}"
            if len(cells) != len(names):
                raise UsageError(f"{where}: has {len(cells)} columns, but the header has {len(names)}")
            row = dict(zip(names, cells, strict=True))
            moment, kind, owner, images, steps = (row[name] for name in columns)
            if kind != "TXT_2_IMG" or not steps:
                continue
            time_ns = _time_ns(moment, "gmt_create", where)
            num_steps = _count(steps, "num_inference_steps", where, _MAX_STEPS)
            num_images = _count(images or "1", "num_images_per_prompt", where, _MAX_STEPS)
            yield _Row(time_ns, owner, {"num_inference_steps": num_steps, "owner": owner}, num_images)


def _katz(path: Path, selection: Selection) -> Recording:
    return _recording(path, selection, _katz_rows(path))


def _katz_rows(path: Path) -> Iterator[_Row]:
    with open_text(path, "the trace") as file:
        try:
            entries = json.load(file)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}: not valid JSON, perhaps half-written: {error}") from error
    if not isinstance(entries, list):
        raise UsageError(f"{path}: holds {json_type(entries)}, but a trace of Katz is a list of requests")
    for number, entry in enumerate(entries):
        where = f"{path}: row {number}"
        if not isinstance(entry, dict):
            raise UsageError(f"{where}: holds {json_type(entry)}, but a request is an object")
        for name in ("timestamp", "scene_id"):
            if name not in entry:
                raise UsageError(f"{where}: has no {name}, so that it is not a request of Katz")
        moment, owner = entry["timestamp"], entry["scene_id"]
        if moment is None:
            continue
        if not isinstance(owner, str):
            raise UsageError(f"{where}: scene_id is {owner!r}, but it must be the name of a service")
        yield _Row(_time_ns(moment, "timestamp", where), owner, {"owner": owner})


def _recording(path: Path, selection: Selection, rows: Iterable[_Row]) -> Recording:
    """Return the selected rows, in order of their times; rows of one time keep their order."""
    ranked = sorted(rows, key=lambda row: row.time_ns)
    if selection.owners is not None:
        names = selection.names(path, {row.owner or "" for row in ranked})
        ranked = [row for row in ranked if row.owner in names]
    repeated = [row for row in ranked for _ in range(row.count)][: selection.limit]
    times_s = tuple((row.time_ns - ranked[0].time_ns) / _NS for row in repeated)
    return Recording(times_s, tuple(row.fields for row in repeated))


def _diffusiondb(path: Path, selection: Selection) -> Recording:
    """Read times and users of all rows, and the other columns of the selected rows only."""
    columns = ("prompt", "seed", "step", "cfg", "sampler", "width", "height", "user_name")
    with parquet_file(path, "the trace") as file:
        schema = file.schema_arrow
        _require_columns(path, schema.names, ("timestamp", *columns), "DiffusionDB")
        for name, is_right, what in (("timestamp", pa.types.is_timestamp, "times"), ("user_name", _is_text, "texts")):
            if not is_right(kind := schema.field(name).type):
                raise UsageError(f"{path}: the column {name} holds {kind}, but it must hold {what}")
        moments: list[np.ndarray] = []
        users: list[Any] = []
        for batch in file.iter_batches(65536, columns=["timestamp", "user_name"], use_threads=False):
            moments.append(batch["timestamp"].cast(pa.timestamp("us")).cast(pa.int64()).to_numpy(zero_copy_only=False))
            users.append(batch["user_name"].dictionary_encode())
        times_s = np.concatenate(moments or [np.empty(0)]) / 1e6
        is_kept = ~np.isnan(times_s)  # null is NaN
        if selection.owners is not None:
            is_kept &= _is_selected(path, selection, users)
        places = np.flatnonzero(is_kept)
        times_s = times_s[places]
        if not (times_s % 60).any():
            times_s = times_s + 60 * np.random.default_rng(selection.seed).random(len(times_s))
        order = np.argsort(times_s, kind="stable")[: selection.limit]
        rows = _rows_at(file, columns, places[order])
        fields = [_diffusiondb_fields(path, number, row) for number, row in rows]
    kept = [(arrival_s, each) for arrival_s, each in zip(times_s[order].tolist(), fields, strict=True) if each]
    first_s = kept[0][0] if kept else 0.0
    return Recording(tuple(arrival_s - first_s for arrival_s, _ in kept), tuple(each for _, each in kept))


def _is_text(kind: Any) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_selected(path: Path, selection: Selection, chunks: Sequence[Any]) -> np.ndarray:
    """Return whether the user of each row is selected; chunks are dictionary arrays."""
    words = [chunk.dictionary.to_pylist() for chunk in chunks]
    names = selection.names(path, {word for each in words for word in each})
    wanted = [[place for place, word in enumerate(each) if word in names] for each in words]
    # Rows without a user have index -1.
    indices = [chunk.indices.fill_null(-1).to_numpy(zero_copy_only=False) for chunk in chunks]
    return np.concatenate([np.isin(each, places) for each, places in zip(indices, wanted, strict=True)])


def _rows_at(file: Any, columns: Sequence[str], places: np.ndarray) -> list[tuple[int, dict[str, Any]]]:
    """Return number and columns of the rows at some places, in their order, reading one batch at a time."""
    found: dict[int, dict[str, Any]] = {}
    begin, ranked = 0, np.sort(places)
    for batch in file.iter_batches(65536, columns=[*columns], use_threads=False):
        low, high = np.searchsorted(ranked, (begin, begin + batch.num_rows))
        here = ranked[low:high]
        found |= zip(here.tolist(), batch.take(pa.array(here - begin)).to_pylist(), strict=True)
        begin += batch.num_rows
    return [(place, found[place]) for place in places.tolist()]


def _diffusiondb_fields(path: Path, number: int, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a request; empty if it was published without size or steps."""
    where = f"{path}: row {number}"
    if None in (row["width"], row["height"], row["step"]):
        return {}
    width, height = (_count(row[name], name, where) for name in ("width", "height"))
    steps = _count(row["step"], "step", where, _MAX_STEPS)
    if (sampler := row["sampler"]) is not None:
        _count(sampler, "sampler", where, _NUM_SAMPLERS)
    fields = {
        "num_inference_steps": steps if sampler not in _TWO_CALLS else 2 * steps - 1,
        "prompt": row["prompt"],
        "guidance_scale": row["cfg"],
        "seed": row["seed"],
        "owner": row["user_name"],
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    try:
        replace(_ANY, **fields)  # checks them
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    return {"resolution": Resolution(width, height), **fields}


READERS: dict[str, Callable[[Path, Selection], Recording]] = {
    "azure": _azure,
    "diffusiondb": _diffusiondb,
    "gentd26": _gentd26,
    "katz": _katz,
}
"""Reader of each published format, by kind of trace."""


def _require_columns(path: Path, names: Iterable[str], columns: Sequence[str], what: str) -> None:
    missing = [name for name in columns if name not in names]
    if missing:
        raise UsageError(f"{path}: has no column {', '.join(missing)}, so that it is not a trace of {what}")


def _count(value: object, name: str, where: str, most: int = 2**16) -> int:
    """Return a whole number from 1, also of a text such as "30.0". Raises UsageError."""
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except ValueError:
        number = math.nan
    if not (1 <= number <= most and number == int(number)):
        raise UsageError(f"{where}: {name} is {value!r}, but it must be a whole number from 1 to {most}")
    return int(number)


def _time_ns(value: object, name: str, where: str) -> int:
    """Return a time, seconds or date and time, in nanoseconds. Raises UsageError."""
    try:
        if isinstance(value, str):
            return _moment_ns(value)[0]
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return round(value * _NS)
    except ValueError:
        pass
    raise UsageError(f"{where}: {name} is {value!r}, which is not a time")


def _moment_ns(text: str) -> tuple[int, bool]:
    """Return nanoseconds from the year 1 in UTC, and whether the text names a zone. Raises ValueError if it is not a
    date and time.

    The result is an integer, because a float of that many seconds is a microsecond off.
    """
    found = _MOMENT.fullmatch(text.strip())
    if found is None:
        raise ValueError(text)
    other, (year, month, of_month) = found["other"], found.group("year", "month", "day")
    day = date.fromisoformat(other) if other else date(int(year), int(month), int(of_month))
    parts = [int(part) for part in re.findall(r"\d\d?", found["clock"] or "0")]
    hour, minute, second, *_ = (*parts, 0, 0)
    time(hour, minute, second)  # checks them
    seconds = day.toordinal() * 86_400 + hour * 3600 + minute * 60 + second
    if found["sign"]:
        offset_s = int(found["hours"]) * 3600 + int(found["minutes"] or 0) * 60
        seconds += -offset_s if found["sign"] == "+" else offset_s
    # A fraction refers to the last unit that is written.
    unit_s = (3600, 60, 1)[len(parts) - 1]
    return seconds * 10**9 + unit_s * int((found["fraction"] or "0")[:9].ljust(9, "0")), bool(found["zone"])
