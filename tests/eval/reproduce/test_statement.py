"""Verdicts of intervals on a paper's statement, and how they are counted and shown."""

import json
from typing import Any

import pytest

from patchedserve.data.statistics import Estimate
from patchedserve.eval.reproduce.statement import (
    FACTOR,
    RULE,
    VERDICTS,
    Statement,
    Verdict,
    count_verdicts,
    statements_of,
    statements_table,
    verdicts_table,
)

_FIRST: dict[str, Any] = {"unit": "x", "neutral": 1.0, "is_more": True, "paper_text": ""}


def between(low: float, high: float) -> Estimate:
    return Estimate((low + high) / 2, low, high)


def points(ours: Estimate | None) -> Statement:
    """Return a statement for which the paper prints 30.1 points: half of it is 15.05, twice 60.2."""
    return Statement("", ours, (30.1,), "points", 0)


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        (points(between(20, 40)), "agrees"),
        (points(between(15.05, 60.2)), "agrees"),
        (points(between(15.04, 60.2)), "same way only"),
        (points(between(15.05, 60.21)), "same way only"),
        # The value alone would agree.
        (points(Estimate(30.1, 0.1, 60.1)), "same way only"),
        (points(Estimate(30.1, 0.0, 60.2)), "cannot be told"),
        (points(Estimate(30.1, -0.1, 60.3)), "cannot be told"),
        (points(between(-40, -0.1)), "differs"),
        (points(between(-40, 0)), "cannot be told"),
        (points(Estimate(30.1)), "cannot be told"),
        (points(None), "cannot be told"),
        # Bounds on ratios are logarithmic: the root of 2.25 and its square.
        (Statement("", between(1.501, 5.06), (2.25,)), "agrees"),
        (Statement("", between(1.499, 5.06), (2.25,)), "same way only"),
        (Statement("", between(1.501, 5.07), (2.25,)), "same way only"),
        (Statement("", between(0.4, 0.9), (0.5,), is_more=False), "same way only"),
        (Statement("", between(0.4, 0.7), (0.5,), is_more=False), "agrees"),
        # Only the direction counts.
        (Statement("", between(1.001, 9)), "agrees"),
        (Statement("", between(0.5, 0.99)), "differs"),
        (Statement("", between(0.5, 0.99), is_more=False), "agrees"),
        (Statement("", Estimate.exact(1.0)), "cannot be told"),
        (Statement("", Estimate.exact(1.01)), "agrees"),
        # A bound, such as more than 99 %, is not a size.
        (Statement("", between(0.991, 1), (0.99,), "share", 0.99), "agrees"),
        (Statement("", between(0.989, 1), (0.99,), "share", 0.99), "cannot be told"),
        (Statement("", between(1, 3.3), (-3.07, 5.63), "score", 5.63, is_more=False), "agrees"),
        (Statement("", between(5.7, 6), (-3.07, 5.63), "score", 5.63, is_more=False), "differs"),
        # A range of sizes counts from half of the smallest to twice the largest.
        (Statement("", between(0.17, 1.02), (0.34, 0.51), "score", 0), "agrees"),
        (Statement("", between(0.16, 1.02), (0.34, 0.51), "score", 0), "same way only"),
        (Statement("", between(0.17, 1.03), (0.34, 0.51), "score", 0), "same way only"),
    ],
)
def test_verdict_depends_on_the_interval(given: Statement, verdict: Verdict) -> None:
    assert given.verdict == verdict
    kept = json.loads(json.dumps(given.to_json()))
    assert kept["verdict"] == verdict
    assert Statement.from_json(kept) == given


@pytest.mark.parametrize(
    ("given", "ours", "interval", "paper"),
    [
        (Statement("", Estimate(1.2, 1.104, 1.3), (1.68,)), "1.20x", "1.10 to 1.30", "1.68x"),
        (Statement("", Estimate(0.9), is_more=False), "0.90x", "-", "less"),
        (Statement("", None, (1.5,)), "-", "-", "1.50x"),
        (points(Estimate(-3, -5, 1)), "-3.0 points", "-5.0 to +1.0", "+30.1 points"),
        (Statement("", Estimate(1.0, 0.996, 1.0), (), "share"), "100.0%", "99.6% to 100.0%", "more"),
        (Statement("", Estimate(0.0, -0.1, 0.1), (0.34, 0.51), "score"), "+0.00", "-0.10 to +0.10", "+0.34 to +0.51"),
    ],
)
def test_text_of_statements(given: Statement, ours: str, interval: str, paper: str) -> None:
    found = given.to_json()
    assert (found["ours_text"], found["interval_text"], found["paper_text"]) == (ours, interval, paper)


def result(*given: Statement) -> dict[str, Any]:
    return {"exhibit": "figure-1", "title": "bars", "statements": [each.to_json() for each in given]}


def test_verdicts_are_counted_by_model() -> None:
    alike, apart, unknown = points(between(20, 40)), points(between(-2, -1)), points(None)
    counts = count_verdicts([("one", result(alike, apart)), ("two", result(unknown)), ("one", result(alike))])
    assert counts == {
        "one": {"agrees": 2, "same way only": 0, "differs": 1, "cannot be told": 0},
        "two": {"agrees": 0, "same way only": 0, "differs": 0, "cannot be told": 1},
        "all": {"agrees": 2, "same way only": 0, "differs": 1, "cannot be told": 1},
    }
    table = verdicts_table(counts)
    assert table.columns == ("model", *VERDICTS)
    assert table.rows[-1] == ("all", "2", "0", "1", "1")
    assert table.note == RULE
    assert f"within a factor of {FACTOR:g} of" in RULE
    assert statements_table(result(alike)).rows == [("", "+30.1 points", "+30.0 points", "+20.0 to +40.0", "agrees")]


def test_statements_of_the_first_version_have_no_interval() -> None:
    """As files had them in which `ours` was a number."""
    content: dict[str, Any] = {
        "version": 1,
        "statements": [
            {**_FIRST, "text": "LLL against SSS", "ours": 2.528, "paper": [1.68], "agrees": True, "ours_text": "2.53x"},
            {**_FIRST, "text": "SML against MML", "ours": 0.822, "paper": [], "agrees": False, "ours_text": "0.82x"},
        ],
    }
    found = statements_of(content)
    assert {each.verdict for each in found} == {"cannot be told"}
    assert [each.ours_text for each in found] == [each["ours_text"] for each in content["statements"]]
