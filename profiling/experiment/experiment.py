"""An experiment as data: its cells, the measurement of each, and the tables and pictures of the result."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from ...data.figures import write_figures
from ...data.files import write_bytes, write_json
from ...data.workspace import ModelWorkspace
from ..report.table import Table
from .rows import Row, row_figures

Cell = TypeVar("Cell")
Result = Mapping[str, Any]


class PartialRow(KeyboardInterrupt):
    """Ctrl-C within a cell, some rounds of which all sides had finished. `row` holds these rounds."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.row = row


@dataclass(frozen=True, slots=True)
class Experiment(Generic[Cell]):
    """Cells that are measured one after the other into a row each.

    Attributes:
        kind: name of the run in the workspace.
        name: stem of the JSON file in the run's folder.
        cells: cells in the order of measurement.
        measure: returns the row of a cell. The row has a `label`, and `sides` if its figures are by side.
        facts: circumstances and settings, which stand above the rows in the file.
        tables: returns the tables of a result.
        pictures: functions that draw a PNG of a result, by stem of their file.
        summarize: returns figures of all rows, which stand above them in the file.
        label: returns the name of a cell for the progress line.
        unit: name of the cells for the progress line.
        products: description of the files.
    """

    kind: str
    name: str
    cells: Sequence[Cell]
    measure: Callable[[Cell], Row]
    facts: Mapping[str, Any]
    tables: Callable[[Result], Sequence[Table]]
    pictures: Mapping[str, Callable[[Result], bytes]] = field(default_factory=dict)
    summarize: Callable[[Sequence[Row]], Mapping[str, Any]] = lambda rows: {}
    label: Callable[[Cell], str] = str
    unit: str = "combinations"
    products: str = "Results"

    def run(
        self,
        workspace: ModelWorkspace,
        *,
        on_start: Callable[[Cell], None] = lambda cell: None,
        on_row: Callable[[], None] = lambda: None,
    ) -> "Outcome":
        """Measure every cell. Writes the rows to the folder of a new run after each of them, and pictures at the end.

        Args:
            workspace: workspace of the model.
            on_start, on_row: called before and after each cell.

        Raises:
            KeyboardInterrupt: on Ctrl-C before the first row is finished; later, the outcome records the interruption.
            OSError: results cannot be written.
        """
        run_dir, rows, was_interrupted = workspace.new_run(self.kind), list[Row](), False

        def keep(**more: Any) -> dict[str, Any]:
            head = {**self.facts, "run_dir": str(run_dir), **self.summarize(rows), **more}
            result = write_figures({**head, "rows": list(rows)}, row_figures(head, rows))
            write_json(run_dir / f"{self.name}.json", result)
            return result

        try:
            for cell in self.cells:
                on_start(cell)
                rows.append(self.measure(cell))
                keep()
                on_row()
        except KeyboardInterrupt as interrupt:
            rows += [interrupt.row] if isinstance(interrupt, PartialRow) else []
            if not rows:
                raise
            was_interrupted = True
        result = keep(was_interrupted=was_interrupted)
        for name, draw in self.pictures.items():
            write_bytes(run_dir / f"{name}.png", draw(result))
        return Outcome(self, result, run_dir)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of an experiment: the result as in its JSON file, and the folder of the run."""

    experiment: Experiment[Any]
    result: dict[str, Any]
    run_dir: Path

    @property
    def was_interrupted(self) -> bool:
        """Whether Ctrl-C ended the experiment."""
        return self.result["was_interrupted"]
