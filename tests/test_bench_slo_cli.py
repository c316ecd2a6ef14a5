"""`psctl bench slo` as users run it: in the simulator, on a tiny model, resumed, interrupted, and with bad input."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from diffusers import DDIMScheduler
from PIL import Image

from patchedserve.data.errors import UsageError
from patchedserve.data.latency_table import LatencyTable, write_latencies
from patchedserve.data.requests import Request
from patchedserve.data.tables import RECORDS, read_rows
from patchedserve.profiling.slo_figures import wilson
from patchedserve.profiling.slo_sweep import Served, SweepFolder, SweepSettings, engine_of, run_sweep
from patchedserve.profiling.trace_settings import TraceSettings
from patchedserve.psctl.app import main
from patchedserve.serving.defaults import ModelDefaults
from patchedserve.serving.policies import SIMULATED_POLICY_NAMES
from patchedserve.serving.simulator import simulate

from .conftest import RunPsctl
from .helpers import save_tiny, tiny_sdxl
from .latency_tables import law_rows

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
    """What stands on stderr beside the warning that all simulations with one table give."""
    return [line for line in err.splitlines() if not line.startswith("Warning: no --plain-latency")]


SIMULATED = ("--engine", "simulator", "--latency", "table.csv", "--json", "--quiet")


def test_figures_are_those_of_the_records(bench: Call, folder: Path) -> None:
    policies = ("bucketed", "slack", "distrifusion-fcfs")
    options = ("--policies", ",".join(policies), "--num-seeds", "2", "--output-file", "r.json")
    result = result_of(bench(*SIMULATED, *FAST, *options))
    run_dir = Path(result["run_dir"])
    assert json.loads((folder / "r.json").read_text()) == json.loads((run_dir / "result.json").read_text()) == result
    assert (result["num_runs"], result["num_finished"]) == (12, 12)
    points = result["engines"]["simulator"]["points"]
    assert [(point["policy"], point["request_rate"]) for point in points] == [
        (policy, rate) for policy in policies for rate in (1.0, 4.0)
    ]
    for point in points:
        # By hand: every request has an SLO of five times its own steps, one after the other.
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
        assert (point["interval_low"], point["interval_high"]) == wilson(met, total)
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
    assert page.count("data:image/png") == 4
    for word in ("slack", "Highest request rate", "Wilson", "distrifusion-fcfs"):
        assert word in page
    for name in ("attainment", "goodput"):
        assert Image.open(run_dir / f"{name}.png").width > 800


def test_policies_share_requests_and_slos(bench: Call) -> None:
    options = ("--policies", "fcfs,nirvana,slack", "--rates", "2", "--num-prompts", "12", "--resolutions", "128,256")
    run_dir = Path(result_of(bench(*SIMULATED, *options))["run_dir"])
    asked = ("request_id", "prompt", "width", "height", "seed", "arrival_s", "slo_s")
    runs = {
        policy: read_rows(run_dir / "runs" / f"simulator-{policy}-2-0.parquet", RECORDS)
        for policy in ("fcfs", "nirvana", "slack")
    }
    wanted = [[row[name] for name in asked] for row in runs["fcfs"]]
    assert all([[row[name] for name in asked] for row in rows] == wanted for rows in runs.values())
    # nirvana takes fewer steps of the 30; its SLO is that of all of them.
    assert {row["num_inference_steps"] for row in runs["nirvana"]} == {24}
    assert runs["fcfs"][0]["slo_s"] in (pytest.approx(5 * 30 * 0.02), pytest.approx(5 * 30 * 0.03))


def without_clock(result: dict[str, Any]) -> list[dict[str, Any]]:
    """All figures but how long the policies took to decide, which is real time."""
    figures = result["engines"]["simulator"]
    points = [{name: point[name] for name in point if name != "scheduling_mean"} for point in figures["points"]]
    return [*points, *figures["policies"]]


def test_resumed_sweep_is_the_same(bench: Call, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = (*SIMULATED, *FAST, "--policies", "bucketed,slack")
    whole = result_of(bench(*options, "--num-seeds", "2"))
    first = result_of(bench(*options))
    assert first["num_finished"] == 4
    calls: list[int] = []

    def counted(*arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        return simulate(*arguments, **keywords)

    monkeypatch.setattr("patchedserve.profiling.slo_simulated.simulate", counted)
    second = result_of(bench(*options, "--num-seeds", "2", "--resume", first["run_dir"]))
    assert len(calls) == 4
    assert second["run_dir"] == first["run_dir"]
    assert without_clock(second) == without_clock(whole)
    # All is there: nothing is served, only drawn anew.
    report = Path(second["run_dir"]) / "report.html"
    report.unlink()
    again = result_of(bench(*options, "--num-seeds", "2", "--resume", first["run_dir"]))
    assert without_clock(again) == without_clock(whole)
    assert len(calls) == 4
    assert report.exists()
    # A damaged run is told, not counted.
    (Path(first["run_dir"]) / "runs" / "simulator-slack-1-0.parquet").write_bytes(b"PAR1")
    code, _, err = bench(*options, "--resume", first["run_dir"])
    assert (code, len(errors_of(err))) == (2, 1)
    assert "simulator-slack-1-0.parquet" in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--slo-scale", "4"), "was begun with settings slo_scale 5.0, but it is 4.0 now"),
        (("--num-prompts", "31"), "was begun with settings num_prompts 30, but it is 31 now"),
        (("--latency", "other.csv"), "was begun with circumstances latency"),
        (("--max-batch-size", "8"), "was begun with settings max_batch_size 16"),
    ],
)
def test_another_sweep_is_not_gone_on_with(bench: Call, folder: Path, change: tuple[str, str], message: str) -> None:
    (folder / "other.csv").write_text(TABLE.replace("20", "21", 1))
    base = (*SIMULATED, *FAST, "--policies", "fcfs")
    run_dir = result_of(bench(*base))["run_dir"]
    code, out, err = bench(*base, *change, "--resume", run_dir)
    assert (code, out) == (2, "")
    assert message in err
    assert len(errors_of(err)) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "magic"], "policy is 'magic'"),
        (["--policies", ""], "no policies are given"),
        (["--policies", "fcfs,fcfs"], "fcfs stands twice among the policies"),
        (["--rates", "1,x"], "--rates is '1,x'"),
        (["--rates", ""], "no rates are given"),
        (["--rates", "0,1"], "a request rate is 0"),
        (["--rates", "inf"], "a request rate is inf"),
        (["--rates", "2,1,2"], "2.0 stands twice"),
        (["--num-seeds", "0"], "num-seeds"),
        (["--slo-scale", "-1"], "SLO scale is -1"),
        (["--trace", "trace.jsonl"], "a sweep draws its own"),
        (["--cv", "3"], "--cv is 3.0, but it belongs to --trace gamma"),
        (["--num-prompts", "0"], "number of prompts is 0"),
        (["--resolutions", "128,512"], "knows nothing of 512x512"),
        (["--latency", "nowhere.csv"], "nowhere.csv"),
        (["--plain-latency", "patched.parquet"], "is of the patched engine, but --plain-latency must be of the plain"),
        (["--predictor", "x.safetensors"], "--predictor belongs to --engine real or both"),
        (["--cache", "interval"], "belongs to --engine real or both"),
        (["--calibration", "nowhere.json"], "nowhere.json: cannot read"),
        (["--calibration", "table.csv"], "the calibration is damaged"),
        (["--calibration", "x.json", "--stage-times", "."], "not both"),
        (["--stage-times", "."], "records.parquet"),
        (["--policies", "distrifusion-fcfs", "--gpus", "3"], "speedups only for 1, 2, 4, 8"),
        (["--resume", "."], "is no folder of psctl bench slo"),
        (["--engine", "real"], "--latency belongs to --engine simulator"),
    ],
)
def test_bad_usage_is_one_line(bench: Call, folder: Path, arguments: list[str], message: str) -> None:
    from .latency_tables import CIRCUMSTANCES

    write_latencies(folder / "patched.parquet", LatencyTable(tuple(law_rows(20)), CIRCUMSTANCES, {}))
    latency = () if "--latency" in arguments else ("--latency", "table.csv")
    base = ("--engine", "simulator", *latency, "--resolutions", "128,256", "--num-prompts", "5", "--policies", "fcfs")
    code, out, err = bench(*base, "--quiet", *arguments)
    lines = errors_of(err)
    assert (code, out) == (2, ""), err
    assert message in lines[-1]
    assert len(lines) == 1
    assert not list(folder.rglob("sweep.json"))


def test_real_engine_options(bench: Call) -> None:
    for arguments, message in (
        (("--gpus", "2"), "only --engine simulator serves on more than one"),
        (("--policies", "distrifusion-fcfs"), "only in `psctl simulate`"),
        (("--engine", "simulator"), "--engine simulator needs --latency"),
        (("--warmup-requests", "0"), "warmup-requests"),
        (("--cache", "accumulated"), "needs --cache-threshold"),
    ):
        code, _, err = bench(*arguments)
        assert code == 2
        assert message in err


def test_people_see_tables(bench: Call) -> None:
    code, out, err = bench("--engine", "simulator", "--latency", "table.csv", *FAST, "--policies", "fcfs,slack")
    assert code == 0
    for word in ("Highest request rate", "against best of fcfs", "Every rate", "slack"):
        assert word in out
    assert "no --plain-latency is given" in err
    assert "Report: " in err


def test_every_policy_has_its_engine() -> None:
    engines = {name: engine_of(name) for name in SIMULATED_POLICY_NAMES}
    assert {name for name, engine in engines.items() if engine == "patched"} == {"patched-fcfs", "edf", "slack"}


def settings(**fields: Any) -> SweepSettings:
    trace = TraceSettings(num_prompts=4, resolutions="128", num_inference_steps=2)
    return SweepSettings(trace=trace, engine="simulator", **fields)


class Stop:
    """Serves at once, and is interrupted at its n-th run."""

    def __init__(self, after: int, *, by_signal: bool) -> None:
        self.after, self.by_signal = after, by_signal
        self.served: list[tuple[str, int]] = []

    def run(self, policy: str, requests: Sequence[Request], standalone_s: Callable[[Request], float]) -> Served:
        from patchedserve.serving.lifecycle import RequestRecord

        if len(self.served) == self.after:
            if self.by_signal:
                raise KeyboardInterrupt
            return Served([], 1.0, {}, was_interrupted=True)
        self.served.append((policy, len(requests)))
        records = [RequestRecord.of(request) for request in requests]
        for record in records:
            record.close("completed", record.arrival_s + 1.0)
        return Served(records, 10.0, {"note": 1})


@pytest.mark.parametrize("by_signal", [True, False])
def test_interrupted_sweep_goes_on(tmp_path: Path, by_signal: bool) -> None:
    wanted = settings(policies=("fcfs", "slack", "edf"), rates=(1.0, 2.0), seeds=(3,))
    head = {"settings": wanted.fixed(), "circumstances": {"model": "m"}, "standalone_s": {"128x128": 1.0}}
    first, rest = Stop(2, by_signal=by_signal), Stop(99, by_signal=by_signal)
    assert run_sweep(wanted, {"simulator": first}, SweepFolder(tmp_path, head), lambda request: 1.0, ModelDefaults())
    assert first.served == [("fcfs", 4), ("slack", 4)]
    folder = SweepFolder(tmp_path, head)
    assert len(folder.finished(wanted)) == 2
    done: list[int] = []
    again = run_sweep(
        wanted, {"simulator": rest}, folder, lambda request: 1.0, ModelDefaults(), on_done=lambda: done.append(1)
    )
    assert not again
    # The second rate begins with another policy.
    assert [policy for policy, _ in rest.served] == ["edf", "slack", "edf", "fcfs"]
    assert len(done) == 6
    runs = folder.finished(wanted)
    assert [(run.policy, run.request_rate) for run in runs] == [
        (policy, rate) for policy in ("fcfs", "slack", "edf") for rate in (1.0, 2.0)
    ]
    assert all(run.figures == {"note": 1} and run.duration_s == 10.0 and len(run.records) == 4 for run in runs)
    with pytest.raises(UsageError, match="was begun with settings slo_scale"):
        SweepFolder(tmp_path, {**head, "settings": settings(slo_scale=3.0).fixed()})


def test_orders_rotate_and_seeds_come_last() -> None:
    wanted = settings(policies=("fcfs", "edf"), rates=(1.0, 2.0, 3.0), seeds=(0, 1))
    assert list(wanted.order())[:4] == [
        (1.0, 0, ("fcfs", "edf")),
        (2.0, 0, ("edf", "fcfs")),
        (3.0, 0, ("fcfs", "edf")),
        (1.0, 1, ("edf", "fcfs")),
    ]


def test_sweeps_of_the_simulator_import_no_torch() -> None:
    code = "import sys, patchedserve.profiling.slo_simulated; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment with a tiny model, whose steps take a few milliseconds."""
    path = tmp_path_factory.mktemp("models") / "sdxl"
    pipe = tiny_sdxl()
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config)
    save_tiny(path, pipe, num_inference_steps=3, guidance_scale=3.0, resolutions=["32", "48"])
    workspace = tmp_path_factory.mktemp("workspace")
    (workspace / "steps.csv").write_text("combination,ms\n32x32,9\n48x48,9\n2*32x32 + 2*48x48,20\n")
    return {"PSCTL_MODEL": str(path), "PSCTL_WORKSPACE": str(workspace), "STEPS": str(workspace / "steps.csv")}


def test_both_engines_on_a_real_model(run_psctl: RunPsctl, tiny: dict[str, str]) -> None:
    options = ("--rates", "8,30", "--num-prompts", "6", "--warmup-requests", "12", "--combinations", "6")
    options += ("--max-batch-size", "4", "--slo-scale", "1000", "--predictor", tiny["STEPS"])
    arguments = ("bench", "slo", "--engine", "both", "--policies", "bucketed,slack", *options)
    run = run_psctl(*arguments, "--json", **tiny)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert (result["num_runs"], result["num_finished"], list(result["engines"])) == (8, 8, ["real", "simulator"])
    for figures in result["engines"].values():
        assert all(point["slo_attainment_rate"] == 1 for point in figures["points"])
        assert all(policy["held_rates"]["0.99"]["where"] == "beyond" for policy in figures["policies"])
    assert [row["policy"] for row in result["agreement"]["rows"]] == ["bucketed", "bucketed", "slack", "slack"]
    assert result["agreement"]["max_attainment_difference_points"] == 0
    run_dir = Path(result["run_dir"])
    calibration = json.loads((run_dir / "calibration.json").read_text())
    assert set(calibration) == {"plain", "patched"}
    assert all(each["num_steps"] >= 20 and each["error"] < 2 for each in calibration.values())
    assert set(result["standalone_s"]) == {"32x32", "48x48"}
    for engine in ("real", "simulator"):
        for policy in ("bucketed", "slack"):
            rows = read_rows(run_dir / "runs" / f"{engine}-{policy}-8-0.parquet", RECORDS)
            slos = {f"{row['width']}x{row['height']}": row["slo_s"] for row in rows}
            assert all(slos[size] == pytest.approx(1000 * result["standalone_s"][size]) for size in slos)
    # Another seed, with what is known: nothing is profiled again. The calibration drives the simulator alone, too.
    again = run_psctl(*arguments, "--num-seeds", "2", "--resume", run_dir, "--json", **tiny)
    assert again.returncode == 0, again.stderr
    assert "Profiling" not in again.stderr
    assert "Measuring" not in again.stderr
    assert json.loads(again.stdout)["num_finished"] == 16
    tables = {name: next((run_dir / "tables" / name).glob("*.parquet")) for name in ("plain", "patched")}
    alone = run_psctl(
        *("bench", "slo", "--engine", "simulator", "--latency", tables["patched"], "--plain-latency", tables["plain"]),
        *("--calibration", run_dir / "calibration.json", "--policies", "bucketed,slack", "--rates", "8", "--json"),
        **tiny,
    )
    assert alone.returncode == 0, alone.stderr


def test_ctrl_c_and_resume_on_a_real_model(psctl_script: str, tiny: dict[str, str], tmp_path: Path) -> None:
    # The last rate takes an hour; engines warm up at the middle one.
    options = ["--rates", "50,40,0.001", "--num-prompts", "2", "--warmup-requests", "2", "--policies", "static"]
    command = [psctl_script, "bench", "slo", *options, "--json"]
    workspace = tmp_path / "workspace"
    environment = os.environ | tiny | {"PSCTL_WORKSPACE": str(workspace)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not list(workspace.rglob("real-static-40-0.parquet")) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    result = json.loads(stdout)
    assert (result["num_finished"], result["num_runs"], result["was_interrupted"]) == (2, 3, True)
    assert f"--resume {result['run_dir']} goes on" in stderr
    assert "1 of 3 runs are not finished" in (Path(result["run_dir"]) / "report.html").read_text()
    rest = [psctl_script, "bench", "slo", "--rates", "50,40", *options[2:], "--json", "--resume", result["run_dir"]]
    done = subprocess.run(rest, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_finished"] == 2
