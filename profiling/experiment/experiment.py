"""An experiment as data: its cells, the measurement of each, and the tables and pictures of the result."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from ...data.figures import write_figures
from ...data.files import write_bytes, write_json, write_text
from ...data.workspace import ModelWorkspace
from ..report.table import Table
from .rows import Row, row_figures

Cell = TypeVar("Cell")
Result = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of an experiment.

    Attributes:
        result: content of its JSON file.
        place: folder or page of the result.
        tables: returns the tables of the result.
        products: description of `place`.
        hint: note on how to continue after Ctrl-C; "" for none.
    """

    result: dict[str, Any]
    place: Path
    tables: Callable[[Result], Iterable[Table]]
    products: str = "Results"
    hint: str = ""

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return Path(self.result["run_dir"])

    @property
    def was_interrupted(self) -> bool:
        """Whether Ctrl-C ended the experiment."""
        return self.result.get("was_interrupted", False)


def write_page(
    title: str,
    result: dict[str, Any],
    tables: Callable[[Result], Sequence[Table]],
    pictures: Mapping[str, Callable[[Result], bytes]],
) -> Outcome:
    """Write `result.json`, the pictures and `report.html`, a page with all of them, into the folder of a run.

    Args:
        title: title of the page.
        result: the result, whose `run_dir` is the folder.
        tables: returns the tables of a result.
        pictures: functions that draw a PNG of a result, by stem of their file.

    Raises:
        OSError: a file cannot be written.
    """
    from ..report.page import image_tag, page  # imports matplotlib, which commands do not wait for

    run_dir = Path(result["run_dir"])
    write_json(run_dir / "result.json", result)
    for name, draw in pictures.items():
        write_bytes(run_dir / f"{name}.png", draw(result))
    parts = [table.to_html() for table in tables(result)]
    parts += [image_tag(run_dir / f"{name}.png", name) for name in pictures]
    write_text(run_dir / "report.html", page(title, parts))
    return Outcome(result, run_dir / "report.html", tables)


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
    ) -> Outcome:
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
        return Outcome(result, run_dir, self.tables, self.products)
