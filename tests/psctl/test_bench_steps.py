"""`psctl bench steps`, on tiny models with random weights: its output, Ctrl-C, bad input."""

import json
from pathlib import Path

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.resolution import parse_list
from patchedserve.data.workspace import ModelWorkspace
from patchedserve.profiling.steps.bench import STEPS, BenchKind, step_experiment
from patchedserve.profiling.steps.breakdown import BREAKDOWN
from patchedserve.profiling.steps.combinations import Combination
from patchedserve.serving.models.build import build_model
from patchedserve.serving.options import EngineOptions

from ..conftest import RunPsctl
from ..support.bench_cases import FAST, ROW, squares
from ..support.psctl_process import start_psctl
from ..support.tiny_models import save_tiny, tiny_sd3, tiny_sdxl
from ..support.waits import interrupted_when


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("bench")
    save_tiny(folder / "sdxl", tiny_sdxl(), guidance_scale=3.0, resolutions=["32", "48", "64"])
    return {"PSCTL_MODEL": str(folder / "sdxl"), "PSCTL_WORKSPACE": str(folder / "workspace"), "PSCTL_DTYPE": "float32"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--combinations", "1,1"], "one for each of 32x32, 48x48, 64x64"),
        (["--combinations", "1,1,1", "--random", "3"], "--combinations and --random"),
        (["--random", "969"], "1 to 968"),
        (["--resolutions", "32,huge"], "'huge'"),
        (["--resolutions", "32,36"], "multiple of 8"),
        (["--repeats", "0"], "--repeats"),
        (["--model", "emoji-xxl"], "emoji-xl, emoji-3"),
        (["--cuda-graphs", "--device", "cpu"], "--cuda-graphs needs a CUDA device, but the model is on cpu"),
        (["--compile", "--breakdown"], "--breakdown does not work with --compile: it times single modules"),
    ],
)
def test_bad_usage_gives_a_one_line_error(
    run_psctl: RunPsctl, environment: dict[str, str], arguments: list[str], message: str
) -> None:
    done = run_psctl("bench", "steps", *arguments, "--quiet", "--json", **environment)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(Path(environment["PSCTL_WORKSPACE"]).glob("*/cpu/runs/*"))


@pytest.mark.parametrize("kind", [STEPS, BREAKDOWN], ids=lambda kind: kind.name)
def test_sizes_that_do_not_fit_the_model_leave_no_run(kind: BenchKind, tmp_path: Path) -> None:
    workspace = ModelWorkspace(tmp_path)
    model = build_model(tiny_sd3(), name="tiny", options=EngineOptions(order="patch", patch_size=3))
    with pytest.raises(UsageError, match="patch size 3 does not fit"):
        step_experiment(kind, model, [squares(1, 1, 1)], workspace, FAST)
    model = build_model(tiny_sd3(), name="tiny")
    with pytest.raises(UsageError, match="24x24: width and height must be multiples of 16"):
        step_experiment(kind, model, [Combination(parse_list("32,24"), (1, 0))], workspace, FAST)
    assert workspace.latest_run("bench-steps") is None


def test_group_without_a_command_shows_its_commands(run_psctl: RunPsctl) -> None:
    done = run_psctl("bench")
    assert done.returncode == 2
    assert "steps" in done.stdout


@pytest.mark.exhaustive
@pytest.mark.slow
def test_breakdown_command_prints_only_its_json(
    run_psctl: RunPsctl, environment: dict[str, str], tmp_path: Path
) -> None:
    options = ("--repeats", "2", "--warmup", "1", "--output-file", "result.json", "--quiet", "--json")
    done = run_psctl("bench", "steps", "--breakdown", *options, **environment)
    # Otherwise the profiler's library writes to stderr.
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert [row["label"] for row in result["rows"]] == ["SSMMLL"]
    assert (result["guidance_scale"], result["dtype"]) == (3.0, "float32")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ctrl_c_keeps_finished_measurements(environment: dict[str, str], tmp_path: Path) -> None:
    command = ["bench", "steps", "--combinations", ";".join(["1,1,1"] * 200), "--repeats", "3"]
    command += ["--workspace", str(tmp_path / "own"), "--output-file", "result.json"]
    process = start_psctl(*command, cwd=tmp_path, env=environment)
    stdout, stderr = interrupted_when(process, lambda: any(tmp_path.glob("own/*/cpu/runs/*/steps.json")), every_s=0.02)
    assert process.returncode == 130, stderr
    assert stderr.endswith("Error: interrupted\n")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["was_interrupted"]
    for word in ("SML", "S 32x32, M 48x48, L 64x64", "geometric mean", "as the best baseline", "float32"):
        assert word in stdout
    assert 1 <= len(result["rows"]) < 200
    assert all(set(row) == ROW for row in result["rows"])
    assert json.loads((Path(result["run_dir"]) / "steps.json").read_text()) == result
    assert (Path(result["run_dir"]) / "steps.png").exists()
