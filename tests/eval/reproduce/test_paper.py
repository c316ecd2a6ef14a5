"""A paper's exhibits: measured once, kept with their settings, drawn, and shown on one page."""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from patchedserve.data.errors import UsageError
from patchedserve.eval.reproduce.paper import SD3, SDXL, Exhibit, Found, Paper, Statement, reproduce
from patchedserve.eval.reproduce.patchedserve import PATCHEDSERVE
from patchedserve.profiling.report.table import Table
from patchedserve.profiling.report.theme import THEME, new_figure

SETTINGS = {"model": "tiny", "seed": 0, "is_quick": False}


class Room:
    """In place of a lab: says where it is, and counts what is measured in it."""

    def __init__(self, stop_at: int = 0) -> None:
        self.stop_at, self.measured = stop_at, list[int]()

    def circumstances(self) -> dict[str, Any]:
        return {"described": "a <room>"}


def exhibit(number: int, kind: Any = "figure", pipelines: tuple[str, ...] = ()) -> Exhibit:
    def measure(lab: Any, settings: Mapping[str, Any]) -> Found:
        if lab.stop_at == number:
            raise KeyboardInterrupt
        lab.measured.append(number)
        return Found({"bar": number}, [Statement("ours against theirs", number / 10, (0.3, 0.5))])

    def draw(result: Mapping[str, Any]) -> Figure:
        figure = new_figure(2, 1)
        figure.subplots().bar([0], [result["ours"]["bar"]], color=THEME.series[0])
        return figure

    def table(result: Mapping[str, Any]) -> Table:
        return Table("Bars", ("bar",), [(str(result["ours"]["bar"]),)])

    return Exhibit(
        kind, number, "bars", "it has bars", measure, draw if kind == "figure" else table, {}, {}, pipelines=pipelines
    )


PAPER = Paper("bars", "On Bars", (exhibit(1), exhibit(20), exhibit(2, "table")))


def run(folder: Path, room: Room, settings: Mapping[str, Any] = SETTINGS) -> Any:
    return reproduce(PAPER, [(each, settings) for each in PAPER.exhibits], lambda: room, folder)  # type: ignore[arg-type, return-value]


def test_what_is_finished_is_not_measured_again(tmp_path: Path) -> None:
    room = Room(stop_at=20)
    outcome = run(tmp_path / "tiny", room)
    assert (outcome.was_interrupted, outcome.measured) == (True, ["figure-1"])
    assert {path.name for path in (tmp_path / "tiny").iterdir()} == {
        "figure-1.json",
        "figure-1.png",
    }

    room.stop_at = 0
    outcome = run(tmp_path / "tiny", room)
    assert (outcome.was_interrupted, outcome.measured) == (False, ["figure-20", "table-2"])
    assert room.measured == [1, 20, 2]
    files = [json.loads((tmp_path / "tiny" / f"{each.key}.json").read_text()) for each in PAPER.exhibits]
    assert [each["statements"][0]["agrees"] for each in files] == [False, True, False]
    assert files[0]["settings"] == SETTINGS
    assert "| 2 |" in (tmp_path / "tiny" / "table-2.md").read_text()

    with pytest.raises(
        UsageError, match=r"figure-1\.json was made with seed 0, but it is 1 now: give another --output-d"
    ):
        run(tmp_path / "tiny", room, {**SETTINGS, "seed": 1})
    assert room.measured == [1, 20, 2]


def test_interrupted_before_anything_was_finished(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "tiny", Room(stop_at=1))


def test_the_page_shows_all_models(tmp_path: Path) -> None:
    run(tmp_path / "one", Room())
    page = run(tmp_path / "two", Room(), {**SETTINGS, "is_quick": True}).index.read_text()
    assert page.count("<img") == 2 * 2
    assert page.count("A smoke run") == 3
    assert page.count("0.30x to 0.50x") == 6
    assert page.count("a &lt;room&gt;") == 6


@pytest.mark.parametrize(
    ("given", "agrees", "ours", "paper"),
    [
        (Statement("", 1.2, (1.68,)), True, "1.20x", "1.68x"),
        (Statement("", 0.9), False, "0.90x", "more"),
        (Statement("", 0.9, is_more=False), True, "0.90x", "less"),
        (Statement("", None, (1.5,)), None, "-", "1.50x"),
        (Statement("", 1.0), False, "1.00x", "more"),
        (Statement("", -3, (30.1,), "points", 0), False, "-3.0 points", "+30.1 points"),
    ],
)
def test_statements_say_which_way(given: Statement, agrees: bool | None, ours: str, paper: str) -> None:
    found = given.to_json()
    assert (found["agrees"], found["ours_text"], found["paper_text"]) == (agrees, ours, paper)


def test_what_is_reproduced_of_patchedserve() -> None:
    def keys(pipeline: str) -> list[str]:
        return [each.key for each in PATCHEDSERVE.chosen((), (), pipeline)]

    common = ["figure-4", "figure-5", "figure-11", "figure-14", "figure-15", "table-1", "table-2"]
    assert sorted(keys(SDXL)) == sorted([*common, "figure-12"])
    assert sorted(keys(SD3)) == sorted([*common, "figure-13"])
    assert [each.key for each in PATCHEDSERVE.chosen((14, 4), (2,), SDXL)] == ["figure-4", "figure-14", "table-2"]
    with pytest.raises(UsageError, match="--table is 3, but it must be one of 1, 2"):
        PATCHEDSERVE.chosen((), (3,), SDXL)
    with pytest.raises(UsageError, match=f"--figure 13 is of models with a {SD3}, but the model has a {SDXL}"):
        PATCHEDSERVE.chosen((13,), (), SDXL)


def test_a_picture_is_drawn_in_the_colours_of_all() -> None:
    pixels = np.array(Image.open(io.BytesIO(exhibit(3).picture({"ours": {"bar": 3}}))).convert("RGB"))
    colours = {"#" + bytes(colour).hex() for colour in np.unique(pixels.reshape(-1, 3), axis=0)}
    assert {THEME.background, THEME.series[0]} <= colours
