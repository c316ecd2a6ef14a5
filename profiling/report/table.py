"""A table of figures, written once and shown in the terminal, in HTML and in Markdown."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table as RichTable


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell that says more than one thing.

    Attributes:
        text: printed bold.
        mark: raised after it, such as the letter of a footnote; the terminal leaves it out.
        below: lines in small print.
    """

    text: str
    mark: str = ""
    below: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as people read them.

    Attributes:
        title: above the table; "" for none.
        columns: their heads.
        rows: each with a cell for every column.
        num_words: how many columns on the left hold words; the others hold numbers and are right-aligned.
        note: below the table; "" for none.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    num_words: int = 1
    note: str = ""

    def to_rich(self) -> "RichTable":
        """For the terminal."""
        from rich.markup import escape as plain
        from rich.table import Table as RichTable

        table = RichTable(title=plain(self.title) or None, caption=plain(self.note) or None)
        table.title_justify = table.caption_justify = "left"
        for index, name in enumerate(self.columns):
            # A name that is cut short may be that of several rows.
            table.add_column(plain(name), justify="left" if index < self.num_words else "right", overflow="fold")
        for row in self.rows:
            parts = ([cell] if isinstance(cell, str) else [cell.text, *cell.below] for cell in row)
            table.add_row(*(plain("\n".join(lines)) for lines in parts))
        return table

    def to_html(self) -> str:
        """For a report page; the title is the table's caption."""
        from .page import render

        return render("table.html", table=self)

    def to_markdown(self) -> str:
        """For documents and GitHub's summaries."""

        def inner(cell: str | Cell) -> str:
            if isinstance(cell, str):
                return markdown_text(cell)
            mark = f"<sup>{markdown_text(cell.mark)}</sup>" if cell.mark else ""
            return "<br>".join([f"**{markdown_text(cell.text)}**{mark}", *map(markdown_text, cell.below)])

        rule = ["---" if index < self.num_words else "---:" for index in range(len(self.columns))]
        cells = [list(map(inner, self.columns)), rule, *(list(map(inner, row)) for row in self.rows)]
        lines = ["| " + " | ".join(row) + " |" for row in cells]
        above = [f"**{markdown_text(self.title)}**", ""] if self.title else []
        below = ["", markdown_text(self.note)] if self.note else []
        return "\n".join([*above, *lines, *below])


def markdown_text(text: str) -> str:
    """Plain text as Markdown shows it unchanged, on one line."""
    return re.sub(r"([\\|<*_`\[])", r"\\\1", " ".join(text.split()))


def to_rich(tables: Iterable[Table]) -> "RenderableType":
    """Tables one below the other, for the terminal."""
    from rich.console import Group

    return Group(*(table.to_rich() for table in tables))
