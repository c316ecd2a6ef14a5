"""A paper is a list of exhibits: figures and tables that are measured once, drawn, and kept beside the paper's numbers.

An exhibit leaves in the folder of its model `figure-5.json` (settings, what was measured, what the paper says of it)
and the picture `figure-5.png`, of a table `table-1.md`. The JSON is written last: an exhibit
that has one is finished, and is not measured again. No torch.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...data.errors import UsageError
from ...data.files import write_bytes, write_json, write_text
from ...profiling.report.page import plots_of, render
from ...profiling.report.table import Table
from ...profiling.report.theme import to_png
from ...profiling.report.words import DASH, seconds
from ..result_files import read_json, require_kind

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .lab import Lab

RESULT_KIND = "psctl-reproduce"
INDEX_FILE = "index.html"
SDXL, SD3 = "StableDiffusionXLPipeline", "StableDiffusion3Pipeline"
"""Classes of diffusers pipelines."""
Unit = Literal["x", "points", "share", "score"]
_FORMATS: Mapping[str, str] = {"x": "{:.2f}x", "points": "{:+.1f} points", "share": "{:.1%}", "score": "{:+.2f}"}


@dataclass(frozen=True, slots=True)
class Statement:
    """What a paper says of an exhibit, beside what was measured here.

    Attributes:
        text: what is compared.
        ours: what was measured; None where it cannot be told.
        paper: the number that the paper prints, or its smallest and largest; none where it only says which way.
        unit: `x` of ratios, `points` of differences of shares, `share`, or `score` of a metric.
        neutral: the value that goes neither way.
        is_more: whether the paper says that it is more than `neutral`, not less.
    """

    text: str
    ours: float | None
    paper: tuple[float, ...] = ()
    unit: Unit = "x"
    neutral: float = 1.0
    is_more: bool = True

    @property
    def agrees(self) -> bool | None:
        """Whether ours lies on the paper's side of `neutral`; None where ours cannot be told."""
        return None if self.ours is None else (self.ours > self.neutral) == self.is_more and self.ours != self.neutral

    def to_json(self) -> dict[str, Any]:
        """A mapping that JSON can hold, with the two sides as people read them."""
        shown = _FORMATS[self.unit].format
        said = " to ".join(map(shown, self.paper)) or ("more" if self.is_more else "less")
        found = DASH if self.ours is None else shown(self.ours)
        return {**asdict(self), "agrees": self.agrees, "paper_text": said, "ours_text": found}


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured for an exhibit: what its picture shows, as JSON, and what it says of the paper's statements."""

    ours: Mapping[str, Any]
    statements: Sequence[Statement]


Measure = Callable[["Lab", Mapping[str, Any]], Found]
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

    def suits(self, pipeline: str) -> bool:
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

    def chosen(self, figures: Sequence[int], tables: Sequence[int], pipeline: str) -> list[Exhibit]:
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
            return [each for each in self.exhibits if each.suits(pipeline)]
        found = [each for each in self.exhibits if each.number in wanted[each.kind]]
        for each in found:
            if not each.suits(pipeline):
                suited = " or ".join(each.pipelines)
                raise UsageError(
                    f"--{each.kind} {each.number} is of models with a {suited}, but the model has a {pipeline}"
                )
        return found


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a reproduction gives: the results that were asked for, as in their files, which of them are new, the page of
    all that the folder holds, and whether Ctrl-C ended it.
    """

    results: Sequence[Mapping[str, Any]]
    measured: Sequence[str]
    index: Path
    was_interrupted: bool


def reproduce(
    paper: Paper,
    wanted: Sequence[tuple[Exhibit, Mapping[str, Any]]],
    open_lab: "Callable[[], Lab]",
    folder: Path,
    *,
    on_exhibit: Callable[[str], None] = lambda title: None,
) -> Outcome:
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
    kept = {exhibit.key: _kept(folder / f"{exhibit.key}.json", settings) for exhibit, settings in wanted}
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
    return Outcome(results, measured, write_index(paper, folder.parent), was_interrupted)


def _kept(path: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
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
    require_kind(result, path, RESULT_KIND, "psctl reproduce")
    return result


def _measure(paper: Paper, exhibit: Exhibit, settings: Mapping[str, Any], lab: "Lab") -> dict[str, Any]:
    started_s = time.monotonic()
    found = exhibit.measure(lab, settings)
    return {
        "kind": RESULT_KIND,
        "version": 1,
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


def statements_table(result: Mapping[str, Any]) -> Table:
    """The paper's statements beside ours."""
    words = {True: "the same", False: "the other", None: "cannot be told"}
    rows = [
        (each["text"], each["paper_text"], each["ours_text"], words[each["agrees"]]) for each in result["statements"]
    ]
    name = result["exhibit"].replace("-", " ").capitalize()
    return Table(f"{name}: {result['title']}", ("what the paper says of it", "paper", "here", "way"), rows)


def write_index(paper: Paper, folder: Path) -> Path:
    """Write the page of everything that a folder holds, of all models; returns it. Raises UsageError, OSError."""
    sections = []
    for exhibit in paper.exhibits:
        for path in sorted(folder.glob(f"*/{exhibit.key}.json")):
            result, model = _read(path), path.parent.name
            plots, table = [], None
            if exhibit.kind == "figure":
                plot = (path.parent / f"{exhibit.key}.png").read_bytes()
                plots = plots_of({"": plot}, {"": f"{exhibit.title}, {model}"}, ("",))
            else:
                table = exhibit.table(result)
            facts = result["circumstances"]["described"], f"measured in {seconds(result['wall_s'])}"
            sections.append(
                (exhibit, model, facts, result["settings"]["is_quick"], plots, table, statements_table(result))
            )
    text = render("reproduce.html", title=f"{paper.title}, figure by figure", facts=(), sections=sections)
    write_text(folder / INDEX_FILE, text)
    return folder / INDEX_FILE
