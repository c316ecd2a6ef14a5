"""Tables of `psctl eval report` from evaluations and comparisons, and the results that belong together."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.eval.compare.comparison import Comparison
from patchedserve.eval.report.gather import gather
from patchedserve.eval.report.render import write_quality_report
from patchedserve.eval.report.tables import ReportFigure, tables_of
from patchedserve.serving.cache.options import CacheOptions

from ...support.report_cases import (
    CLIP,
    SHA,
    TRUTH,
    comparison_of,
    image_set,
    metric,
    results_of,
    settings_of,
    table,
    values,
)


def test_cells_equal_the_measured_figures(tmp_path: Path) -> None:
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
        assert isinstance(cell, ReportFigure)
        assert (cell.low, cell.high, cell.n) == (9.5, 11.5, 4)
        assert cell.judge is not None
        assert cell.judge.weights_sha256 == SHA["clip" if key == "clip_score" else "fid"]
    quality = table(tables, "quality")
    assert quality.missing == {}
    assert values(quality.rows[0]) == {
        "model": "tiny",
        "dataset": "emoji",
        "steps": "2",
        "method": "Original",
        "psnr_original": None,
        "lpips_original": None,
        "lpips_truth": 0.1,
        "fid_original": None,
        "fid_truth": 10,
        "saved": None,
    }
    row = values(quality.rows[2])
    assert row["method"] == "PatchedServe, cache patch (threshold 0.3)"
    names = ("psnr_original", "lpips_original", "lpips_truth", "fid_original", "fid_truth", "saved")
    assert [row[name] for name in names] == [30, 0.5, 0.3, 7, 30, 0.25]
    assert len(quality.rows) == 5
    assert quality.references == [TRUTH, "coco:/data/coco/captions.json"]


def test_missing_figures_say_how_to_measure_them(tmp_path: Path) -> None:
    ours = results_of(tmp_path / "ours.json", "patched", [metric(CLIP, 20)], resolutions=["40x32"])
    tables = tables_of(gather([ours], on_warning=pytest.fail))
    row = table(tables, "clip_score").rows[0]
    assert (row["original"], values(row)["ours"], row["difference"]) == (None, 20, None)
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
    # The printed command reproduces the drawn set and can be run unchanged, according to the command's own parser.
    from patchedserve.psctl.app import command_tree

    command = command_tree().commands["eval"].commands["compare"]
    parsed = command.make_context("compare", drawing.split()[3:]).params
    assert (parsed["model"], parsed["num_prompts"], parsed["resolutions"]) == ("tiny", 4, "40x32")

    # If the images exist, the command compares those, and results of both sides share a row.
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
    # The command includes the options of a cache.
    cached = results_of(tmp_path / "c.json", "patched", [metric(CLIP, 20)])
    content = json.loads(cached.read_text())
    content["settings"] |= {
        "cache": CacheOptions("patch", 0.25, patch_size=8, max_reuse=2).identity(),
        "max_batch_size": 3,
    }
    cached.write_text(json.dumps(content))
    (command_line,) = table(tables_of(gather([cached], on_warning=pytest.fail)), "clip_score").missing
    assert "--cache patch --cache-patch-size 8 --cache-interval 3 --max-reuse 2" in command_line
    assert command_line.endswith("--max-batch-size 3 --cache-threshold 0.25")


def test_sides_with_equal_labels_show_their_differing_settings(tmp_path: Path) -> None:
    paths = [
        comparison_of(tmp_path, f"c{reuse}", cache=CacheOptions("patch", 0.3, max_reuse=reuse)) for reuse in (2, 3)
    ]
    rows = table(tables_of(gather(paths, on_warning=lambda _: None)), "fid").rows
    label = "PatchedServe, cache patch (threshold 0.3), cache.max_reuse"
    assert [row["method"] for row in rows] == [f"{label} 2", f"{label} 3"]


def test_later_of_two_figures_is_used_and_noted(tmp_path: Path) -> None:
    first = results_of(tmp_path / "a.json", "patched", [metric("fid", 20), metric("lpips", 0.5)])
    second = results_of(tmp_path / "b.json", "patched", [metric("fid", 21)])
    warnings: list[str] = []
    (subject,) = gather([first, second], on_warning=warnings.append)
    assert {name: each.value for name, each in subject.ours[0].metrics.items()} == {"fid": 21, "lpips": 0.5}
    assert warnings == [f"tiny on emoji: fid was measured twice; {second} counts"]


def test_newest_results_of_a_workspace_are_used(tmp_path: Path) -> None:
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


def test_ground_truth_is_shown_only_beside_figures_against_data_set_images(tmp_path: Path) -> None:
    elsewhere = "/data/originals"
    names = ("fid", "lpips", "psnr")
    right = results_of(tmp_path / "right.json", "patched", [metric("fid", 20), metric(CLIP, 30)])
    # `psctl eval fid --generated OURS --reference ORIGINALS`: the settings name the folder.
    wrong = [replace(metric(name, 3), details={}) for name in names]
    folder = results_of(tmp_path / "wrong.json", "patched", [*wrong, metric(CLIP, 31)], reference=elsewhere)
    message = (
        f"wrong.json: fid, lpips, psnr are against {elsewhere}, but columns w/ G.T. hold figures against the images"
    )
    with pytest.raises(UsageError, match=message):
        gather([right, folder], on_warning=pytest.fail)
    warnings: list[str] = []
    (subject,) = gather([right, folder], on_warning=warnings.append, is_strict=False)
    (ours,) = subject.ours
    assert {name: each.value for name, each in ours.metrics.items()} == {"fid": 20, CLIP: 31}
    assert warnings[0].startswith("left out: ")
    assert message in warnings[0]
    # In a comparison with --reference, the paired difference is removed, too; figures between the two sides stay.
    path = comparison_of(tmp_path, "compared")
    compared = Comparison.load(path)
    for side in (compared.first, compared.second):
        side.metrics["fid"] = metric("fid", 1, reference=elsewhere)
    compared.save(path)
    (subject,) = gather([path], on_warning=lambda _: None, is_strict=False)
    assert [set(side.metrics) for side in subject.sides] == [{CLIP, "lpips"}, {CLIP, "lpips"}]
    assert set(subject.ours[0].differences) == {CLIP}
    assert set(subject.ours[0].to_original) == {"psnr", "lpips", "fid_to_first"}
    # Captions without images have only the given folder as reference; the newest result counts.
    captions = [
        results_of(tmp_path / f"{i}.json", engine, [metric("fid", i, reference=reference)], dataset="captions:c.csv")
        for i, (engine, reference) in enumerate([("plain", "/old"), ("patched", elsewhere), ("plain", elsewhere)])
    ]
    warnings.clear()
    (subject,) = gather(captions, on_warning=warnings.append, is_strict=False)
    assert [side.metrics["fid"].value for side in subject.sides] == [2, 1]
    assert len(warnings) == 1
    assert "fid are against /old, but" in warnings[0]
    assert len(gather(captions[1:], on_warning=pytest.fail)[0].sides) == 2


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
def test_incompatible_results_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    first = results_of(tmp_path / "a.json", "plain", [metric("fid", 1)])
    second = results_of(tmp_path / "b.json", "patched", [metric("fid", 2)], **change)
    with pytest.raises(UsageError, match=message):
        gather([first, second], on_warning=pytest.fail)


def test_comparisons_other_than_plain_and_patched_are_refused(tmp_path: Path) -> None:
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
