"""The report of a serve run: plots, image grid, HTML."""

import base64
import io
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from selenium.webdriver.common.by import By

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.data.tables.schemas import RECORDS, STEPS, read_rows, write_table
from patchedserve.profiling.report.grid import CAPTION_LINES, GAP_PX, _font, image_grid, wrap
from patchedserve.profiling.report.html import write_report
from patchedserve.profiling.report.plots import PLOTS
from patchedserve.profiling.report.run_data import RunData, count_open
from patchedserve.profiling.report.theme import series_colours
from patchedserve.serving.core.metrics import summarize
from patchedserve.serving.core.request_state import RequestRecord
from patchedserve.serving.core.step_row import StepRow

from ...support.browser import opened_browser

SIZES = (Resolution(128, 128), Resolution(192, 192), Resolution(256, 256))
STANDALONE_S = {SIZES[0]: 0.55, SIZES[1]: 0.8, SIZES[2]: 1.1}


def simulate(num_requests: int, *, rate: float = 4.0, steps: int = 20, seed: int = 0):
    """Serve random arrivals on a virtual clock, first come, first served, up to 8 at a time; return all records."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, num_requests))
    records, queue = [], []
    for i, arrival in enumerate(arrivals):
        size = SIZES[rng.choice(3, p=(0.5, 0.3, 0.2))]
        request = Request(i, f"a fox number {i}", size, steps, arrival_s=float(arrival), slo_s=4 * STANDALONE_S[size])
        records.append(RequestRecord.of(request))
    queue, active, rows, now = list(records), {}, [], 0.0
    while queue or active:
        while queue and queue[0].arrival_s <= now and len(active) < 8:
            record = queue.pop(0)
            record.prepare_start_s, record.prepare_end_s, record.admitted_s = record.arrival_s, now, now
            if record.request_id % 29 == 13:
                record.close("discarded" if record.request_id % 2 else "failed", now, "cannot meet its deadline <3 s>")
            else:
                active[record.request_id] = [record, steps]
        if not active:
            now = queue[0].arrival_s if queue else now
            continue
        counts = Counter(str(record.resolution) for record, _ in active.values())
        cost = {str(size): value / steps for size, value in STANDALONE_S.items()}
        duration = sum(cost[name] * (0.6 + 0.4 * count) for name, count in counts.items()) * rng.uniform(0.95, 1.1)
        waiting = sum(record.arrival_s <= now for record in queue)
        rows.append(StepRow(len(rows), now, duration, len(active), waiting, dict(counts), 1e-4))
        now += duration
        for item in list(active.values()):
            item[1] -= 1
            if not item[1]:
                item[0].denoise_end_s = now
                item[0].close("completed", now + 0.05)
                del active[item[0].request_id]
    return records, rows, now


def report_of(folder: Path, records: list[RequestRecord], steps: list[StepRow], images=(), **extra: Any) -> str:
    duration = max((record.finish_s or 0.0 for record in records), default=0.0)
    summary = summarize(records, duration, slo_scale=4.0, model="emoji-xl", dataset="poisson") | extra
    path = write_report(folder, summary, records, steps, images=images)
    assert path == folder / "report.html"
    return path.read_text(encoding="utf-8")


class _Page(HTMLParser):
    """Parser that collects the tags and checks that they are nested and closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.links += [value or "" for name, value in attrs if name in ("src", "srcset", "href")]
        if tag not in ("meta", "img", "source", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.slow
def test_report_is_one_file_without_scripts_and_network(tmp_path: Path) -> None:
    records, steps, _ = simulate(40)
    image = Image.new("RGB", (300, 200), "red")
    image.save(tmp_path / "0.png")
    images = [(tmp_path / "0.png", "from a file"), (image, '<b>"quoted" & bold</b>'), (tmp_path / "no.png", "missing")]
    config = {"policy": "bucketed", "mix": {"128x128": 0.5}, "seed": None, "resolutions": ["128x128", "192x192"]}
    text = report_of(tmp_path / "run", records, steps, images, config=config)
    page = _Page(text)

    assert page.tags["script"] == 0
    assert page.tags["link"] == 0
    assert page.links
    assert all(link.startswith("data:image/png;base64,") for link in page.links)
    # Every plot is on the page and in a file.
    assert page.tags["img"] == len(PLOTS) + 2
    assert sorted(path.stem for path in (tmp_path / "run" / "plots").iterdir()) == sorted(PLOTS)
    light = base64.b64decode(page.links[0].removeprefix("data:image/png;base64,"))
    assert (tmp_path / "run" / "plots" / "arrivals.png").read_bytes() == light

    assert "&lt;b&gt;&#34;quoted&#34; &amp; bold&lt;/b&gt;" in text
    assert "no.png cannot be read" in text
    assert "cannot meet its deadline &lt;3 s&gt;" in text
    assert re.search(r"<small>1 (failed|discarded)", text)
    assert "128x128: 0.5" in text
    assert "bucketed" in text
    shown = Image.open(io.BytesIO(base64.b64decode(page.links[-1].removeprefix("data:image/png;base64,"))))
    assert shown.size == (256, 171)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_report_of_tables_read_from_parquet_is_the_same(tmp_path: Path) -> None:
    records, steps, duration = simulate(12)
    write_table(tmp_path / "records.parquet", RECORDS, [record.to_row() for record in records])
    write_table(tmp_path / "steps.parquet", STEPS, [row.to_row() for row in steps])
    summary = summarize(records, duration, slo_scale=4.0, model="m", dataset="d")
    stored = [RequestRecord.from_row(row) for row in read_rows(tmp_path / "records.parquet", RECORDS)]
    rows = [StepRow(**row) for row in read_rows(tmp_path / "steps.parquet", STEPS)]
    rows = [replace(row, resolutions=dict(row.resolutions)) for row in rows]
    first = write_report(tmp_path / "a", summary, stored, rows).read_bytes()
    again = write_report(tmp_path / "b", summary, records, steps).read_bytes()
    assert first == again


@pytest.mark.exhaustive
@pytest.mark.slow
def test_plots_follow_the_dark_color_scheme(tmp_path: Path) -> None:
    report_of(tmp_path, *simulate(12)[:2])
    with opened_browser() as browser:
        shown = {}
        for scheme in ("light", "dark"):
            wanted = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)
            browser.get((tmp_path / "report.html").as_uri())
            plot = browser.find_element(By.CSS_SELECTOR, ".plots img")
            shown[scheme] = np.array(Image.open(io.BytesIO(plot.screenshot_as_png)).convert("RGB"))
    ground = {scheme: np.median(pixels, (0, 1)) for scheme, pixels in shown.items()}
    assert ground["light"].tolist() == [255, 255, 255]
    # The background is that of the card, and the plot is brighter.
    assert ground["dark"].tolist() == [0x16, 0x1B, 0x26]
    assert shown["dark"].min() >= 0x16


def test_report_of_an_empty_run_states_it(tmp_path: Path) -> None:
    text = report_of(tmp_path, [], [])
    assert "no requests" in text
    assert _Page(text).tags["img"] == 0


@pytest.mark.slow
def test_report_without_completed_requests_gives_the_reasons(tmp_path: Path) -> None:
    records = [RequestRecord.of(Request(i, "a <fox>", SIZES[0], arrival_s=i * 0.5)) for i in range(3)]
    records[0].close("failed", 1.0, "out of memory")
    records[1].close("cancelled", 1.2)
    records[2].close("discarded", 1.5, "too late")
    text = report_of(tmp_path, records, [])
    assert "No request was completed" in text
    assert "out of memory" in text
    assert "a &lt;fox&gt;" in text
    # Plots that need images, SLOs or steps are left out; those of the requests are still drawn.
    assert {path.stem for path in (tmp_path / "plots").iterdir()} == {"arrivals", "queue", "timeline"}


@pytest.mark.slow
def test_report_of_one_request_at_time_zero(tmp_path: Path) -> None:
    record = RequestRecord.of(Request(0, "a fox", SIZES[0], 1))
    record.admitted_s, record.denoise_end_s = 0.0, 0.0
    record.close("completed", 0.0)
    step = StepRow(0, 0.0, 0.0, 1, 0, {"128x128": 1})
    assert _Page(report_of(tmp_path, [record], [step])).tags["img"] == len(PLOTS) - 1  # no SLO, no attainment


def test_timeline_is_omitted_for_too_many_requests() -> None:
    records, steps, duration = simulate(201, steps=2)
    data = RunData.of(duration, records, steps)
    assert PLOTS["timeline"][0](data) is None


def test_plots_show_the_numbers_of_the_tables() -> None:
    records, steps, duration = simulate(60)
    data = RunData.of(duration, records, steps)

    arrivals = PLOTS["arrivals"][0](data)
    assert arrivals is not None
    heights = [bar.get_height() * bar.get_width() / 0.9 for bar in arrivals.axes[0].patches]  # type: ignore[attr-defined]
    assert sum(heights) == pytest.approx(60)

    attainment = PLOTS["attainment"][0](data)
    assert attainment is not None
    texts = [text.get_text() for text in attainment.axes[0].texts]
    met = sum(record.slo_met is True for record in records)
    assert texts[-2:] == [f"{met / 60:.1%}", f"{met} of 60"]

    times, curves = data.composition()
    assert (np.diff(times) >= 0).all()
    for row in steps:  # in the middle of each step, the curves must show its batch
        place = np.searchsorted(times, row.start_s + row.duration_s / 2, side="right") - 1
        assert {name: curve[place] for name, curve in curves.items() if curve[place]} == row.resolutions


def test_composition_is_empty_in_pauses_but_not_between_steps() -> None:
    steps = [
        StepRow(0, 0.0, 0.1, 2, 0, {"128x128": 2}),
        StepRow(1, 0.11, 0.1, 1, 0, {"128x128": 1}),
        StepRow(2, 5.0, 0.1, 1, 0, {"128x128": 1}),
    ]
    record = RequestRecord.of(Request(0, "", SIZES[0]))
    record.close("completed", 5.1)
    times, curves = RunData.of(5.1, [record], steps).composition()
    assert times == pytest.approx([0.0, 0.11, 0.21, 5.0, 5.1])
    assert curves["128x128"].tolist() == [2, 1, 0, 1, 0]


def test_count_open_counts_half_open_spans() -> None:
    times, counts = count_open([(1.0, 3.0), (2.0, 3.0), (3.0, 4.0), (5.0, 5.0)])
    assert times.tolist() == [0, 1, 2, 3, 4, 5]
    assert counts.tolist() == [0, 1, 2, 1, 0, 0]
    assert count_open([])[1].tolist() == [0]


@pytest.mark.parametrize("count", [1, 8, 30])
def test_every_resolution_has_a_distinct_colour(count: int) -> None:
    names = [str(i) for i in range(count)]
    colours = series_colours(names)
    assert list(colours) == names
    assert len(set(colours.values())) == count


def test_image_grid_places_images_in_reading_order() -> None:
    images = [Image.new("RGB", (16, 16), colour) for colour in ("red", "lime", "blue")]
    grid = image_grid(images, columns=2, cell_px=32)
    assert grid.size == (2 * (32 + GAP_PX) + GAP_PX, 2 * (32 + GAP_PX) + GAP_PX)
    centre, step = GAP_PX + 16, 32 + GAP_PX
    assert grid.getpixel((centre, centre)) == (255, 0, 0)
    assert grid.getpixel((centre + step, centre)) == (0, 255, 0)
    assert grid.getpixel((centre, centre + step)) == (0, 0, 255)
    assert grid.getpixel((centre + step, centre + step)) == (255, 255, 255)


def test_image_grid_keeps_pixels_and_aspect_ratio() -> None:
    wide = Image.new("RGBA", (64, 32), (255, 0, 0, 255))
    grid = np.asarray(image_grid([wide], cell_px=64))
    red = (grid == (255, 0, 0)).all(axis=-1)
    assert red.sum() == 64 * 32
    shrunk = np.asarray(image_grid([Image.new("RGB", (400, 100), "red")], cell_px=100))
    assert (shrunk == (255, 0, 0)).all(axis=-1).sum() == 100 * 25


def test_captions_are_wrapped_and_truncated_to_the_cell() -> None:
    font = _font(12)
    lines = wrap("a very long caption about two foxes and a candle on a green background", font, 100)
    assert len(lines) == CAPTION_LINES
    assert lines[-1].endswith("…")
    assert all(font.getlength(line) <= 100 for line in lines)
    assert wrap("a fox", font, 100) == ["a fox"]
    assert wrap("", font, 100) == []
    assert font.getlength(wrap("x" * 80, font, 100)[0]) <= 100
    plain, captioned = (image_grid([Image.new("RGB", (32, 32))], text) for text in (None, ["a fox"]))
    assert captioned.height > plain.height


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"images": []}, "at least one image"),
        ({"captions": ["a", "b"]}, "2 captions were given for 1 images"),
        ({"columns": 0}, "0 columns"),
        ({"cell_px": 8}, "8 px"),
    ],
)
def test_image_grid_refuses_invalid_layouts(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        image_grid(**{"images": [Image.new("RGB", (8, 8))], **arguments})
