"""A quality report as Markdown, as JSON, and as one HTML file with pictures inside it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from ...profiling.report.page import DASH, image_tag, page
from ..sets.generate import flat_settings
from .pairs import ImagePair
from .sides import ReportedSide, Subject
from .tables import Cell, Figure, Judge, ReportTable

REPORT_KIND = "psctl-eval-report"
VERSION = 1
TITLE = "Image quality"
_CSS = """
sup { color: var(--muted); font-size: 11px; }
thead th { white-space: normal; vertical-align: bottom; }
th, td { padding: 8px 11px; }
td small { display: block; color: var(--muted); white-space: nowrap; }
.under { color: var(--muted); font-size: 13px; margin: 8px 2px 0; }
.under code { color: var(--ink); overflow-wrap: anywhere; }
p.under { margin: 4px 0 8px; }
.under li { margin: 2px 0; }
.pairs { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); gap: 18px 16px; }
.pairs figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 10px;
  box-shadow: var(--shadow); break-inside: avoid; }
.pairs .two { display: grid; grid-template-columns: 1fr 1fr; gap: 8px; }
.pairs .two div { aspect-ratio: 1; display: flex; align-items: center; justify-content: center; font-size: 13px;
  color: var(--muted); text-align: center; }
.pairs img { width: 100%; height: 100%; object-fit: contain; }
.pairs .who { display: grid; grid-template-columns: 1fr 1fr; gap: 8px; color: var(--muted); font-size: 12px; }
.pairs figcaption small { color: var(--muted); }
"""
_INTRO = (
    "Each figure stands with its 95 % interval and N, the number of images or pairs behind it; a letter names its "
    "judge. Original is plain diffusers; w/ Orig. is against its images, w/ G.T. against real ones (ground truth)."
)


def to_json(subjects: Sequence[Subject], tables: Sequence[ReportTable], warnings: Sequence[str]) -> dict[str, Any]:
    """Everything that the tables show, and how the images were drawn, as JSON."""
    return {
        "kind": REPORT_KIND,
        "version": VERSION,
        "tables": {table.key: _table_json(table) for table in tables},
        "subjects": [
            {
                "model": subject.model,
                "dataset": subject.dataset,
                "sides": [
                    {
                        "label": side.label,
                        "settings": side.settings,
                        "cache_use": side.cache_use,
                        "sources": side.sources,
                    }
                    for side in subject.sides
                ],
            }
            for subject in subjects
        ],
        "warnings": list(warnings),
    }


def _table_json(table: ReportTable) -> dict[str, Any]:
    def cell(value: Cell) -> Any:
        if isinstance(value, Figure):
            return asdict(value)
        return value if isinstance(value, str) else None

    return {
        "title": table.title,
        "columns": table.columns,
        "rows": [{name: cell(value) for name, value in row.items()} for row in table.rows],
        "missing": [{"what": what, "command": command} for command, what in table.missing.items()],
    }


def letters(tables: Sequence[ReportTable]) -> dict[Judge, str]:
    """A letter for each judge of a report: a, b, ..., z, aa, ..."""
    judges = dict.fromkeys(judge for table in tables for judge in table.judges)
    return {judge: _letter(i) for i, judge in enumerate(judges)}


def _letter(number: int) -> str:
    return (_letter(number // 26 - 1) if number >= 26 else "") + chr(ord("a") + number % 26)


def to_markdown(subjects: Sequence[Subject], tables: Sequence[ReportTable], warnings: Sequence[str]) -> str:
    """The tables as GitHub shows them."""
    marks = letters(tables)
    lines = [f"# {TITLE}", "", _INTRO, ""]
    for table in tables:
        lines += [f"## {table.title}", "", _for_markdown(table.about), ""]
        lines.append("| " + " | ".join(map(_for_markdown, table.columns.values())) + " |")
        lines.append("|" + "|".join(" --: " if _is_numeric(table, name) else " --- " for name in table.columns) + "|")
        lines += [
            "| " + " | ".join(_markdown_cell(row.get(name, ""), marks) for name in table.columns) + " |"
            for row in table.rows
        ]
        lines.append("")
        lines += [f"- {line}" for line in _notes(table, marks, _for_markdown, lambda text: f"`{text}`")]
        lines.append("")
    if warnings:
        lines += ["## Warnings", "", *(f"- {_for_markdown(warning)}" for warning in warnings), ""]
    lines += ["## How the images were drawn", "", *(f"- {_for_markdown(line)}" for line in _sources(subjects)), ""]
    return "\n".join(lines)


def _markdown_cell(cell: Cell, marks: Mapping[Judge, str]) -> str:
    if isinstance(cell, str):
        return _for_markdown(cell)
    if not isinstance(cell, Figure):
        return DASH
    mark = "" if cell.judge is None else f"<sup>{marks[cell.judge]}</sup>"
    return f"**{cell.text}**{mark}" + "".join(f"<br>{line}" for line in _below(cell))


def _for_markdown(text: str) -> str:
    for sign in ("\\", "|", "<", "*", "_", "`", "["):
        text = text.replace(sign, "\\" + sign)
    return " ".join(text.split())


def to_html(
    subjects: Sequence[Subject],
    tables: Sequence[ReportTable],
    warnings: Sequence[str],
    pairs: Sequence[tuple[Subject, ReportedSide, Sequence[ImagePair], str | None]],
    *,
    on_pair: Callable[[], None] = lambda: None,
) -> str:
    """The report as one page.

    Args:
        subjects, tables, warnings: what it says.
        pairs: of each of our sides the pairs to show, and why there are none.
        on_pair: called after each pair that was read.
    """
    marks = letters(tables)
    about = " · ".join(f"{subject.model} on {subject.dataset}" for subject in subjects)
    parts = [f"<header><h1>{escape(TITLE)}</h1><p>{escape(about)}</p></header>"]
    parts += [f'<p class="note">{escape(warning)}</p>' for warning in warnings]
    parts.append(f'<p class="under">{escape(_INTRO)}</p>')
    parts += [_html_table(table, marks) for table in tables]
    parts += [_html_pairs(*each, on_pair) for each in pairs]
    parts.append("<h2>How the images were drawn</h2>")
    parts.append(f'<ul class="under">{"".join(f"<li>{escape(line)}</li>" for line in _sources(subjects))}</ul>')
    parts.append("<footer>Made by psctl.</footer>")
    return page(TITLE, parts, css=_CSS)


def _html_table(table: ReportTable, marks: Mapping[Judge, str]) -> str:
    head = "".join(
        f"<th{' class=number' if _is_numeric(table, name) else ''}>{escape(title)}</th>"
        for name, title in table.columns.items()
    )
    body = "".join(
        f"<tr>{''.join(_html_cell(row.get(name, ''), _is_numeric(table, name), marks) for name in table.columns)}</tr>"
        for row in table.rows
    )
    notes = "".join(
        f"<li>{line}</li>" for line in _notes(table, marks, escape, lambda text: f"<code>{escape(text)}</code>")
    )
    return (
        f'<h2>{escape(table.title)}</h2><p class="under">{escape(table.about)}</p>'
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        f'<ul class="under">{notes}</ul>'
    )


def _html_cell(cell: Cell, is_numeric: bool, marks: Mapping[Judge, str]) -> str:
    start = '<td class="number">' if is_numeric else "<td>"
    if isinstance(cell, str):
        return f"{start}{escape(cell)}</td>"
    if not isinstance(cell, Figure):
        return f"{start}{DASH}</td>"
    mark = "" if cell.judge is None else f"<sup>{marks[cell.judge]}</sup>"
    below = "".join(f"<small>{escape(line)}</small>" for line in _below(cell))
    return f"{start}<b>{escape(cell.text)}</b>{mark}{below}</td>"


def _html_pairs(
    subject: Subject, side: ReportedSide, pairs: Sequence[ImagePair], reason: str | None, on_pair: Callable[[], None]
) -> str:
    title = f"{side.label}, {subject.model} on {subject.dataset}"
    if reason is not None:
        return f'<h2>{escape(title)}</h2><p class="under">No pictures: {escape(reason)}.</p>'
    figures = []
    for pair in pairs:
        figures.append(_html_pair(pair))
        on_pair()
    if not figures:
        return ""
    return (
        f"<h2>{escape(title)} <small>{len(figures)} pairs: spread over all prompts, and those that differ most"
        f'</small></h2><section class="pairs">{"".join(figures)}</section>'
    )


def _html_pair(pair: ImagePair) -> str:
    item = pair.item
    units = {"psnr": " dB"}
    figures = ", ".join(f"{name.upper()} {value:.3g}{units.get(name, '')}" for name, value in pair.figures.items())
    facts = f"{item.width}x{item.height}, seed {item.seed}" + (f"; {figures}" if figures else "")
    extreme = "differs most; " if pair.is_extreme else ""
    return (
        '<figure><div class="who"><span>original</span><span>ours</span></div><div class="two">'
        f"<div>{image_tag(pair.original, 'original')}</div><div>{image_tag(pair.ours, 'ours')}</div></div>"
        f"<figcaption>{escape(item.prompt)}<br><small>{extreme}{escape(facts)}</small></figcaption></figure>"
    )


def _below(figure: Figure) -> Iterator[str]:
    if figure.interval:
        yield figure.interval
    yield f"N {figure.n}"


def _notes(
    table: ReportTable, marks: Mapping[Judge, str], text: Callable[[str], str], code: Callable[[str], str]
) -> Iterator[str]:
    """Lines under a table: judges, real images, and what is missing with the command that measures it."""
    for judge in table.judges:
        yield text(f"{marks[judge]}: {judge.name}, weights SHA-256 {judge.weights_sha256[:16]}")
    if table.references:
        yield text(f"G.T.: {'; '.join(table.references)}")
    for what, command in table.not_measured:
        yield f"{text(what)} {code(command)}"


def _is_numeric(table: ReportTable, name: str) -> bool:
    return not any(isinstance(row.get(name), str) for row in table.rows)


def _sources(subjects: Sequence[Subject]) -> Iterator[str]:
    for subject in subjects:
        for side in subject.sides:
            shown = {
                name: value
                for name, value in flat_settings(side.settings).items()
                if value is not None and name not in ("model", "dataset", "generated", "reference")
            }
            if shown.get("cache.mode", "off") == "off":
                shown = {name: value for name, value in shown.items() if not name.startswith("cache.")}
            settings = ", ".join(f"{name} {_plain(value)}" for name, value in shown.items())
            files = ", ".join(side.sources)
            yield f"{side.label}, {subject.model} on {subject.dataset}: {settings}; read from {files}"


def _plain(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
