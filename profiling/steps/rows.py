"""Rows of a benchmark, one for every combination, in a file that is complete after each of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ...data.figures import is_number, numbers_of, write_figures
from ...data.files import write_json
from ...data.statistics import CONFIDENCE, Estimate
from .combinations import Combination

Row = dict[str, Any]
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class BenchOutcome:
    """Outcome of a benchmark: the result as in its JSON file, and the folder of the run."""

    result: dict[str, Any]
    run_dir: Path

    @property
    def was_interrupted(self) -> bool:
        """Whether Ctrl-C ended the benchmark."""
        return self.result["was_interrupted"]


def name_of(combination: Combination) -> Row:
    """Return the columns that identify a combination, with which every row begins."""
    return {
        "combination": combination.by_resolution,
        "label": combination.label,
        "requests": combination.num_requests,
        "is_mixed": combination.is_mixed,
    }


def median_interval(samples: Sequence[float]) -> list[float] | None:
    """Return a distribution-free 95 % interval of the median of independent values; None for fewer than six.

    Its ends are two of the values. The median lies below the k-th smallest only if fewer than k values lie below the
    median, whose number is binomial with probability 1/2 (Thompson, 1936).
    """
    count = len(samples)
    tail, rank = 0.0, 0
    while (tail := tail + math.comb(count, rank) / 2**count) <= (1 - CONFIDENCE) / 2:
        rank += 1
    if rank == 0:
        return None
    ranked = sorted(samples)
    return [ranked[rank - 1], ranked[-rank]]


def measure_rows(
    combinations: Sequence[Item],
    measure: Callable[[Item], Row],
    path: Path,
    head_of: Callable[[Sequence[Row]], dict[str, Any]],
    *,
    on_start: Callable[[Item], None] | None,
    on_row: Callable[[], None] | None,
) -> dict[str, Any]:
    """Measure every combination, and write the rows to `path` after each of them and at the end.

    Args:
        combinations: items that get a row, combinations or others, in the order of measurement.
        measure: returns the row of a combination.
        path: path of the JSON file.
        head_of: returns the entries above the rows in the file.
        on_start, on_row: called before and after each combination.

    Returns:
        The content of the file. Its `was_interrupted` says whether Ctrl-C ended the measurements.

    Raises:
        KeyboardInterrupt: on Ctrl-C before the first row is finished.
    """
    rows: list[Row] = []
    was_interrupted = False
    try:
        for combination in combinations:
            if on_start is not None:
                on_start(combination)
            rows.append(measure(combination))
            write_json(path, _with_figures(head_of(rows), rows))
            if on_row is not None:
                on_row()
    except KeyboardInterrupt:
        if not rows:
            raise
        was_interrupted = True
    result = _with_figures(head_of(rows) | {"was_interrupted": was_interrupted}, rows)
    write_json(path, result)
    return result


def _with_figures(head: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    return write_figures({**head, "rows": list(rows)}, row_figures(head, rows))


def row_figures(head: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Estimate]:
    """Return the numbers above the rows, and the numbers of every row under its label.

    Names are `SML.ratio`, or `SML.interval 3.speedup` where a row has sides. Intervals come from `intervals` in the row
    or side; gates do not accept a measured number without an interval as evidence.
    """
    # Above the rows only means and minima of ratios are measurements; the rest are settings.
    found = {name: Estimate(each.value) if "ratio" in name else each for name, each in numbers_of(head).items()}
    for row in rows:
        if "sides" not in row:
            found |= _of_row(f"{row['label']}.", row, row.get("repeats"))
        sides = row.get("sides", ())
        # A breakdown maps names to sides; other benchmarks list sides with labels.
        named = sides if isinstance(sides, Mapping) else {side["label"]: side for side in sides}
        for name, side in named.items():
            found |= _of_row(f"{row['label']}.{name}.", side, side.get("num_images"))
    return found


def _of_row(prefix: str, row: Row, count: int | None) -> dict[str, Estimate]:
    found = {}
    for name, value in row.items():
        low, high = row.get("intervals", {}).get(name) or (None, None)
        if isinstance(value, Mapping) and is_number(value.get("mean")):
            value, low, high = value["mean"], value.get("low"), value.get("high")
        if is_number(value):
            found[prefix + name] = Estimate(float(value), low, high, count)
    return found
