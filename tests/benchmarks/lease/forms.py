"""Form of each part's rows: their numbers, and the tables that show them. Imports no torch."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from patchedserve.profiling.report.table import Table

from .context import Row

_LONGEST = 90
"""Largest number of characters of a name in a table; names of kernels are longer."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        head: heading of the column.
        key: key of the value in a row.
        digits: digits after the point; None for words.
        may_be_none: whether the value may be missing, such as the time of kernels on a CPU.
    """

    head: str
    key: str
    digits: int | None = 2
    may_be_none: bool = False

    def text(self, row: Mapping[str, Any]) -> str:
        value = row.get(self.key)
        if value is None:
            return ""
        if isinstance(value, bool):
            return "yes" if value else ""
        return str(value)[:_LONGEST] if self.digits is None else f"{value:,.{self.digits}f}"

    def problem(self, row: Mapping[str, Any]) -> str | None:
        """Return what is wrong with the value; None if it is right."""
        value = row.get(self.key)
        if value is None:
            return None if self.may_be_none else f"{self.key} is missing"
        if self.digits is None:
            return None if isinstance(value, str | bool) else f"{self.key} is {value!r}, but a word is expected"
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            return f"{self.key} is {value!r}, but a number of at least 0 is expected"
        return None


@dataclass(frozen=True, slots=True)
class Form:
    """A table of a part.

    Attributes:
        title: title of the table.
        columns: columns of each line.
        inner: key of a row's lines, each a dictionary; None: a row is a line.
    """

    title: str
    columns: tuple[Column, ...]
    inner: str | None = None

    def lines(self, rows: list[Row]) -> Iterator[Row]:
        """Yield the lines of the table; inner lines get the label of their row."""
        for row in rows:
            if self.inner is None:
                yield row
            else:
                yield from ({"label": row["label"]} | line for line in row.get(self.inner, ()))

    def table(self, rows: list[Row]) -> Table:
        """Return the rows as a table for readers."""
        lines = [[column.text(line) for column in self.columns] for line in self.lines(rows)]
        num_words = next(
            (place for place, column in enumerate(self.columns) if column.digits is not None), len(self.columns)
        )
        return Table(self.title, [column.head for column in self.columns], lines, num_words=num_words)

    def problems(self, rows: list[Row]) -> Iterator[str]:
        """Yield the problems of rows."""
        lines = list(self.lines(rows))
        if not lines:
            yield f"table {self.title!r} has no lines"
        for line in lines:
            for column in self.columns:
                if (problem := column.problem(line)) is not None:
                    yield f"table {self.title!r}, {line['label']}: {problem}"


def _words(head: str, key: str | None = None, *, may_be_none: bool = False) -> Column:
    return Column(head, key or head, None, may_be_none)


_LABEL = _words("requests", "label")
_SIDE = _words("side")
_FAILURE = _words("recording failed", "recording_failure", may_be_none=True)
_STEPS = (
    Form(
        "Fastest contenders",
        (
            _LABEL,
            _words("baseline"),
            _words("its effort", "baseline_effort"),
            _words("patched effort", "patched_effort"),
            Column("baseline ms", "baseline_ms"),
            Column("patched ms", "patched_ms"),
            Column("times as fast", "ratio"),
            Column("repack ms", "patched_repack_ms"),
            Column("share of peak", "patched_share_of_peak"),
            _words("not recorded", "not_recorded"),
        ),
    ),
    Form(
        "Milliseconds a step",
        (
            _LABEL,
            _SIDE,
            _words("effort"),
            _words("format", may_be_none=True),
            Column("median", "ms"),
            Column("p10", "p10_ms"),
            Column("p90", "p90_ms"),
            Column("first", "first_ms"),
        ),
        inner="times",
    ),
)
FORMS: dict[str, tuple[Form, ...]] = {
    "machine": (
        Form("Machine", (_words("fact", "label"), _words("value"))),
        Form(
            "Versions",
            (_words("package", "label"), _words("here", may_be_none=True), _words("pinned"), _words("differs")),
        ),
    ),
    "ceilings": (
        Form(
            "Ceilings",
            (
                _words("operation", "label"),
                _words("unit"),
                Column("rate", "value", 1),
                Column("ms", "ms", 3, may_be_none=True),
            ),
        ),
    ),
    "sdxl-steps": _STEPS,
    "sdxl-steps-compiled": _STEPS,
    "flux-steps": _STEPS,
    "flux-steps-compiled": _STEPS,
    "sdxl-first-seen": (
        Form(
            "First passes of a composition, ms",
            (
                _LABEL,
                _SIDE,
                Column("first", "first_ms"),
                Column("second", "second_ms"),
                Column("records", "record_ms"),
                Column("replays", "replay_ms"),
                Column("recordings", "recorded", 0),
                Column("allocated MB", "allocated_mb", 1),
                Column("reserved MB", "reserved_mb", 1),
            ),
            inner="passes",
        ),
    ),
    "sdxl-served": (
        Form(
            "Dataset C, served with graphs",
            (
                _words("system, rate", "label"),
                Column("in time", "slo_attainment_rate"),
                Column("mean s", "latency_mean"),
                Column("p50 s", "latency_p50"),
                Column("p95 s", "latency_p95"),
                Column("images/s", "throughput_qps"),
                Column("steps", "num_steps", 0),
                Column("recorded", "recorded", 0),
                Column("replayed", "played", 0),
                _FAILURE,
            ),
        ),
    ),
    "sdxl-profile": (
        Form(
            "Milliseconds of a step, by kind of work",
            (_LABEL, _words("kind"), Column("patched", "patched_ms"), Column("same resolution", "same_resolution_ms")),
            inner="kinds",
        ),
        Form(
            "Kernels with the most time in a patched step",
            (_LABEL, _words("kernel", "name"), Column("ms", "ms", 3), Column("calls", "calls", 0)),
            inner="kernels",
        ),
    ),
    "sdxl-edits": (
        Form(
            "Steps of edits, ms",
            (
                _words("edits", "label"),
                Column("active share", "active_share"),
                Column("masked", "masked_ms"),
                Column("whole", "whole_ms"),
                Column("times as fast", "ratio"),
                Column("masked kernels", "masked_kernels_ms", may_be_none=True),
                Column("whole kernels", "whole_kernels_ms", may_be_none=True),
                _FAILURE,
            ),
        ),
    ),
    "sdxl-strips": (
        Form(
            "Strips of one image",
            (
                _words("size", "label"),
                Column("ranks", "ranks", 0),
                Column("ms", "ms"),
                Column("times as fast", "speedup"),
                Column("kernels ms", "kernels_ms", may_be_none=True),
            ),
            inner="strips",
        ),
    ),
    "vae": (
        Form(
            "Decoding",
            (
                _words("images", "label"),
                _words("form"),
                Column("ms an image", "ms_an_image"),
                Column("difference", "difference", 5),
            ),
            inner="forms",
        ),
    ),
    "sdxl-fp8": (
        Form(
            "Milliseconds a step, in 16 bits and in fp8",
            (_LABEL, _SIDE, Column("median", "ms")),
            inner="times",
        ),
    ),
    "tests": (
        Form(
            "Tests",
            (_words("outcome", "label"), Column("tests", "count", 0)),
        ),
        Form(
            "Tests that failed",
            (_words("test", "label"), _words("message")),
        ),
    ),
}


def _rows_for(name: str, rows: list[Row]) -> list[list[Row]]:
    """Return the rows of each table of a part; most tables show all rows."""
    if name == "machine":
        return [[row for row in rows if "pinned" not in row], [row for row in rows if "pinned" in row]]
    if name == "tests":
        outcomes: dict[str, int] = {}
        for row in rows:
            outcomes[row["outcome"]] = outcomes.get(row["outcome"], 0) + 1
        counts = [{"label": outcome, "count": count} for outcome, count in outcomes.items()]
        return [counts, [row for row in rows if row["outcome"] == "failed"]]
    return [rows] * len(FORMS[name])


def tables_of(name: str, result: Mapping[str, Any]) -> list[Table]:
    """Return the tables of a part; none for a part without rows or without a form."""
    rows = result["rows"]
    if not rows or name not in FORMS:
        return []
    pairs = zip(FORMS[name], _rows_for(name, rows), strict=True)
    return [replace(form, title=f"{name}: {form.title}").table(own) for form, own in pairs if own]


def problems_of(name: str, result: Mapping[str, Any]) -> list[str]:
    """Return the problems of a part's rows; none for a part without rows."""
    rows = result["rows"]
    if not rows or name not in FORMS:
        return []
    found: list[str] = []
    for form, own in zip(FORMS[name], _rows_for(name, rows), strict=True):
        if own or name != "tests":
            found += [f"{name}: {problem}" for problem in form.problems(own)]
    return found
