"""A paper is a list of exhibits: figures and tables that are measured once, drawn, and kept beside the paper's numbers.

An exhibit leaves in the folder of its model `figure-5.json` (settings, what was measured, what the paper says of it)
and the picture `figure-5.png`, of a table `table-1.md`. The JSON is written last: an exhibit
that has one is finished, and is not measured again. No torch.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...data.errors import UsageError
from ...data.files import write_bytes, write_json, write_text
from ...profiling.report.page import plots_of, render
from ...profiling.report.table import Table
from ...profiling.report.theme import to_png
from ...profiling.report.words import seconds
from ..result_files import read_json, require_kind
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
class ExhibitResult:
    """What was measured for an exhibit: what its picture shows, as JSON, and what it says of the paper's statements."""

    ours: Mapping[str, Any]
    statements: Sequence[Statement]


Measure = Callable[["Lab", Mapping[str, Any]], ExhibitResult]
"""Measures an exhibit with its settings."""


@dataclass(frozen=True, slots=True)
class Exhibit:
    """A figure or a table.

    Attributes:
        kind, number, title: as in the paper.
        about: what the paper measured, and where it says so.
        measure: measures it.
        draw: the picture of a result, or its table.
        full, quick: its own settings, and those of a smoke run.
        paper: numbers that the paper prints in a table.
        metrics: whose judges it asks.
        pipelines: classes of diffusers pipelines that it is of; none for all.
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
        """Name of its files."""
        return f"{self.kind}-{self.number}"

    def applies_to(self, pipeline: str) -> bool:
        """Whether it is of models with this class of pipeline."""
        return not self.pipelines or pipeline in self.pipelines

    def picture(self, result: Mapping[str, Any]) -> bytes:
        """The PNG of a figure."""
        return to_png(self.draw(result))  # type: ignore[arg-type]

    def table(self, result: Mapping[str, Any]) -> Table:
        """What a table shows."""
        return self.draw(result)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper: what the user calls it, its title, and what is reproduced of it."""

    name: str
    title: str
    exhibits: tuple[Exhibit, ...]

    def select(self, figures: Sequence[int], tables: Sequence[int], pipeline: str) -> list[Exhibit]:
        """The exhibits with these numbers; without any, all that suit models with this class of pipeline.

        Raises:
            UsageError: one is not reproduced, or is of models of another kind.
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
    """What a reproduction gives: the results that were asked for, as in their files, which of them are new, the page of
    all that the folder holds, what `count_verdicts` says of that, and whether Ctrl-C ended it.
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
    """Measure what is not finished, and write the page.

    Args:
        paper: whose exhibits they are.
        wanted: exhibits with all settings that they depend on.
        open_lab: loads the model; called only if something is to be measured.
        folder: of the model's files; the page of all models is beside it.
        on_exhibit: told what is measured, before it is.

    Raises:
        UsageError: an exhibit is finished with other settings; nothing has been measured then.
        KeyboardInterrupt: on Ctrl-C before the first exhibit was finished.
        OSError: results cannot be written.
    """
    kept = {exhibit.key: _stored_result(folder / f"{exhibit.key}.json", settings) for exhibit, settings in wanted}
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


def _stored_result(path: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The finished result of an exhibit. Raises UsageError if it was made with other settings."""
    if not path.is_file():
        return None
    result = _read(path)
    for name in sorted({*result["settings"], *settings}):
        old, new = result["settings"].get(name), settings.get(name)
        if old != new:
            raise UsageError(f"{path} was made with {name} {old}, but it is {new} now: give another --output-dir")
    return result


def _read(path: Path) -> dict[str, Any]:
    result = read_json(path)
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
    """Write the page of everything that a folder holds, of all models; returns what `count_verdicts` says of it.

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
