"""The rows of a benchmark: one for every combination, in a file that is complete after each of them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...data.files import write_json
from ...data.statistics import CONFIDENCE
from .combinations import Combination

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BenchOutcome:
    """What a benchmark gives: the result as in its JSON file, and its folder."""

    result: dict[str, Any]
    run_dir: Path

    @property
    def was_interrupted(self) -> bool:
        """Whether Ctrl-C ended it."""
        return self.result["was_interrupted"]


def name_of(combination: Combination) -> Row:
    """Return what every row begins with."""
    return {
        "combination": combination.by_resolution,
        "label": combination.label,
        "requests": combination.num_requests,
        "is_mixed": combination.is_mixed,
    }


def median_interval(samples: Sequence[float]) -> list[float] | None:
    """95 % interval of the median of independent values, whatever their distribution; None for fewer than six.

    Its ends are two of the values: the median lies below the k-th smallest only if fewer than k of them lie below the
    median, which a fair coin tells (Thompson, 1936).
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
    combinations: Sequence[Combination],
    measure: Callable[[Combination], Row],
    path: Path,
    head_of: Callable[[Sequence[Row]], dict[str, Any]],
    *,
    on_start: Callable[[Combination], None] | None,
    on_row: Callable[[], None] | None,
) -> dict[str, Any]:
    """Measure every combination, and write the rows to `path` after each of them and at the end.

    Args:
        combinations: in the order in which they are measured.
        measure: returns the row of a combination.
        path: of the JSON file.
        head_of: returns what stands above the rows in it.
        on_start, on_row: called before each combination, and after it.

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
            write_json(path, head_of(rows) | {"rows": rows})
            if on_row is not None:
                on_row()
    except KeyboardInterrupt:
        if not rows:
            raise
        was_interrupted = True
    result = head_of(rows) | {"was_interrupted": was_interrupted, "rows": rows}
    write_json(path, result)
    return result
