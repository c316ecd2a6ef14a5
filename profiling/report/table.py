"""A table of figures, written once and shown in the terminal, in HTML and in Markdown."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table as RichTable


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
    rows: Sequence[Sequence[str]]
    num_words: int = 1
    note: str = ""

    def to_rich(self) -> "RichTable":
        """For the terminal."""
        from rich.markup import escape as plain
        from rich.table import Table as RichTable

        table = RichTable(title=plain(self.title) or None, caption=plain(self.note) or None)
        table.title_justify = table.caption_justify = "left"
        for index, name in enumerate(self.columns):
            table.add_column(plain(name), justify="left" if index < self.num_words else "right")
        for row in self.rows:
            table.add_row(*map(plain, row))
        return table

    def to_html(self) -> str:
        """For a report page; the title is the table's caption."""
        from .page import render

        return render("table.html", table=self)

    def to_markdown(self) -> str:
        """For documents and GitHub's summaries."""
        rule = ["---" if index < self.num_words else "---:" for index in range(len(self.columns))]
        cells = [list(self.columns), rule, *([cell.replace("|", "\\|") for cell in row] for row in self.rows)]
        lines = ["| " + " | ".join(row) + " |" for row in cells]
        above = [f"**{self.title}**", ""] if self.title else []
        below = ["", self.note] if self.note else []
        return "\n".join([*above, *lines, *below])


def to_rich(tables: Iterable[Table]) -> "RenderableType":
    """Tables one below the other, for the terminal."""
    from rich.console import Group

    return Group(*(table.to_rich() for table in tables))
