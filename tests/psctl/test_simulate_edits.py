"""`psctl simulate --edits`: the command's results equal the simulator's with a profile's lines; and bad input."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from patchedserve.data.edits import active_share, latent_mask
from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request, TracedEdit
from patchedserve.data.resolution import Resolution
from patchedserve.data.tables.latency import LatencyTable, write_latencies
from patchedserve.data.tables.schemas import RECORDS, STEPS, read_rows
from patchedserve.data.traces.edits import mask_of
from patchedserve.data.traces.files import load_trace
from patchedserve.data.work import Work
from patchedserve.data.workspace import Workspace
from patchedserve.psctl.app import main
from patchedserve.serving.editing.costs import EditCosts, MaskShares, profiled_edits
from patchedserve.serving.editing.profile import EditProfile, Fit
from patchedserve.serving.families.geometry import Geometry
from patchedserve.serving.models.loading import model_geometry
from patchedserve.serving.runs.step_file import StepFile, load_step_file
from patchedserve.serving.scheduling.policies import get_policy
from patchedserve.serving.scheduling.step_latency import TableLatency
from patchedserve.serving.simulator.simulator import simulate

from ..support.latency_tables import CIRCUMSTANCES, SIZES, law_rows

TABLE = "combination,ms\n128x128,20\n256x256,30\n128x128 + 256x256,40\n8*128x128 + 8*256x256,200\n"
LINE = Fit((0.004, 0.001, 0.002, 0.02, 0.004), 3, 0.02, 0.99)
FIRST = Fit((0.006, 0.001, 0.002, 0.02, 0.004), 3, 0.02, 0.99)
LOAD = Fit((0.01, 2e-9), 3, 0.05, 0.9)
PROFILE = EditProfile(CIRCUMSTANCES, "all", 0.6, LINE, FIRST, LOAD, 150.0, {}, (), ())
BASE = ("--latency", "table.csv", "--resolutions", "128,256", "--policy", "continuous", "--json", "--quiet")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").write_text(TABLE)
    PROFILE.write(Workspace().for_model("emoji-xl", "cpu").tables / "edits-0.json")
    return tmp_path


def summary_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code = main(["simulate", *BASE, *arguments])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)


def records_of(summary: dict[str, Any]) -> list[dict[str, Any]]:
    return read_rows(Path(summary["run_dir"]) / "records.parquet", RECORDS)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_run_follows_the_profile(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = ("--edits", "0.7", "--mask-ratios", "public", "--templates", "5", "--num-prompts", "60")
    served = (*drawn, "--request-rate", "6", "--gpus", "3", "--router", "mask-aware", "--max-batch-size", "4")
    summary = summary_of(capsys, *served, "--num-inference-steps", "8")
    assert summary["config"]["edits"]["share"] == 0.7
    assert summary["config"]["edit_profile"].endswith("edits-0.json")
    requests = load_trace(Path(summary["run_dir"]) / "trace.jsonl")
    edits = [request for request in requests if request.traced is not None]
    assert 25 < len(edits) < 60
    # Computed by hand: shares of emoji-xl, whose cells are 4 latents of 8 pixels, and lines in addition to the table.
    shares = {each.request_id: active_share(latent_mask(mask_of(each), 8), 4) for each in edits}
    shares = {number: share if share <= 0.6 else 1.0 for number, share in shares.items()}
    by_hand = EditCosts(
        lambda request: shares.get(request.request_id, 1.0),
        lambda record: 150.0 * record.resolution.pixels * record.num_inference_steps,
        lambda size: 0.01 + 2e-9 * size,
    )
    latency = PROFILE.steady_latency(load_step_file(folder / "table.csv").steady)
    result = simulate(
        requests,
        get_policy("continuous"),
        latency,
        max_batch_size=4,
        num_gpus=3,
        router="mask-aware",
        edits=by_hand,
    )
    records = records_of(summary)
    assert [each["finish_s"] for each in records] == [record.finish_s for record in result.records]
    assert [each["active_share"] for each in records] == [record.active_share for record in result.records]
    assert {each["reused"] for each in records} == {True, False, None}
    steps = read_rows(Path(summary["run_dir"]) / "steps.parquet", STEPS)
    assert len(steps) > 20
    # Edits that are computed whole are slower, and other routers distribute requests differently.
    others = summary_of(capsys, *served[:-4], "--router", "least-requests", "--max-batch-size", "4")
    assert others["requests_per_gpu"] != summary["requests_per_gpu"]


def test_first_steps_of_edits_take_longer() -> None:
    size, part = SIZES[0], Work(256, 256, 0.25)
    table = StepFile(TableLatency({(size,): 0.02}), TableLatency({(size,): 0.03}), CIRCUMSTANCES)
    steps = table.with_edits(PROFILE).of("patched")
    assert steps.policy_latency.step_latency_s((size, part)) == pytest.approx(
        0.02 + 0.004 + 0.001 + 0.002 + 0.25 * 0.024
    )
    assert steps.extra_s((part,), {part.resolution}) == pytest.approx(0.002)
    assert steps.extra_s((size, part), {size}) == pytest.approx(0.012)
    assert table._replace(first=None).with_edits(PROFILE).of("patched").extra_s((part,), {part.resolution}) == 0.0


@pytest.mark.slow
def test_slo_of_an_edit_equals_that_of_a_new_image(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ("--num-prompts", "8", "--slo-scale", "3", "--num-inference-steps", "4")
    edits, images = (records_of(summary_of(capsys, *base, *more)) for more in (("--edits", "1"), ()))
    assert [each["slo_s"] for each in edits] == [each["slo_s"] for each in images]
    assert all(each["reused"] is not None for each in edits)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_profile_has_no_effect_without_edits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--num-prompts", "40", "--request-rate", "5", "--gpus", "2")
    with_profile = records_of(summary_of(capsys, *arguments))
    next(folder.rglob("edits-0.json")).unlink()
    summary = summary_of(capsys, *arguments)
    assert records_of(summary) == with_profile
    assert not {"edits", "edit_profile"} & set(summary["config"])


@pytest.mark.exhaustive
@pytest.mark.slow
def test_trace_files_with_edits_and_searches(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = summary_of(capsys, "--edits", "1", "--num-prompts", "20", "--request-rate", "5", "--edit-strength", "0.5")
    profile = str(next(folder.rglob("edits-0.json")))
    trace = str(Path(first["run_dir"]) / "trace.jsonl")
    again = summary_of(capsys, "--trace", trace, "--edit-profile", profile)
    assert [each["finish_s"] for each in records_of(again)] == [each["finish_s"] for each in records_of(first)]
    rates = [
        summary_of(capsys, *edits, "--num-prompts", "60", "--slo-target", "0.9", "--num-inference-steps", "8")
        for edits in ((), ("--edits", "1", "--mask-ratios", "production"))
    ]
    whole, parts = (each["highest_request_rate"] for each in rates)
    assert parts > whole


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--edits", "1", "--model", "emoji-3"), "there is no profile of edits of emoji-3 in"),
        (("--edits", "1", "--system", "bucketed"), "edits read records on the patched engine only, and bucketed runs"),
        (("--edits", "2"), "--edits is 2, but it must be a share"),
        (("--mask-ratios", "public"), "there are none: add --edits"),
        (("--edit-profile", "table.csv"), "--edit-profile is of edits, and the trace has none"),
        (("--edits", "1", "--edit-profile", "table.csv"), "table.csv: not valid JSON"),
        (("--edits", "1", "--edit-profile", "none.json"), "none.json"),
        (("--edits", "1", "--edit-strength", "0.01"), "strength is 0.01, but with 30 steps it must be at least 0.034"),
        (
            ("--edits", "1", "--latency", "other.parquet"),
            "does not go with the step latencies: it is for dtype float32,",
        ),
    ],
)
def test_bad_usage_gives_a_one_line_error(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    other = replace(CIRCUMSTANCES, dtype="bfloat16")
    write_latencies(folder / "other.parquet", LatencyTable(tuple(law_rows(60)), other, {}))
    code = main(["simulate", *BASE, *arguments])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_shares_equal_those_of_the_engine(tmp_path: Path) -> None:
    geometry, size = model_geometry("emoji-xl"), Resolution(256, 256)

    def share(geometry: Geometry = geometry, size: Resolution = size, **of_edit: Any) -> float:
        edit = TracedEdit(**{"image": "emoji:0", "mask": "box:1", "mask_ratio": 0.1} | of_edit)
        return MaskShares(geometry, 0.6)(Request(0, "", size, 10, traced=edit))

    drawn = mask_of(Request(0, "", size, traced=TracedEdit("emoji:0", "box:1", 0.1)))
    assert share() == active_share(latent_mask(drawn, 8), 4)
    assert share(strength=0.5) == share()
    # The engine computes whole: large masks, parts of cells, and edits that add noise to their image at the first step.
    assert share(mask_ratio=0.9) == 1.0
    assert share(size=Resolution(256, 264)) == 1.0
    rounded = Geometry.of_transformer(8, 2)
    assert share(rounded, strength=0.95) == 1.0
    assert share(rounded, strength=0.9) < 0.6
    assert share(geometry, strength=0.95) == share()
    Image.new("L", (128, 128), 255).save(tmp_path / "mask.png")
    with pytest.raises(UsageError, match="request 0: the mask has 128x128 pixels, but its image 256x256"):
        share(mask=str(tmp_path / "mask.png"))
    assert profiled_edits(PROFILE, geometry).load_s(1e9) == pytest.approx(2.01)
