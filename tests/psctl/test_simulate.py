"""`psctl simulate` as users run it: results, files, searches, bad input; and the searches themselves."""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from patchedserve.data.errors import RunError, UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.data.tables.latency import LatencyRow, LatencyTable, write_latencies
from patchedserve.data.tables.schemas import RECORDS, STEPS, read_rows
from patchedserve.data.traces.traces import TraceConfig, generate_trace
from patchedserve.psctl.app import main
from patchedserve.serving.runs.simulated.calibration import Calibration
from patchedserve.serving.runs.simulated.deployment import SimulatedDeployment, SimulatedEngine
from patchedserve.serving.runs.simulated.planning import at_rate, gpus_needed, highest_rate
from patchedserve.serving.runs.step_file import load_step_file
from patchedserve.serving.scheduling.systems import get_system

S, L = Resolution(128, 128), Resolution(256, 256)
COSTS = {"launches": 1000, "launch_us": 50, "record_ms": 100, "launches_per_resolution": 200, "patience": 2}
TABLE = "combination,ms\n128x128,20\n256x256,30\n128x128 + 256x256,40\n8*128x128 + 8*256x256,200\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").write_text(TABLE)
    return tmp_path


Call = tuple[int, str, str]


def simulate(capsys: pytest.CaptureFixture[str], *arguments: str) -> Call:
    """Run the command in this process: it loads no model, so that it needs no isolation."""
    code = main(["simulate", "--resolutions", "128,256", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def summary_of(call: Call) -> dict[str, Any]:
    code, out, err = call
    assert code == 0, err
    return json.loads(out)


@pytest.mark.slow
def test_simulated_run_writes_the_files_of_a_served_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--latency", "table.csv", "--request-rate", "3", "--num-prompts", "60", "--num-inference-steps", "5")
    summary = summary_of(simulate(capsys, *options, "--json", "--postprocess-ms", "10", "--output-file", "s.json"))
    run_dir = Path(summary["run_dir"])
    assert json.loads((folder / "s.json").read_text()) == json.loads((run_dir / "summary.json").read_text()) == summary
    assert (summary["total_requests"], summary["num_gpus"], summary["config"]["policy"]) == (60, 1, "fair-fitting")
    assert summary["slo_attainment_rate"] > 0.9
    records = read_rows(run_dir / "records.parquet", RECORDS)
    assert len(records) == 60
    steps = read_rows(run_dir / "steps.parquet", STEPS)
    assert sum(step["active"] for step in steps) == 5 * summary["completed_requests"]
    assert "data:image/png" in (run_dir / "report.html").read_text()
    again = summary_of(simulate(capsys, *options, "--json", "--postprocess-ms", "10"))
    figure = summary["figures"]["slo_attainment"]
    assert (figure["value"], figure["n"]) == (summary["slo_attainment_rate"], 60)
    for each in (summary, again):
        assert each["figures"].pop("scheduling_mean")["value"] == each["scheduling_mean"]
    differing = {key for key in summary if summary[key] != again[key]}
    assert differing <= {"run_dir", "scheduling_mean"}
    # Stage times can be read from a run, including this one.
    taken = summary_of(simulate(capsys, *options, "--json", "--stage-times", str(run_dir)))
    assert taken["latency_mean"] == pytest.approx(summary["latency_mean"])


@pytest.mark.exhaustive
@pytest.mark.slow
def test_policies_differ_as_expected(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ("--latency", "table.csv", "--request-rate", "9", "--num-prompts", "200", "--json", "--quiet")

    def run(policy: str, *more: str) -> dict[str, Any]:
        return summary_of(simulate(capsys, *base, "--policy", policy, "--num-inference-steps", "20", *more))

    slack, fcfs, edf = run("slack"), run("fcfs"), run("edf")
    assert slack["slo_attainment_rate"] > max(fcfs["slo_attainment_rate"], edf["slo_attainment_rate"]) + 0.2
    assert sum(slack["discarded_by_reason"].values()) == slack["discarded_requests"] > 0
    assert fcfs["batch_size_mean"] == 1
    # One pass per resolution takes longer than one for both.
    mixed, plain = run("continuous"), run("continuous", "--engine", "plain")
    assert plain["step_latency_mean"] > mixed["step_latency_mean"]
    spanning = run("fcfs", "--system", "distrifusion-fcfs", "--gpus", "4")
    assert spanning["slo_attainment_rate"] > fcfs["slo_attainment_rate"]
    two = run("slack", "--gpus", "2")
    assert two["slo_attainment_rate"] > slack["slo_attainment_rate"]
    assert sum(two["requests_per_gpu"]) == 200
    assert min(two["requests_per_gpu"]) > 80


@pytest.mark.exhaustive
@pytest.mark.slow
def test_routers_differ(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ("--latency", "table.csv", "--num-prompts", "200", "--request-rate", "6", "--policy", "continuous")
    base = (*base, "--gpus", "4", "--json", "--quiet")
    default, *others = (
        summary_of(simulate(capsys, *base, *more))
        for more in ((), *(("--router", name) for name in ("fewest-pixels", "round-robin", "mask-aware")))
    )
    assert [each["config"]["router"] for each in others] == ["fewest-pixels", "round-robin", "mask-aware"]
    assert default["requests_per_gpu"] == others[0]["requests_per_gpu"]
    assert default["latency_mean"] == others[0]["latency_mean"]
    assert others[1]["requests_per_gpu"] == [50] * 4
    assert others[2]["latency_mean"] < others[1]["latency_mean"]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_diurnal_and_azure_and_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ("--latency", "table.csv", "--json", "--quiet", "--num-inference-steps", "2")
    day = summary_of(simulate(capsys, *base, "--trace", "diurnal", "--period", "20", "--duration", "40"))
    assert 15 < day["total_requests"] < 70
    (folder / "azure.csv").write_text("arrived_at,x\n" + "".join(f"{i * i},0\n" for i in range(20)))
    azure = ("--trace", "azure", "--arrivals", "azure.csv", "--request-rate", "4")
    run = summary_of(simulate(capsys, *base, *azure))
    arrivals = [row["arrival_s"] for row in read_rows(Path(run["run_dir"]) / "records.parquet", RECORDS)]
    # 19 gaps at 4 per second; arrival times are proportional to squares.
    assert arrivals == pytest.approx([i * i * (19 / 4) / 361 for i in range(20)])
    lines = [json.dumps({"arrival_s": 100 + i, "prompt": "a", "width": 128, "height": 128}) for i in range(11)]
    (folder / "trace.jsonl").write_text("\n".join(lines))
    own = summary_of(simulate(capsys, *base, "--trace", "trace.jsonl"))
    assert own["duration"] > 110
    faster = summary_of(simulate(capsys, *base, "--trace", "trace.jsonl", "--request-rate", "5"))
    assert 2 < faster["duration"] < 3


@pytest.mark.exhaustive
@pytest.mark.slow
def test_costs_of_launches_and_graphs_are_simulated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "costs.json").write_text(json.dumps(COSTS))
    base = ("--latency", "table.csv", "--request-rate", "2", "--num-prompts", "20", "--num-inference-steps", "10")
    modes = {
        mode: summary_of(simulate(capsys, *base, "--graphs", mode, "--graph-costs", "costs.json", "--quiet", "--json"))
        for mode in ("off", "exact", "bucketed")
    }
    for mode, summary in modes.items():
        assert (summary["graphs"]["mode"], summary["config"]["graphs"]) == (mode, mode)
        assert summary["config"]["graph_costs"] == "costs.json"
    found = {mode: summary["graphs"] for mode, summary in modes.items()}
    assert (found["off"]["recordings"], found["off"]["replay_rate"]) == (0, 0)
    for mode in ("exact", "bucketed"):
        assert 0 < found[mode]["recordings"] <= found[mode]["keys"]
    # Under load there are many mixes.
    more = ("--graph-costs", "costs.json", "--request-rate", "8", "--num-prompts", "80", "--quiet", "--json")
    exact, bucketed = (
        summary_of(simulate(capsys, *base, "--graphs", mode, *more))["graphs"] for mode in ("exact", "bucketed")
    )
    assert bucketed["keys"] < exact["keys"]
    assert bucketed["replay_rate"] > exact["replay_rate"] > 0
    # Steps of few images take as long as their launches, 50 ms, unless they are replayed.
    assert modes["off"]["step_latency_mean"] > 0.05 > modes["bucketed"]["step_latency_mean"]
    without = summary_of(simulate(capsys, *base, "--quiet", "--json"))
    assert not {"graphs", "graph_costs"} & {*without, *without["config"]}
    code, out, _ = simulate(capsys, *base, "--graphs", "bucketed", "--graph-costs", "costs.json")
    assert code == 0
    assert f"{found['bucketed']['recordings']} of {found['bucketed']['keys']} kinds of passes" in out


@pytest.mark.exhaustive
@pytest.mark.slow
def test_target_finds_rate_and_gpus(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ("--latency", "table.csv", "--num-inference-steps", "10", "--num-prompts", "150", "--slo-target", "0.95")
    found = summary_of(simulate(capsys, *base, "--gpus", "2", "--request-rate", "60", "--json", "--quiet"))
    assert found["attainment_at_highest_rate"] >= 0.95
    above = [each for each in found["tried_rates"] if each["request_rate"] > found["highest_request_rate"]]
    assert above[0]["slo_attainment_rate"] < 0.95
    assert above[0]["request_rate"] <= found["highest_request_rate"] * 1.0101
    assert found["gpus_needed"] > 2
    tried = {each["gpus"]: each["slo_attainment_rate"] for each in found["tried_gpus"]}
    assert tried[found["gpus_needed"]] >= 0.95 > tried[found["gpus_needed"] - 1]
    code, out, _ = simulate(capsys, *base)
    assert code == 0
    assert "highest rate" in out
    assert "GPUs needed" not in out
    assert not list(folder.rglob("summary.json"))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_system_sets_engine_and_policy_and_options_override_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ("--latency", "table.csv", "--num-prompts", "5", "--num-inference-steps", "5", "--json")

    def chosen(*options: str) -> tuple[str, str, str]:
        config = summary_of(simulate(capsys, *base, "--quiet", *options))["config"]
        return config["system"], config["policy"], config["engine"]

    assert chosen() == ("patched-slack", "fair-fitting", "patched")
    assert chosen("--system", "nirvana") == ("nirvana", "continuous", "plain")
    assert chosen("--policy", "edf", "--system", "nirvana", "--engine", "patched") == ("nirvana", "edf", "patched")
    assert chosen("--engine", "plain") == ("patched-slack", "fair-fitting", "plain")
    for option in ("--system", "--policy"):
        code, _, err = simulate(capsys, *base, option, "magic")
        assert (code, f"{option[2:]} is 'magic', but it must be one of" in err) == (2, True)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_extrapolation_gives_a_warning(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--latency", "table.csv", "--num-prompts", "5", "--quiet", "--json", "--max-batch-size")
    assert simulate(capsys, *options, "16")[2] == ""
    assert "the largest batch in table.csv has 16" in simulate(capsys, *options, "17")[2].replace("\n", " ")
    # Forty requests at once: batches of 16 were measured; those of 17 to 20 are counted, each once.
    full = ("--latency", "table.csv", "--quiet", "--json", "--num-prompts", "40", "--request-rate", "inf")
    counted = [
        summary_of(simulate(capsys, *full, "--system", "patched-fcfs", "--max-batch-size", size))["predictions_outside"]
        for size in ("16", "20")
    ]
    assert counted[0] == {"too_large": 0, "between": 0}
    assert counted[1]["too_large"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--request-rate", "0"], "request rate is 0, but it must be more than 0"),
        (["--trace", "empty.jsonl"], "empty.jsonl: the trace is empty"),
        (["--trace", "trace.jsonl", "--request-rate", "0"], "request rate is 0"),
        (["--latency", "nowhere.csv"], "nowhere.csv: cannot read"),
        (["--latency", "bad.csv"], "bad.csv"),
        (["--resolutions", "128,512"], "knows nothing of 512x512, but only of 128x128, 256x256"),
        (["--policy", "magic"], "edf, edf-drop, slack, edf-fitting, fair-fitting"),
        (["--system", "magic"], "must be one of diffusers"),
        (["--system", "distrifusion-fcfs", "--gpus", "3"], "speedups only for 1, 2, 4, 8"),
        (["--gpus", "0"], "'--gpus': '0', but it must be greater than or equal to 1"),
        (["--gpus", "9999"], "'--gpus': '9999', but it must be less than or equal to 4096"),
        (["--request-rate", "fast"], "'--request-rate': 'fast', but it must be a valid number"),
        (["--num-inference-steps", "99999999"], "it must be less than or equal to 1000"),
        (["--trace", "posson"], "a trace is poisson, gamma, diurnal, shape, dataset-c, azure, diffusiondb"),
        (["--resolutions", "80000000"], "width is 80000000 in resolution 80000000x80000000, but must be at most 16384"),
        (["--output-file", "table.csv"], "--output-file table.csv exists and is not JSON"),
        (["--slo-scale", "0"], "SLO scale is 0"),
        (["--slo-target", "1.5"], "--slo-target is 1.5"),
        (["--prepare-ms", "-1"], "--prepare-ms is -1, but it must be finite"),
        (["--stage-times", ".", "--prepare-ms", "1"], "give one or the other"),
        (["--stage-times", "."], "records.parquet: cannot read"),
        (["--router", "best"], "router is 'best', but it must be one of round-robin, least-requests"),
        (
            ["--router", "round-robin", "--system", "distrifusion-fcfs", "--gpus", "2"],
            "--router is round-robin, but distrifusion-fcfs draws every request on all GPUs",
        ),
        (["--trace", "azure"], "--trace azure replays recorded arrivals: name their file with --arrivals"),
        (["--period", "5"], "--period is 5.0, but it belongs to --trace diurnal, not poisson"),
        (["--trace", "diurnal", "--amplitude", "2"], "amplitude is 2, but it must be from 0 to 1"),
        (["--graphs", "exact"], "--graphs and --graph-costs belong together: give both or neither"),
        (["--graph-costs", "costs.json"], "--graphs and --graph-costs belong together"),
        (
            ["--graphs", "some", "--graph-costs", "costs.json"],
            "'some' is not one of 'off', 'exact', 'bucketed'",
        ),
        (["--graphs", "off", "--graph-costs", "nowhere.json"], "nowhere.json: cannot read the file of costs"),
        (
            ["--graphs", "off", "--graph-costs", "costs.json", "--system", "bucketed"],
            "--graphs is for the passes of one GPU's patch engine, and bucketed has others",
        ),
    ],
)
def test_bad_usage_gives_a_one_line_error(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (folder / "empty.jsonl").touch()
    (folder / "trace.jsonl").write_text('{"arrival_s": 1}')
    (folder / "bad.csv").write_text("combination,ms\n128x128,-3\n")
    (folder / "costs.json").write_text(json.dumps(COSTS))
    latency = () if "--latency" in arguments else ("--latency", "table.csv")
    code, out, err = simulate(capsys, *latency, "--quiet", "--json", "--num-prompts", "5", *arguments)
    assert (code, out) == (2, ""), err
    assert message in err
    assert len(err.splitlines()) == 1
    assert not list(folder.rglob("summary.json"))


def test_infeasible_target_gives_a_one_line_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # An SLO below the standalone latency cannot be met at any rate.
    options = ("--latency", "table.csv", "--slo-scale", "0.5", "--num-prompts", "10", "--slo-target", "0.99")
    code, _, err = simulate(capsys, *options, "--quiet")
    assert code == 1
    assert err.startswith("Error: the target of 99.00% cannot be met: at ")
    assert len(err.splitlines()) == 1


def deployment(folder: Path, system: str = "patchedserve", **fields: Any) -> SimulatedDeployment:
    chosen = get_system(system, is_simulated=True)
    return SimulatedDeployment(
        chosen, SimulatedEngine.of(load_step_file(folder / "table.csv").of(chosen.engine)), **fields
    )


@pytest.mark.exhaustive
def test_search_reports_its_uncertainty(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = folder / "slo-1"
    (sweep / "tables" / "patched").mkdir(parents=True)
    rows = tuple(
        LatencyRow({size: count for size, count in ((S, small), (L, large)) if count}, (20.0 + 9 * small + 12 * large,))
        for small, large in _COUNTS
    )
    write_latencies(sweep / "tables" / "patched" / "latency-1.parquet", LatencyTable(rows))
    calibration = Calibration({"128x128": 0.001}, {"128x128": 0.01}, {1: 1.0, 8: 1.2}, ratios=(0.9, 1.0, 1.1))
    (sweep / "calibration.json").write_text(json.dumps({"patched": asdict(calibration)}))
    base = ("--num-inference-steps", "10", "--num-prompts", "100", "--slo-target", "0.9", "--gpus", "2", "--json")
    base = ("--policy", "slack", *base)
    asked = (*base, "--calibration", str(sweep / "calibration.json"), "--request-rate", "40")
    found = summary_of(simulate(capsys, *asked, "--quiet"))
    # Student's t: 1 +- 4.303 x 0.1 x sqrt(1 + 1/3), so that steps last from half to one and a half times as long.
    error = found["error_of_steps"]
    assert (error["num"], error["source"]) == (3, "calibration")
    assert (error["low"], error["high"]) == pytest.approx((1 - 0.4968, 1 + 0.4968), abs=1e-4)
    rate, gpus = (found["figures"][name] for name in ("highest_request_rate", "gpus_needed"))
    assert rate["value"] == found["highest_request_rate"]
    assert gpus["value"] == found["gpus_needed"]
    # Steps are most of the time, and deadlines bound the batch: rates are roughly inverse to step times.
    assert rate["value"] * 0.4 < rate["low"] < rate["value"] * 0.8
    assert rate["value"] * 1.5 < rate["high"] < rate["value"] * 3
    assert gpus["low"] < gpus["value"] < gpus["high"]
    # A comparison with the same engine gives a narrower interval; one with the other engine gives no information.
    compared = [("patchedserve", -0.02), ("patched-fcfs", 0.02), ("bucketed", 0.5)]
    agreed = {"rows": [{"policy": name, "step_difference": off} for name, off in compared]}
    (sweep / "result.json").write_text(json.dumps({"agreement": agreed}))
    surer = summary_of(simulate(capsys, *asked, "--quiet"))
    assert (surer["error_of_steps"]["num"], surer["error_of_steps"]["source"]) == (2, "comparison")
    code, out, _ = simulate(capsys, *asked[: asked.index("--json")], *asked[asked.index("--json") + 1 :])
    assert code == 0
    assert f"({surer['figures']['highest_request_rate']['low']:.3g} to " in out
    # The newest sweep of the workspace is used by default, unless latencies are given.
    shutil.copytree(sweep, folder / "psctl-workspace" / "emoji-xl" / "cpu" / "runs" / "slo-1")
    code, out, err = simulate(capsys, *base, "--request-rate", "40")
    assert code == 0
    assert json.loads(out)["error_of_steps"] == surer["error_of_steps"]
    assert "Calibrated by the newest comparison with real runs, psctl-workspace/" in " ".join(err.split())
    # A newer, damaged one causes a warning, and the one before it is used.
    half = folder / "psctl-workspace" / "emoji-xl" / "cpu" / "runs" / "slo-2" / "calibration.json"
    half.parent.mkdir()
    half.write_text('{"patched": {')
    code, again, err = simulate(capsys, *base, "--request-rate", "40")
    assert (code, again) == (0, out)
    assert "slo-2/calibration.json: not valid JSON" in " ".join(err.split())
    # Without a calibration there is no interval, and the command reports this.
    code, out, err = simulate(capsys, *base, "--latency", "table.csv")
    assert code == 0
    assert json.loads(out)["figures"]["highest_request_rate"]["low"] is None
    assert "is not known: psctl bench slo --on both" in " ".join(err.split())
    for more, message in (
        (("--prepare-ms", "1"), "--calibration brings the times of the stages"),
        (("--system", "bucketed"), "has no calibration of the plain engine, but of patched"),
    ):
        code, _, err = simulate(capsys, *asked, *more)
        assert code == 2
        assert message in err


@pytest.mark.exhaustive
@pytest.mark.slow
def test_slos_are_multiples_of_plain_diffusers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ("--latency", "table.csv", "--num-prompts", "40", "--request-rate", "0.1", "--num-inference-steps", "10")
    code, _, err = simulate(capsys, *base)
    assert code == 0
    assert "--plain-latency takes plain diffusers" in " ".join(err.split())
    lines = [
        "combination,ms",
        *(f"{count}*{size},{ms * count}" for size, ms in ((S, 10), (L, 40)) for count in (1, 16)),
    ]
    (folder / "plain.csv").write_text("\n".join(lines))
    found = summary_of(simulate(capsys, *base, "--plain-latency", "plain.csv", "--quiet", "--json"))
    trace = [json.loads(line) for line in (folder / found["run_dir"] / "trace.jsonl").read_text().splitlines()]
    slos = {each["width"]: each["slo_s"] for each in trace}
    assert slos == pytest.approx({S.width: 5 * 10 * 0.01, L.width: 5 * 10 * 0.04})
    code, _, err = simulate(capsys, *base, "--plain-latency", "plain.csv", "--system", "bucketed")
    assert code == 2
    assert "bucketed runs on the plain engine, so that --latency is its file" in err


_COUNTS = [(1, 0), (0, 1), (1, 1), (2, 0), (0, 2), (4, 4), (8, 8), (16, 0), (0, 16)]


def trace_at(rate: float) -> Sequence[Request]:
    config = TraceConfig(request_rate=rate, num_prompts=100, resolutions=(S, L), num_inference_steps=10)
    return generate_trace(config, ["a"])


@pytest.mark.exhaustive
@pytest.mark.slow
def test_searches(folder: Path) -> None:
    seen: list[float] = []

    def seen_at(rate: float) -> Sequence[Request]:
        seen.append(rate)
        return trace_at(rate)

    found = highest_rate(deployment(folder), seen_at, 0.9)
    # The first trace only provides an example of a request, from which the search derives its first rate.
    assert sorted(seen[1:]) == list(found.tried)
    assert deployment(folder).attainment(trace_at(found.value)) == found.attainment >= 0.9
    # Another policy has another limit: one request at a time is far slower.
    assert highest_rate(deployment(folder, "diffusers-fcfs"), trace_at, 0.9).value < 0.7 * found.value
    # DistriFusion's numbers of GPUs are 1, 2, 4 and 8.
    needed = gpus_needed(deployment(folder, "distrifusion-fcfs"), trace_at(4.5), 0.9)
    assert needed.value in (2, 4, 8)
    with pytest.raises(RunError, match=r"cannot be met: at 8 GPUs it is"):
        gpus_needed(deployment(folder, "distrifusion-fcfs"), trace_at(200.0), 0.9)
    with pytest.raises(RunError, match=r"cannot be met: at 100 GPUs it is 0\.00%"):
        gpus_needed(deployment(folder, slo_scale=0.9), trace_at(1.0), 0.5)
    # With enough GPUs for all requests at once, every rate gives the same result.
    with pytest.raises(RunError, match=r"is met at .* and still is: give more requests"):
        highest_rate(deployment(folder, num_gpus=100), trace_at, 0.9)
    for target in (0.0, -1.0, 1.01, math.nan):
        with pytest.raises(UsageError, match="SLO target is"):
            highest_rate(deployment(folder), trace_at, target)
    with pytest.raises(UsageError, match="1 requests of the trace span no time"):
        at_rate(trace_at(1.0)[:1], 2.0)
