"""Verdicts for machines and people: JUnit XML for CI servers, a table for the terminal and GitHub's job summaries."""

from collections import Counter
from collections.abc import Sequence
from xml.etree import ElementTree

from ...profiling.report.table import Table
from .judging import GateVerdict

_MARKS = {"pass": "✅", "fail": "❌", "not enough evidence": "❔", "updated": "📌"}


def to_junit(verdicts: Sequence[GateVerdict]) -> str:
    """Return JUnit XML with one test case per gate. Too little evidence is an `error`, not a `failure`."""
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
        figure = f"{each.metric} = {each.value:.5g} ({_interval(each)})"
        output.text = f"{figure} from {each.source}; {', '.join(each.bounds)}; {each.reason}"
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def to_markdown(verdicts: Sequence[GateVerdict]) -> str:
    """Return a heading with the counts of verdicts and a table with a row for every gate, in GitHub's Markdown."""
    counts = Counter(each.verdict for each in verdicts)
    summary = ", ".join(f"{counts[name]} {name}" for name in _MARKS if counts[name])
    return f"### Quality gates: {summary}\n\n{table_of(verdicts).to_markdown()}\n"


def table_of(verdicts: Sequence[GateVerdict]) -> Table:
    """Return a table with a row for every gate."""
    columns = ("gate", "verdict", "metric", "bound", "why", "value", "95 % interval", "n")
    rows = [
        (
            each.name,
            f"{_MARKS[each.verdict]} {each.verdict}",
            each.metric,
            "; ".join(each.bounds),
            each.reason,
            f"{each.value:.5g}",
            _interval(each),
            "-" if each.n is None else str(each.n),
        )
        for each in verdicts
    ]
    return Table("", columns, rows, num_words=5)


def _interval(verdict: GateVerdict) -> str:
    if verdict.low is None or verdict.high is None:
        return "unknown"
    return "exact" if verdict.low == verdict.value == verdict.high else f"{verdict.low:.5g} to {verdict.high:.5g}"
