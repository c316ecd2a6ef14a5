"""Experiments: rows and pictures in files, rows that Ctrl-C keeps, and the turns of the sides."""

import json
from pathlib import Path
from typing import Any

import pytest

from patchedserve.data.statistics import Estimate
from patchedserve.data.workspace import ModelWorkspace
from patchedserve.profiling.experiment.experiment import Experiment, PartialRow
from patchedserve.profiling.experiment.rows import row_of
from patchedserve.profiling.experiment.turns import rotated, shuffled, turns
from patchedserve.profiling.report.table import Table


def squares_of(cells: list[int], interrupt: KeyboardInterrupt | None = None) -> Experiment[int]:
    """Return an experiment that squares its cells; 0 is interrupted."""

    def measure(cell: int) -> dict[str, Any]:
        if interrupt is not None and cell == 0:
            raise interrupt
        return {"label": str(cell), **row_of({"square": Estimate(cell**2, cell**2 - 1, cell**2 + 1)})}

    def tables(result: Any) -> list[Table]:
        return [Table("", ("cell", "square"), [(row["label"], str(row["square"])) for row in result["rows"]])]

    return Experiment(
        "squares",
        "numbers",
        cells,
        measure,
        {"machine": "this"},
        tables,
        {"drawn": lambda result: str(len(result["rows"])).encode()},
        lambda rows: {"largest": max(row["square"] for row in rows)},
    )


def test_rows_are_in_the_file_after_each_cell(tmp_path: Path) -> None:
    place, seen = ModelWorkspace(tmp_path), list[Any]()

    def look() -> None:
        (file,) = place.runs.glob("*/numbers.json")
        seen.append([row["label"] for row in json.loads(file.read_text())["rows"]])

    outcome = squares_of([2, 3]).run(place, on_start=seen.append, on_row=look)
    assert seen == [2, ["2"], 3, ["2", "3"]]
    result = outcome.result
    assert json.loads((outcome.run_dir / "numbers.json").read_text()) == result
    assert (result["machine"], result["largest"], result["was_interrupted"]) == ("this", 9, False)
    assert result["run_dir"] == str(outcome.run_dir)
    assert result["figures"]["3.square"] == {"value": 9.0, "low": 8, "high": 10, "n": None}
    assert (outcome.run_dir / "drawn.png").read_bytes() == b"2"
    (table,) = outcome.tables(result)
    assert table.rows == [("2", "4"), ("3", "9")]


@pytest.mark.parametrize(
    ("interrupt", "labels"),
    [(KeyboardInterrupt(), ["2"]), (PartialRow({"label": "half", "square": 1, "intervals": {}}), ["2", "half"])],
    ids=["between rounds", "after a round"],
)
def test_interrupt_keeps_what_is_measured(tmp_path: Path, interrupt: KeyboardInterrupt, labels: list[str]) -> None:
    outcome = squares_of([2, 0, 3], interrupt).run(ModelWorkspace(tmp_path))
    assert outcome.was_interrupted
    assert [row["label"] for row in json.loads((outcome.run_dir / "numbers.json").read_text())["rows"]] == labels
    assert (outcome.run_dir / "drawn.png").read_bytes() == str(len(labels)).encode()


def test_interrupt_before_the_first_row_is_raised(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        squares_of([0, 2], KeyboardInterrupt()).run(ModelWorkspace(tmp_path))


def test_every_round_begins_with_the_next_side() -> None:
    assert [rotated("abc", number) for number in (0, 1, 5)] == [tuple("abc"), tuple("bca"), tuple("cab")]
    assert list(turns("ab", 2)) == [(-1, "b"), (-1, "a"), (0, "a"), (0, "b"), (1, "b"), (1, "a")]
    assert list(turns("a", 1, num_warmups=2)) == [(-2, "a"), (-1, "a"), (0, "a")]


def test_rounds_have_random_orders_of_their_own() -> None:
    orders = [shuffled(range(50), seed, number) for seed, number in ((0, 0), (0, 1), (1, 0))]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len(set(map(tuple, orders))) == 3
    assert shuffled(range(50), 0, 1) == orders[1]
