"""Figures in result files: writing, reading, conversion from plain numbers."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.figures import numbers_of, read_figures, write_figures
from patchedserve.data.statistics import Estimate


def test_figures_round_trip_through_json() -> None:
    figures = {"psnr": Estimate(44.0, 43.0, 45.5, 12), "num_steps": Estimate.exact(7.0), "latency_p95": Estimate(1.5)}
    content = write_figures({"rows": []}, figures)
    assert content["figures"]["psnr"] == {"value": 44.0, "low": 43.0, "high": 45.5, "n": 12}
    assert read_figures(json.loads(json.dumps(content)), Path("x.json")) == figures
    assert read_figures(write_figures({}, figures, "metrics"), Path("x.json"), "metrics") == figures


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "x.json: figures must be a mapping"),
        ({"figures": [1]}, "x.json: figures must be a mapping"),
        ({"figures": {"a": {"value": None}}}, "x.json: a: value is None"),
        (
            {"figures": {"a": {"value": 2, "low": 3, "high": 1}}},
            "x.json: a: the interval 3 to 1 has",
        ),
    ],
)
def test_damaged_figures_are_named(content: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_figures(content, Path("x.json"))


def test_figures_are_named_by_their_json_paths() -> None:
    content = {"a": 1, "b": {"c": 2.5, "d": {"e": 3}}, "is_x": True, "text": "4", "list": [5], "none": None}
    found = numbers_of(content | {"nan": math.nan})
    assert found == {"a": Estimate.exact(1.0), "b.c": Estimate.exact(2.5), "b.d.e": Estimate.exact(3.0)}
