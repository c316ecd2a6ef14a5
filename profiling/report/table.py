"""Table of figures, defined once and rendered in the terminal, in HTML and in Markdown."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table as RichTable


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell with more than one text.

    Attributes:
        text: main text, printed bold.
        mark: superscript after the text, such as the letter of a footnote; omitted in the terminal.
        below: lines in small print.
    """

    text: str
    mark: str = ""
    below: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """Table of formatted cells.

    Attributes:
        title: title above the table; "" for none.
        columns: heads of the columns.
        rows: rows, each with a cell for every column.
        num_words: number of columns on the left that hold words; the others hold numbers and are right-aligned.
        note: note below the table; "" for none.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    num_words: int = 1
    note: str = ""

    def to_rich(self) -> "RichTable":
        """Return the table for the terminal."""
        from rich.markup import escape as plain
        from rich.table import Table as RichTable

        table = RichTable(title=plain(self.title) or None, caption=plain(self.note) or None)
        table.title_justify = table.caption_justify = "left"
        for index, name in enumerate(self.columns):
            # Names are folded, because a truncated name could match several rows.
            table.add_column(plain(name), justify="left" if index < self.num_words else "right", overflow="fold")
        for row in self.rows:
            parts = ([cell] if isinstance(cell, str) else [cell.text, *cell.below] for cell in row)
            table.add_row(*(plain("\n".join(lines)) for lines in parts))
        return table

    def to_html(self) -> str:
        """Return the table for a report page, with the title as caption."""
        from .page import render

        return render("table.html", table=self)

    def to_markdown(self) -> str:
        """Return the table for documents and GitHub's summaries."""

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
    """Return plain text escaped for Markdown, on one line."""
    return re.sub(r"([\\|<*_`\[])", r"\\\1", " ".join(text.split()))


def to_rich(tables: Iterable[Table]) -> "RenderableType":
    """Return tables one below the other, for the terminal."""
    from rich.console import Group

    return Group(*(table.to_rich() for table in tables))
