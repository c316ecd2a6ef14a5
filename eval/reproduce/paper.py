"""A paper as a list of exhibits: figures and tables that are measured once, drawn, and kept beside the paper's numbers.

In the folder of its model, an exhibit has `figure-5.json` (settings, measurements and the paper's statements) and the
picture `figure-5.png`, or `table-1.md` for a table. The JSON is written last: an exhibit that has one is finished, and
is not measured again. This module imports no torch.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...data.errors import UsageError
from ...data.files import write_bytes, write_json, write_text
from ...data.records import read_json
from ...profiling.report.page import plots_of, render
from ...profiling.report.table import Table
from ...profiling.report.theme import to_png
from ...profiling.report.words import seconds
from ..result_files import require_kind
from .statement import Statement, Verdict, count_verdicts, statements_table, verdicts_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .lab import Lab

RESULT_KIND = "psctl-reproduce"
INDEX_FILE = "index.html"
_VERSION = 2  # version 1 has statements without intervals
SDXL, SD3 = "StableDiffusionXLPipeline", "StableDiffusion3Pipeline"
"""Classes of diffusers pipelines."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measurements for an exhibit: the data of its picture, as JSON, and the paper's statements beside ours."""

    ours: Mapping[str, Any]
    statements: Sequence[Statement]


Measure = Callable[["Lab", Mapping[str, Any]], Measurement]
"""Measures an exhibit with its settings."""


@dataclass(frozen=True, slots=True)
class Exhibit:
    """A figure or a table.

    Attributes:
        kind, number, title: as in the paper.
        about: what the paper measured, with the section that reports it.
        measure: measures the exhibit.
        draw: draws the picture of a result, or returns its table.
        full, quick: settings of the exhibit in a full run, and in a smoke run.
        paper: numbers that the paper prints in a table.
        metrics: metrics whose judges it needs.
        pipelines: classes of diffusers pipelines that it applies to; empty for all.
    """

    kind: Literal["figure", "table"]
    number: int
    title: str
    about: str
    measure: Measure
    draw: "Callable[[Mapping[str, Any]], Figure] | Callable[[Mapping[str, Any]], Table]"
    full: Mapping[str, Any]
    quick: Mapping[str, Any]
    paper: Mapping[str, Any] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    pipelines: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Name of its files, without a suffix."""
        return f"{self.kind}-{self.number}"

    def applies_to(self, pipeline: str) -> bool:
        """Whether it applies to models with this class of pipeline."""
        return not self.pipelines or pipeline in self.pipelines

    def picture(self, result: Mapping[str, Any]) -> bytes:
        """Return the PNG of a figure."""
        return to_png(self.draw(result))  # type: ignore[arg-type]

    def table(self, result: Mapping[str, Any]) -> Table:
        """Return the table of a result."""
        return self.draw(result)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper: its name on the command line, its title, and its exhibits that are reproduced."""

    name: str
    title: str
    exhibits: tuple[Exhibit, ...]

    def select(self, figures: Sequence[int], tables: Sequence[int], pipeline: str) -> list[Exhibit]:
        """Return the exhibits with these numbers; without numbers, all that apply to this class of pipeline.

        Raises:
            UsageError: an exhibit is not reproduced, or does not apply to the pipeline.
        """
        wanted = {"figure": figures, "table": tables}
        for kind, numbers in wanted.items():
            known = [each.number for each in self.exhibits if each.kind == kind]
            for number in numbers:
                if number not in known:
                    raise UsageError(f"--{kind} is {number}, but it must be one of {', '.join(map(str, known))}")
        if not figures and not tables:
            return [each for each in self.exhibits if each.applies_to(pipeline)]
        found = [each for each in self.exhibits if each.number in wanted[each.kind]]
        for each in found:
            if not each.applies_to(pipeline):
                suited = " or ".join(each.pipelines)
                raise UsageError(
                    f"--{each.kind} {each.number} is of models with a {suited}, but the model has a {pipeline}"
                )
        return found


@dataclass(frozen=True, slots=True)
class ReproductionOutcome:
    """Outcome of a reproduction.

    Attributes:
        results: the requested results, as in their files.
        measured: keys of those that are new.
        index: the page of all results in the folder.
        verdicts: `count_verdicts` of all results in the folder.
        was_interrupted: whether Ctrl-C ended it.
    """

    results: Sequence[Mapping[str, Any]]
    measured: Sequence[str]
    index: Path
    verdicts: Mapping[str, Mapping[Verdict, int]]
    was_interrupted: bool


def reproduce(
    paper: Paper,
    wanted: Sequence[tuple[Exhibit, Mapping[str, Any]]],
    open_lab: "Callable[[], Lab]",
    folder: Path,
    *,
    on_exhibit: Callable[[str], None] = lambda title: None,
) -> ReproductionOutcome:
    """Measure the exhibits that are not finished, and write the page.

    Args:
        paper: the paper of the exhibits.
        wanted: exhibits with all settings that they depend on.
        open_lab: loads the model; called only if something has to be measured.
        folder: folder of the model's files; the page of all models is in its parent folder.
        on_exhibit: called with the name and title of each exhibit before it is measured.

    Raises:
        UsageError: an exhibit is finished with other settings; nothing is measured then.
        KeyboardInterrupt: on Ctrl-C before the first exhibit was finished.
        OSError: results cannot be written.
    """
    kept = {exhibit.key: _finished_result(folder / f"{exhibit.key}.json", settings) for exhibit, settings in wanted}
    results, measured, lab = [], [], None
    was_interrupted = False
    try:
        for exhibit, settings in wanted:
            result = kept[exhibit.key]
            if result is None:
                lab = lab or open_lab()
                on_exhibit(f"{paper.title}, {exhibit.kind} {exhibit.number}: {exhibit.title}")
                result = _measure(paper, exhibit, settings, lab)
                _write(exhibit, result, folder)
                measured.append(exhibit.key)
            results.append(result)
    except KeyboardInterrupt:
        if not results:
            raise
        was_interrupted = True
    verdicts = write_index(paper, folder.parent)
    return ReproductionOutcome(results, measured, folder.parent / INDEX_FILE, verdicts, was_interrupted)


def _finished_result(path: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the finished result of an exhibit, or None. Raises UsageError if it was made with other settings."""
    if not path.is_file():
        return None
    result = _read(path)
    for name in sorted({*result["settings"], *settings}):
        old, new = result["settings"].get(name), settings.get(name)
        if old != new:
            raise UsageError(f"{path} was made with {name} {old}, but it is {new} now: give another --output-dir")
    return result


def _read(path: Path) -> dict[str, Any]:
    result = read_json(path, "a result")
    require_kind(result, path, RESULT_KIND, "psctl reproduce", _VERSION)
    return result


def _measure(paper: Paper, exhibit: Exhibit, settings: Mapping[str, Any], lab: "Lab") -> dict[str, Any]:
    started_s = time.monotonic()
    found = exhibit.measure(lab, settings)
    return {
        "kind": RESULT_KIND,
        "version": _VERSION,
        "paper": paper.name,
        "exhibit": exhibit.key,
        "title": exhibit.title,
        "settings": dict(settings),
        "circumstances": lab.circumstances(),
        "wall_s": time.monotonic() - started_s,
        "ours": dict(found.ours),
        "paper_numbers": dict(exhibit.paper),
        "statements": [each.to_json() for each in found.statements],
    }


def _write(exhibit: Exhibit, result: Mapping[str, Any], folder: Path) -> None:
    if exhibit.kind == "figure":
        write_bytes(folder / f"{exhibit.key}.png", exhibit.picture(result))
    else:
        text = "\n\n".join(table.to_markdown() for table in (exhibit.table(result), statements_table(result)))
        write_text(folder / f"{exhibit.key}.md", text + "\n")
    write_json(folder / f"{exhibit.key}.json", result)


def write_index(paper: Paper, folder: Path) -> dict[str, dict[Verdict, int]]:
    """Write the page of all results in a folder, of all models; returns their `count_verdicts`.

    Raises UsageError, OSError.
    """
    found = [
        (exhibit, path, _read(path))
        for exhibit in paper.exhibits
        for path in sorted(folder.glob(f"*/{exhibit.key}.json"))
    ]
    sections = []
    for exhibit, path, result in found:
        model, plots, table = path.parent.name, [], None
        if exhibit.kind == "figure":
            plot = path.with_suffix(".png").read_bytes()
            plots = plots_of({"": plot}, {"": f"{exhibit.title}, {model}"}, ("",))
        else:
            table = exhibit.table(result)
        facts = result["circumstances"]["described"], f"measured in {seconds(result['wall_s'])}"
        sections.append((exhibit, model, facts, result["settings"]["is_quick"], plots, table, statements_table(result)))
    counts = count_verdicts((path.parent.name, result) for _, path, result in found)
    title = f"{paper.title}, figure by figure"
    text = render("reproduce.html", title=title, facts=(), verdicts=verdicts_table(counts), sections=sections)
    write_text(folder / INDEX_FILE, text)
    return counts
