"""`psctl profile latency` and `psctl train-predictor latency` on tiny models: tables, resuming, fits, bad input."""

import json
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from patchedserve.data.errors import UsageError
from patchedserve.data.resolution import Resolution, parse_list
from patchedserve.data.tables.latency import LatencyRow, LatencyTable, read_latencies, write_latencies
from patchedserve.data.workspace import ModelWorkspace, Workspace
from patchedserve.profiling.measure import latency
from patchedserve.training.latency.predictor import LatencyPredictor, load_workspace_predictor

from ..conftest import RunPsctl
from ..support.latency_tables import CIRCUMSTANCES, law_rows
from ..support.psctl_process import start_psctl
from ..support.tiny_models import save_tiny, tiny_sdxl
from ..support.waits import interrupted_when

SIZES = parse_list("32,48")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("latency")
    save_tiny(folder / "sdxl", tiny_sdxl(), guidance_scale=3.0, resolutions=["32", "48"])
    return {
        "PSCTL_MODEL": str(folder / "sdxl"),
        "PSCTL_WORKSPACE": str(folder / "workspace"),
        "PSCTL_DTYPE": "float32",
        "PSCTL_DEVICE": "cpu",
    }


def part_of(environment: dict[str, str]) -> ModelWorkspace:
    return Workspace(environment["PSCTL_WORKSPACE"]).for_model(environment["PSCTL_MODEL"], "cpu")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_from_profile_to_predictor(run_psctl: RunPsctl, environment: dict[str, str], tmp_path: Path) -> None:
    missing = run_psctl("train-predictor", "latency", **environment)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "no table of step latencies for" in missing.stderr
    assert f"measure one: psctl profile latency --model {environment['PSCTL_MODEL']}" in missing.stderr
    assert not Path(environment["PSCTL_WORKSPACE"]).exists()

    options = ("--combinations", "20", "--max-batch-size", "5", "--repeats", "2")
    done = run_psctl("profile", "latency", *options, "--json", "--quiet", **environment)
    assert (done.returncode, done.stderr) == (0, "")
    profiled = json.loads(done.stdout)
    # There are 20 combinations of two resolutions and up to five requests.
    assert len(profiled["rows"]) == 20
    assert {row["combination"] for row in profiled["rows"]} >= {"32x32", "48x48", "5*48x48", "2*32x32 + 3*48x48"}
    assert (profiled["is_complete"], profiled["was_interrupted"], profiled["dtype"]) == (True, False, "float32")
    assert (profiled["guidance_scale"], profiled["is_guided"]) == (3.0, True)
    for row in profiled["rows"]:
        assert 0 < row["min_ms"] <= row["median_ms"] <= row["p95_ms"]
    again = run_psctl("profile", "latency", *options, **environment)
    assert again.returncode == 0
    assert "Everything was measured before" in again.stderr
    assert "slowest / fastest" in again.stdout

    # The error of a table of two repeats depends on the load of the machine.
    done = run_psctl("train-predictor", "latency", "--force", "--json", "--quiet", **environment)
    assert (done.returncode, done.stderr.count("\n") <= 1) == (0, True), done.stderr
    assert done.stderr.startswith(("Warning: the predictor is saved all the same: ", "\n")) or not done.stderr
    trained = json.loads(done.stdout)
    assert trained["table"] == profiled["table"]
    assert (trained["fit"]["num_train"], len(trained["fit"]["held_out"])) == (16, 4)
    assert set(trained["fit"]["errors"]) == {"svr", "linear", "pixels"}
    assert (trained["kind"], trained["fit"]["noise_floor"]) == (trained["fit"]["kept"], profiled["noise_floor"])
    assert trained["prediction_us"] > 0
    part = part_of(environment)
    assert Path(trained["predictor"]) == part.root / "predictors" / "latency.safetensors"
    assert Image.open(trained["plot"]).width > 800
    table = read_latencies(profiled["table"])
    assert table.circumstances is not None
    predictor = load_workspace_predictor(part, expect=table.circumstances)
    assert predictor.step_latency_s([SIZES[0], SIZES[1]]) > 0
    with pytest.raises(UsageError, match="is for dtype float32, but bfloat16 is served"):
        load_workspace_predictor(part, expect=replace(table.circumstances, dtype="bfloat16"))


@pytest.mark.slow
def test_table_of_another_program_is_read(run_psctl: RunPsctl, tmp_path: Path) -> None:
    lines = [f"{row.label},{row.median_ms}" for row in law_rows(30)]
    (tmp_path / "h100.csv").write_text("\n".join(["combination,ms", *lines]))
    refused = run_psctl("train-predictor", "latency", "--table", "h100.csv", "--device", "cpu")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "h100.csv does not say which model and device it is of; give --output-file" in refused.stderr
    # The device of the table need not exist on this machine.
    options = ("--table", "h100.csv", "--output-file", "new/h100.safetensors", "--device", "cuda:7")
    done = run_psctl("train-predictor", "latency", *options)
    assert done.returncode == 0, done.stderr
    for word in (
        "imported table",
        "noise floor",
        "(kept)",
        "MAPE",
        "R2",
        "MSE",
        "SVR",
        "linear baseline",
        "look-up by pixels",
        "held out",
    ):
        assert word in done.stdout
    assert LatencyPredictor.load(tmp_path / "new" / "h100.safetensors").step_latency_s([Resolution(128, 128)]) > 0
    assert (tmp_path / "new" / "h100.png").exists()
    assert not (tmp_path / "psctl-workspace").exists()


def test_inaccurate_predictor_is_not_saved(run_psctl: RunPsctl, tmp_path: Path) -> None:
    lines = [f"{row.label},{row.median_ms * (3 if index % 2 else 1)}" for index, row in enumerate(law_rows(40))]
    (tmp_path / "busy.csv").write_text("\n".join(["combination,ms", *lines]))
    command = ("train-predictor", "latency", "--table", "busy.csv", "--output-file", "p.safetensors")
    done = run_psctl(*command, "--quiet")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert re.match(r"Error: the predictor is not saved: it is off by \d+\.\d% on combinations .*--force", done.stderr)
    assert not (tmp_path / "p.safetensors").exists()
    done = run_psctl(*command, "--quiet", "--force")
    assert done.returncode == 0
    assert done.stderr.startswith("Warning: the predictor is saved all the same: it is off by ")
    assert (tmp_path / "p.safetensors").exists()


def test_table_of_another_model_or_one_that_is_not_finished(run_psctl: RunPsctl, tmp_path: Path) -> None:
    table = LatencyTable(tuple(law_rows(20)), CIRCUMSTANCES, {"timings": 600})
    write_latencies(tmp_path / "t.parquet", table)
    done = run_psctl("train-predictor", "latency", "--table", "t.parquet", "--model", "emoji-3", "--device", "cpu")
    assert done.returncode == 2
    assert "t.parquet is of emoji-xl on cpu, not of emoji-3 on cpu; give --model emoji-xl --device cpu" in done.stderr
    done = run_psctl("train-predictor", "latency", "--table", "t.parquet", "--device", "cpu", "--quiet")
    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr
    assert done.stderr.startswith("Warning: t.parquet is 10% measured; ")
    assert (tmp_path / "psctl-workspace" / "emoji-xl" / "cpu" / "predictors" / "latency.safetensors").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("combination,ms\n128,nan\n", "t.csv, row 1: a time is nan ms"),
        ("combination,ms\n128,5\n", "the table holds one combination, but a latency predictor needs at least 10"),
        ("combination,ms\n128,5\n192,6\n", "the table holds 2 combinations"),
        ("size,ms\n128,5\n", "t.csv: has the columns size, ms"),
    ],
)
def test_bad_tables_give_a_one_line_error(run_psctl: RunPsctl, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(content)
    done = run_psctl("train-predictor", "latency", "--table", "t.csv", "--output-file", "p.safetensors", "--quiet")
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "p.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--combinations", "3"], "3 combinations were asked for, but one request and the largest batch of each of 2"),
        (["--max-batch-size", "0"], "--max-batch-size"),
        (["--max-batch-size", "257"], "--max-batch-size"),
        (["--repeats", "0"], "--repeats"),
        (["--resolutions", "32,huge"], "'huge'"),
        (
            ["--engine", "plain", "--order", "patch"],
            "--order does not work with --engine plain: it is only for --engine patched",
        ),
        (["--model", "emoji-xxl"], "emoji-xl, emoji-3"),
    ],
)
def test_bad_usage_gives_a_one_line_error(
    run_psctl: RunPsctl, environment: dict[str, str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    options = ("--workspace", tmp_path / "own", "--quiet", "--json")
    done = run_psctl("profile", "latency", *arguments, *options, **environment)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list((tmp_path / "own").glob("**/*.parquet"))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ctrl_c_then_the_same_command_resumes(run_psctl: RunPsctl, environment: dict[str, str], tmp_path: Path) -> None:
    options = ["--combinations", "14", "--max-batch-size", "4", "--workspace", str(tmp_path / "own")]
    command = ["profile", "latency", *options, "--repeats", "500"]
    process = start_psctl(*command, cwd=tmp_path, env=environment)
    stdout, stderr = interrupted_when(process, lambda: any(tmp_path.glob("own/*/cpu/tables/latency-*.parquet")))
    assert process.returncode == 130, stderr
    assert stderr.endswith("The same command continues from here.\nError: interrupted\n")
    assert "slowest / fastest" in stdout
    (path,) = tmp_path.glob("own/*/cpu/tables/latency-*.parquet")
    table = read_latencies(path)
    assert 0 < table.share_done < 1
    assert Image.open(path.with_suffix(".png")).width > 800
    # Another round would take too long here; the same command first prints the number of visits already made.
    process = start_psctl(*command, cwd=tmp_path, env=environment)
    assert process.stderr is not None
    lines = [process.stderr.readline() for _ in range(2)]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    num_visits = sum(len(row.samples_ms) for row in table.rows) // latency.TIMINGS_PER_VISIT
    assert lines[1].startswith(f"visits: {7000 - num_visits:,} to do, ")
    assert process.returncode == 130


def test_duplicate_combinations_are_refused(tmp_path: Path) -> None:
    row = LatencyRow({SIZES[0]: 1}, (1.0,))
    write_latencies(tmp_path / "t.parquet", LatencyTable((row, row), CIRCUMSTANCES, {}))
    with pytest.raises(UsageError, match="occurs twice"):
        read_latencies(tmp_path / "t.parquet")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_quick_profile_and_accuracy_of_its_predictors(run_psctl: RunPsctl, environment: dict[str, str]) -> None:
    folder = Path(environment["PSCTL_MODEL"]).with_name("even")  # its latents can be cut into the cache's patches
    save_tiny(folder, tiny_sdxl(), guidance_scale=3.0, resolutions=["32", "64"])
    environment = environment | {"PSCTL_MODEL": str(folder), "PSCTL_CACHE_PATCH_SIZE": "4"}
    done = run_psctl("profile", "--quick", "--json", **environment)
    assert done.returncode == 0, done.stderr
    latency, end = json.JSONDecoder().raw_decode(done.stdout)
    blocks = json.loads(done.stdout[end:])
    # Every number of steps and requests is the smaller one.
    assert (latency["settings"]["combinations"], latency["settings"]["repeats"], len(latency["rows"])) == (60, 2, 60)
    assert latency["is_complete"]
    told = [line for line in done.stderr.splitlines() if " to do, " in line or " done in " in line]
    assert [line.rpartition(",")[0] if "to do" in line else line.partition(" done")[0] for line in told] == [
        "visits: 120 to do",
        "visits: 120",
        "denoising steps: 40 to do",
        "denoising steps: 40",
    ]
    assert blocks["num_rows"] > 0
    done = run_psctl("train-predictor", "latency", "--force", "--json", **environment)
    fit = json.loads(done.stdout)["fit"]
    assert (fit["num_train"] + len(fit["held_out"]), fit["errors"]["svr"]["mape"] > 0) == (60, True)
