"""One table, three ways to show it."""

from rich.console import Console

from patchedserve.profiling.report.table import Table

TABLE = Table("Times", ["side", "ms"], [["one <b> | [red]", "1.5"], ["two", "20"]], note="2 cores")


def test_markdown_escapes_bars_and_aligns_numbers() -> None:
    assert TABLE.to_markdown().splitlines() == [
        "**Times**",
        "",
        "| side | ms |",
        "| --- | ---: |",
        "| one <b> \\| [red] | 1.5 |",
        "| two | 20 |",
        "",
        "2 cores",
    ]


def test_html_escapes_what_is_not_ours() -> None:
    html = TABLE.to_html()
    assert "<td>one &lt;b&gt; | [red]</td>" in html
    assert '<td class="number">20</td>' in html
    assert "<caption>Times</caption>" in html


def test_the_terminal_shows_markup_as_it_is() -> None:
    console = Console(width=60)
    with console.capture() as shown:
        console.print(TABLE.to_rich())
    assert "[red]" in shown.get()
    assert "2 cores" in shown.get()
