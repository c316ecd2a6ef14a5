"""A paper's exhibits: measured once, stored with their settings, drawn, and shown on one page."""

import html
import io
import json
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from patchedserve.data.errors import UsageError
from patchedserve.data.statistics import Estimate
from patchedserve.eval.reproduce.paper import INDEX_FILE, SD3, SDXL, Exhibit, Measurement, Paper, reproduce, write_index
from patchedserve.eval.reproduce.patchedserve import PATCHEDSERVE
from patchedserve.eval.reproduce.statement import VERDICTS, Statement
from patchedserve.profiling.report.table import Table
from patchedserve.profiling.report.theme import THEME, new_figure

SETTINGS = {"model": "tiny", "seed": 0, "is_quick": False}


class FakeLab:
    """Stand-in for a lab: has a folder and counts the measurements."""

    def __init__(self, stop_at: int = 0) -> None:
        self.stop_at, self.measured = stop_at, list[int]()

    def circumstances(self) -> dict[str, Any]:
        return {"described": "a <room>"}


def exhibit(number: int, kind: Any = "figure", pipelines: tuple[str, ...] = ()) -> Exhibit:
    def measure(lab: Any, settings: Mapping[str, Any]) -> Measurement:
        if lab.stop_at == number:
            raise KeyboardInterrupt
        lab.measured.append(number)
        ours = Estimate(1 + number / 10, 1 + number / 20, 1 + number / 5)
        return Measurement({"bar": number}, [Statement("ours against theirs", ours, (1.1, 1.5))])

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


def run(folder: Path, lab: FakeLab, settings: Mapping[str, Any] = SETTINGS) -> Any:
    return reproduce(PAPER, [(each, settings) for each in PAPER.exhibits], lambda: lab, folder)  # type: ignore[arg-type, return-value]


def test_finished_exhibits_are_not_measured_again(tmp_path: Path) -> None:
    lab = FakeLab(stop_at=20)
    outcome = run(tmp_path / "tiny", lab)
    assert (outcome.was_interrupted, outcome.measured) == (True, ["figure-1"])
    assert {path.name for path in (tmp_path / "tiny").iterdir()} == {
        "figure-1.json",
        "figure-1.png",
    }

    lab.stop_at = 0
    outcome = run(tmp_path / "tiny", lab)
    assert (outcome.was_interrupted, outcome.measured) == (False, ["figure-20", "table-2"])
    assert lab.measured == [1, 20, 2]
    files = [json.loads((tmp_path / "tiny" / f"{each.key}.json").read_text()) for each in PAPER.exhibits]
    assert [each["statements"][0]["verdict"] for each in files] == ["agrees", "same way only", "agrees"]
    assert outcome.verdicts["tiny"] == {"agrees": 2, "same way only": 1, "differs": 0, "cannot be told": 0}
    assert files[0]["settings"] == SETTINGS
    assert "| 2 |" in (tmp_path / "tiny" / "table-2.md").read_text()

    with pytest.raises(
        UsageError, match=r"figure-1\.json was made with seed 0, but it is 1 now: give another --output-d"
    ):
        run(tmp_path / "tiny", lab, {**SETTINGS, "seed": 1})
    assert lab.measured == [1, 20, 2]


def test_interrupt_before_the_first_exhibit_propagates(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "tiny", FakeLab(stop_at=1))


def test_the_page_shows_all_models(tmp_path: Path) -> None:
    run(tmp_path / "one", FakeLab())
    page = run(tmp_path / "two", FakeLab(), {**SETTINGS, "is_quick": True}).index.read_text()
    assert page.count("<img") == 2 * 2
    assert page.count("A smoke run") == 3
    assert page.count("1.10x to 1.50x") == 6
    assert "within a factor of 2 of the paper" in page
    counts = {row[0]: row[1:] for row in re.findall(r"<tr><td>(\w+)</td>" + 4 * r'<td class="number">(\d)</td>', page)}
    assert counts == {"one": ("2", "1", "0", "0"), "two": ("2", "1", "0", "0"), "all": ("4", "2", "0", "0")}
    assert page.count("a &lt;room&gt;") == 6


def test_files_of_older_versions_are_read(tmp_path: Path) -> None:
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "reproduce"
    shutil.copytree(results, tmp_path / "old")
    read = [json.loads(path.read_text()) for path in results.glob("*/*.json")]
    # An old statement is a number without an interval, so that nothing can be told.
    old = [each for result in read if result["version"] == 1 for each in result["statements"]]
    new = Counter(each["verdict"] for result in read if result["version"] > 1 for each in result["statements"])
    assert old
    counts = write_index(PATCHEDSERVE, tmp_path / "old")
    assert set(counts) == {"emoji-3", "emoji-xl", "all"}
    untold = len(old) + new["cannot be told"]
    assert counts["all"] == {**{verdict: new[verdict] for verdict in VERDICTS}, "cannot be told": untold}
    page = (tmp_path / "old" / INDEX_FILE).read_text()
    assert page.count("<td>cannot be told</td>") + page.count('<td class="number">cannot be told</td>') == untold
    assert all(each["text"] in html.unescape(page) for each in old)


def test_exhibits_of_patchedserve_can_be_selected() -> None:
    def keys(pipeline: str) -> list[str]:
        return [each.key for each in PATCHEDSERVE.select((), (), pipeline)]

    common = ["figure-4", "figure-5", "figure-11", "figure-14", "figure-15", "table-1", "table-2"]
    assert sorted(keys(SDXL)) == sorted([*common, "figure-12"])
    assert sorted(keys(SD3)) == sorted([*common, "figure-13"])
    assert [each.key for each in PATCHEDSERVE.select((14, 4), (2,), SDXL)] == ["figure-4", "figure-14", "table-2"]
    with pytest.raises(UsageError, match="--table is 3, but it must be one of 1, 2"):
        PATCHEDSERVE.select((), (3,), SDXL)
    with pytest.raises(UsageError, match=f"--figure 13 is of models with a {SD3}, but the model has a {SDXL}"):
        PATCHEDSERVE.select((13,), (), SDXL)


def test_figures_use_the_common_colours() -> None:
    pixels = np.array(Image.open(io.BytesIO(exhibit(3).picture({"ours": {"bar": 3}}))).convert("RGB"))
    colours = {"#" + bytes(colour).hex() for colour in np.unique(pixels.reshape(-1, 3), axis=0)}
    assert {THEME.background, THEME.series[0]} <= colours
