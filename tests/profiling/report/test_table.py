"""A table in its three output formats."""

from rich.console import Console

from patchedserve.profiling.report.table import Cell, Table

TABLE = Table("Times", ["side", "ms"], [["one <b> | [red]", "1.5"], ["two", "20"]], note="2 cores")


def test_markdown_is_escaped_and_numbers_are_aligned() -> None:
    assert TABLE.to_markdown().splitlines() == [
        "**Times**",
        "",
        "| side | ms |",
        "| --- | ---: |",
        "| one \\<b> \\| \\[red] | 1.5 |",
        "| two | 20 |",
        "",
        "2 cores",
    ]


def test_html_escapes_cell_content() -> None:
    html = TABLE.to_html()
    assert "<td>one &lt;b&gt; | [red]</td>" in html
    assert '<td class="number">20</td>' in html
    assert "<caption>Times</caption>" in html


def test_terminal_shows_markup_literally() -> None:
    console = Console(width=60)
    with console.capture() as shown:
        console.print(TABLE.to_rich())
    assert "[red]" in shown.get()
    assert "2 cores" in shown.get()


def test_cell_may_have_a_mark_and_extra_lines() -> None:
    table = Table("", ["side", "FID"], [["one", Cell("20", "a", ("19 to 21", "N <4>"))], ["two", Cell("3")]])
    html = table.to_html()
    assert "<b>20</b><sup>a</sup><small>19 to 21</small><small>N &lt;4&gt;</small></td>" in html
    assert '<td class="number"><b>3</b></td>' in html
    assert "| one | **20**<sup>a</sup><br>19 to 21<br>N \\<4> |" in table.to_markdown().splitlines()
    console = Console(width=60)
    with console.capture() as shown:
        console.print(table.to_rich())
    lines = [line.strip("│ ") for line in shown.get().splitlines()]
    assert [line.split()[-1] for line in lines[3:6]] == ["20", "21", "<4>"]
