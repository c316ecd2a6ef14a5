"""`psctl bench slo` as users run it: in the simulator, resumed, and with bad input."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from PIL import Image

from patchedserve.data.statistics import wilson_interval
from patchedserve.data.tables.latency import LatencyTable, write_latencies
from patchedserve.data.tables.schemas import RECORDS, read_rows
from patchedserve.psctl.app import main
from patchedserve.serving.simulator.simulator import simulate

from ..conftest import RunPsctl
from ..support.latency_tables import law_rows

TABLE = "combination,ms\n128x128,20\n256x256,30\n128x128 + 256x256,40\n8*128x128 + 8*256x256,200\n"


FAST = ("--rates", "1,4", "--num-prompts", "30", "--num-inference-steps", "10", "--resolutions", "128,256")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").write_text(TABLE)
    return tmp_path


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(folder: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run the command in this process: the simulator loads no model."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        code = main(["bench", "slo", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def result_of(call: tuple[int, str, str]) -> dict[str, Any]:
    code, out, err = call
    assert code == 0, err
    return json.loads(out)


def errors_of(err: str) -> list[str]:
    """Return the lines of stderr without the warning that every simulation with one table prints."""
    return [line for line in err.splitlines() if not line.startswith("Warning: no --plain-latency")]


SIMULATED = ("--on", "simulator", "--latency", "table.csv", "--json", "--quiet")


@pytest.mark.slow
def test_figures_match_the_records(bench: Call, folder: Path) -> None:
    policies = ("bucketed", "patchedserve", "distrifusion-fcfs")
    options = ("--systems", ",".join(policies), "--num-seeds", "2", "--output-file", "r.json")
    result = result_of(bench(*SIMULATED, *FAST, *options))
    run_dir = Path(result["run_dir"])
    assert json.loads((folder / "r.json").read_text()) == json.loads((run_dir / "result.json").read_text()) == result
    assert (result["num_runs"], result["num_finished"]) == (12, 12)
    assert result["settings"]["systems"] == result["settings"]["policies"] == list(policies)
    points = result["engines"]["simulator"]["points"]
    assert [(point["policy"], point["request_rate"]) for point in points] == [
        (policy, rate) for policy in policies for rate in (1.0, 4.0)
    ]
    for point in points:
        # Computed by hand: the SLO of every request is five times the time of its own steps, run one after the other.
        met, latencies, ends, total = 0, [], 0.0, 0
        for seed in (0, 1):
            file = run_dir / "runs" / f"simulator-{point['policy']}-{point['request_rate']:g}-{seed}.parquet"
            rows = read_rows(file, RECORDS)
            total += len(rows)
            ends += max(row["finish_s"] for row in rows)
            for row in rows:
                assert row["slo_s"] == pytest.approx(5 * 10 * {128: 0.02, 256: 0.03}[row["width"]])
                if row["status"] == "completed":
                    latencies.append(row["finish_s"] - row["arrival_s"])
                    met += latencies[-1] <= row["slo_s"]
        assert (point["num_requests"], point["num_met"]) == (total, met)
        assert point["slo_attainment_rate"] == met / total
        assert (point["interval_low"], point["interval_high"]) == wilson_interval(met, total)
        assert point["goodput_qps"] == pytest.approx(met / ends)
        assert point["latency_mean"] == pytest.approx(fmean(latencies))
        assert [point["latency_p50"], point["latency_p95"]] == pytest.approx(
            np.percentile(latencies, [50, 95]).tolist()
        )
        assert point["completed_requests"] + point["discarded_requests"] == total
        assert sum(point["discarded_by_reason"].values()) == point["discarded_requests"]
    for policy in result["engines"]["simulator"]["policies"]:
        mine = [point["slo_attainment_rate"] for point in points if point["policy"] == policy["policy"]]
        assert policy["mean_attainment"] == pytest.approx(fmean(mine))
    page = (run_dir / "report.html").read_text()
    assert page.count("data:image/png") == 3
    for word in ("patchedserve", "Highest request rate", "Wilson", "distrifusion-fcfs"):
        assert word in page
    for name in ("attainment", "worst", "goodput"):
        assert Image.open(run_dir / f"{name}.png").width > 800


@pytest.mark.slow
def test_systems_share_requests_and_slos(bench: Call) -> None:
    options = ("--rates", "2", "--num-prompts", "12", "--resolutions", "128,256")
    options += ("--systems", "diffusers-fcfs,nirvana,patchedserve")
    run_dir = Path(result_of(bench(*SIMULATED, *options))["run_dir"])
    asked = ("request_id", "prompt", "width", "height", "seed", "arrival_s", "slo_s")
    runs = {
        policy: read_rows(run_dir / "runs" / f"simulator-{policy}-2-0.parquet", RECORDS)
        for policy in ("diffusers-fcfs", "nirvana", "patchedserve")
    }
    wanted = [[row[name] for name in asked] for row in runs["diffusers-fcfs"]]
    assert all([[row[name] for name in asked] for row in rows] == wanted for rows in runs.values())
    # nirvana runs fewer than the 30 steps; its SLO is that of all 30.
    assert {row["num_inference_steps"] for row in runs["nirvana"]} == {24}
    assert runs["diffusers-fcfs"][0]["slo_s"] in (pytest.approx(5 * 30 * 0.02), pytest.approx(5 * 30 * 0.03))


def without_clock(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all figures except the policies' decision times, which are measured in real time."""
    figures = result["engines"]["simulator"]
    points = [{name: point[name] for name in point if "scheduling" not in name} for point in figures["points"]]
    return [*points, *figures["policies"]]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_resumed_sweep_gives_equal_results(bench: Call, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = (*SIMULATED, *FAST, "--systems", "bucketed,patchedserve")
    whole = result_of(bench(*options, "--num-seeds", "2"))
    first = result_of(bench(*options))
    assert first["num_finished"] == 4
    calls: list[int] = []

    def counted(*arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        return simulate(*arguments, **keywords)

    monkeypatch.setattr("patchedserve.serving.runs.simulated.deployment.simulate", counted)
    second = result_of(bench(*options, "--num-seeds", "2", "--resume", first["run_dir"]))
    assert len(calls) == 4
    assert second["run_dir"] == first["run_dir"]
    assert without_clock(second) == without_clock(whole)
    # All runs exist: nothing is served, only the report is drawn again.
    report = Path(second["run_dir"]) / "report.html"
    report.unlink()
    again = result_of(bench(*options, "--num-seeds", "2", "--resume", first["run_dir"]))
    assert without_clock(again) == without_clock(whole)
    assert len(calls) == 4
    assert report.exists()
    # A damaged run is reported, not counted.
    (Path(first["run_dir"]) / "runs" / "simulator-patchedserve-1-0.parquet").write_bytes(b"PAR1")
    code, _, err = bench(*options, "--resume", first["run_dir"])
    assert (code, len(errors_of(err))) == (2, 1)
    assert "simulator-patchedserve-1-0.parquet" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--slo-scale", "4"), "was begun with settings slo_scale 5.0, but it is 4.0 now"),
        (("--num-prompts", "31"), "was begun with settings num_prompts 30, but it is 31 now"),
        (("--latency", "other.csv"), "was begun with circumstances latency"),
        (("--max-batch-size", "8"), "was begun with settings max_batch_size 16"),
    ],
)
def test_different_sweep_is_not_resumed(bench: Call, folder: Path, change: tuple[str, str], message: str) -> None:
    (folder / "other.csv").write_text(TABLE.replace("20", "21", 1))
    base = (*SIMULATED, *FAST, "--systems", "diffusers-fcfs")
    run_dir = result_of(bench(*base))["run_dir"]
    code, out, err = bench(*base, *change, "--resume", run_dir)
    assert (code, out) == (2, "")
    assert message in err
    assert len(errors_of(err)) == 1


@pytest.mark.slow
def test_sweep_of_another_engine_is_refused_before_loading_a_model(bench: Call) -> None:
    run_dir = result_of(bench(*SIMULATED, *FAST, "--systems", "diffusers-fcfs"))["run_dir"]
    code, out, err = bench(*FAST, "--systems", "diffusers-fcfs", "--resume", run_dir)
    assert (code, out) == (2, "")
    assert 'was begun with settings engine "simulator", but it is "real" now' in err
    assert "Loading" not in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--systems", "magic"], "system is 'magic'"),
        (["--systems", ""], "no systems are given"),
        (["--systems", "nirvana,nirvana"], "nirvana is given twice among the systems"),
        (["--rates", "1,x"], "--rates is '1,x'"),
        (["--rates", ""], "no rates are given"),
        (["--rates", "0,1"], "a request rate is 0"),
        (["--rates", "inf"], "a request rate is inf"),
        (["--rates", "2,1,2"], "2.0 is given twice"),
        (["--num-seeds", "0"], "num-seeds"),
        (["--slo-scale", "-1"], "SLO scale is -1"),
        (["--trace", "trace.jsonl"], "a sweep draws its own"),
        (["--cv", "3"], "--cv is 3.0, but it belongs to --trace gamma"),
        (["--num-prompts", "0"], "number of prompts is 0"),
        (["--resolutions", "128,512"], "knows nothing of 512x512"),
        (["--latency", "nowhere.csv"], "nowhere.csv"),
        (["--plain-latency", "patched.parquet"], "is of the patched engine, but --plain-latency must be of the plain"),
        (["--predictor", "x.safetensors"], "--predictor belongs to --on engine or both, not simulator"),
        (["--cache", "interval"], "--cache belongs to --on engine or both, not simulator"),
        (["--compile"], "--compile belongs to --on engine or both, not simulator"),
        (["--device", "cpu"], "--device belongs to --on engine or both, not simulator"),
        (["--dtype", "float32"], "--dtype belongs to --on engine or both, not simulator"),
        (["--warmup-requests", "8"], "--warmup-requests belongs to --on engine or both, not simulator"),
        (["--combinations", "24"], "--combinations belongs to --on both, not simulator"),
        (["--calibration", "nowhere.json"], "nowhere.json: cannot read"),
        (["--calibration", "table.csv"], "table.csv: not valid JSON"),
        (["--calibration", "x.json", "--stage-times", "."], "not both"),
        (["--stage-times", "."], "records.parquet"),
        (["--systems", "distrifusion-fcfs", "--gpus", "3"], "speedups only for 1, 2, 4, 8"),
        (["--resume", "."], "is not a folder of psctl bench slo"),
        (["--on", "engine"], "--latency belongs to --on simulator, not engine"),
    ],
)
def test_bad_usage_gives_a_one_line_error(bench: Call, folder: Path, arguments: list[str], message: str) -> None:
    from ..support.latency_tables import CIRCUMSTANCES

    write_latencies(folder / "patched.parquet", LatencyTable(tuple(law_rows(20)), CIRCUMSTANCES, {}))
    latency = () if "--latency" in arguments else ("--latency", "table.csv")
    base = ("--on", "simulator", *latency, "--resolutions", "128,256", "--num-prompts", "5")
    base += ("--systems", "diffusers-fcfs")
    code, out, err = bench(*base, "--quiet", *arguments)
    lines = errors_of(err)
    assert (code, out) == (2, ""), err
    assert message in lines[-1]
    assert len(lines) == 1
    assert not list(folder.rglob("sweep.json"))


def test_real_engine_options(bench: Call) -> None:
    for arguments, message in (
        (("--gpus", "2"), "--gpus belongs to --on simulator, not engine"),
        (("--combinations", "24"), "--combinations belongs to --on both, not engine"),
        (("--systems", "distrifusion-fcfs"), "only in the simulator"),
        (("--on", "simulator", "--resolutions", "512"), "no table of step latencies has 512x512 for emoji-xl"),
        (("--warmup-requests", "0"), "warmup-requests"),
        (("--cache", "accumulated"), "needs --cache-threshold"),
    ):
        code, _, err = bench(*arguments)
        assert code == 2
        assert message in err


@pytest.mark.slow
def test_batches_larger_than_a_table_give_a_warning(bench: Call, folder: Path) -> None:
    (folder / "plain.csv").write_text("combination,ms\n128x128,20\n256x256,30\n4*128x128,60\n")
    options = ("--on", "simulator", "--latency", "table.csv", "--plain-latency", "plain.csv", *FAST, "--quiet")
    code, _, err = bench(*options, "--systems", "diffusers-fcfs", "--max-batch-size", "17")
    assert code == 0
    told = " ".join(err.split())
    assert "--max-batch-size is 17, but the largest batch in table.csv has 16: beyond it latencies are" in told
    assert "but the largest batch in plain.csv has 4" in told
    assert bench(*options, "--systems", "diffusers-fcfs", "--max-batch-size", "4")[2] == ""


def test_tables_are_printed_without_json(bench: Call) -> None:
    options = ("--on", "simulator", "--latency", "table.csv", *FAST, "--systems", "diffusers-fcfs,patchedserve")
    code, out, err = bench(*options)
    assert code == 0
    for word in ("Highest request rate", "against best of diffusers-fcfs", "Every rate", "patchedserve"):
        assert word in out
    assert "no --plain-latency is given" in err
    assert "Report: " in err


def test_step_schedule_is_simulated(bench: Call) -> None:
    options = ("--systems", "patched-slack,patched-schedule", "--rates", "2", "--num-prompts", "60")
    result = result_of(bench(*SIMULATED, *options, "--num-inference-steps", "30", "--resolutions", "128,256"))
    [exact, scheduled] = result["engines"]["simulator"]["points"]
    assert scheduled["policy"] == "patched-schedule"
    assert scheduled["latency_mean"] < exact["latency_mean"] / 2, "7 of 30 steps are computed"
    assert scheduled["slo_attainment_rate"] >= exact["slo_attainment_rate"]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_each_system_has_its_own_cache(run_psctl: RunPsctl) -> None:
    """All systems run with the bundled model, which includes a predictor and a schedule."""
    done = run_psctl(
        *("bench", "slo", "--systems", "patched-slack:continuous,patched-schedule:continuous,patched-fcfs"),
        *("--rates", "6", "--num-prompts", "3", "--num-inference-steps", "12", "--warmup-requests", "1"),
        *("--resolutions", "128", "--device", "cpu", "--slo-scale", "1000", "--json"),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    saved = {point["policy"]: point["saved_computation"] for point in result["engines"]["real"]["points"]}
    assert saved["patched-slack:continuous"] is None
    assert saved["patched-schedule:continuous"] == 1 / 2, "the plan of 20 steps, scaled: 0 2 4 6 8 10"
    assert 0 < saved["patched-fcfs"] < 1
    assert set(result["settings"]["cache"]) == {"patch", "schedule"}
