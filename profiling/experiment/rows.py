"""Rows of an experiment: figures with their intervals, as JSON and as the figures that gates read."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...data.figures import is_number, numbers_of
from ...data.statistics import Estimate

Row = dict[str, Any]


def row_of(estimates: Mapping[str, Estimate]) -> Row:
    """Return the values by name, and the intervals by the same names under `intervals`."""
    intervals = {name: None if each.interval is None else list(each.interval) for name, each in estimates.items()}
    return {**{name: each.value for name, each in estimates.items()}, "intervals": intervals}


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
        # The cache's benchmark lists sides with labels; the others map names to sides.
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
