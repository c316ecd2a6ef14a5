"""Verdicts for machines and people: JUnit XML for CI servers, Markdown for GitHub's job summaries."""

from collections import Counter
from collections.abc import Sequence
from xml.etree import ElementTree

from .judging import GateVerdict

_MARKS = {"pass": "✅", "fail": "❌", "not enough evidence": "❔", "updated": "📌"}


def to_junit(verdicts: Sequence[GateVerdict]) -> str:
    """JUnit XML, one test case a gate. Too little evidence is an `error`, not a `failure`: the gate could not tell."""
    counts = Counter(each.verdict for each in verdicts)
    suite = ElementTree.Element(
        "testsuite",
        name="psctl gate",
        tests=str(len(verdicts)),
        failures=str(counts["fail"]),
        errors=str(counts["not enough evidence"]),
        skipped=str(counts["updated"]),
    )
    for each in verdicts:
        case = ElementTree.SubElement(suite, "testcase", classname="psctl.gate", name=each.name)
        tag = {"fail": "failure", "not enough evidence": "error", "updated": "skipped"}.get(each.verdict)
        if tag is not None:
            ElementTree.SubElement(case, tag, message=each.reason, type=each.verdict.replace(" ", "-"))
        output = ElementTree.SubElement(case, "system-out")
        output.text = f"{each.metric} = {figure_text(each)} from {each.source}; {', '.join(each.bounds)}; {each.reason}"
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def to_markdown(verdicts: Sequence[GateVerdict]) -> str:
    """A heading that says how it went and a table with a row for every gate, in GitHub's Markdown."""
    counts = Counter(each.verdict for each in verdicts)
    summary = ", ".join(f"{counts[name]} {name}" for name in _MARKS if counts[name])
    lines = [
        f"### Quality gates: {summary}",
        "",
        "| | gate | metric | value | 95 % interval | n | bound | why |",
        "|---|---|---|---:|---|---:|---|---|",
    ]
    for each in verdicts:
        cells = (
            f"{_MARKS[each.verdict]} {each.verdict}",
            each.name,
            f"`{each.metric}`",
            f"{each.value:.5g}",
            interval_text(each),
            "-" if each.n is None else str(each.n),
            "; ".join(each.bounds),
            each.reason,
        )
        # A bar would end the cell, and a line break the table.
        lines.append("| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def figure_text(verdict: GateVerdict) -> str:
    """The value with its interval: `31.2 (30.9 to 31.5)`."""
    return f"{verdict.value:.5g} ({interval_text(verdict)})"


def interval_text(verdict: GateVerdict) -> str:
    """The interval in words."""
    if verdict.low is None or verdict.high is None:
        return "unknown"
    if verdict.low == verdict.value == verdict.high and verdict.n is None:
        return "none"
    return f"{verdict.low:.5g} to {verdict.high:.5g}"
