"""`psctl train-predictor cache`: its files and figures, and wrong usage."""

import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from patchedserve.psctl.app import main
from patchedserve.psctl.commands.train_predictor import train_predictor_cache
from patchedserve.training.cache.fitting import FitSettings
from patchedserve.training.cache.predictor import CachePredictor

from ..conftest import RunPsctl
from ..support.block_profiles import FACTS, write_profile

TABLE = Path("psctl-workspace/emoji-xl/cpu/tables/blocks.parquet")
PREDICTOR = Path("psctl-workspace/emoji-xl/cpu/predictors/cache.safetensors")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process, in an empty folder; returns exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # otherwise the command sets a variable that outlives the test
    monkeypatch.setenv("PSCTL_TRAIN_PREDICTOR_CACHE_THRESHOLD", "0.01")  # outputs of the drawn profile change little

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(["train-predictor", "cache", "--device", "cpu", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_command_writes_a_predictor_a_plot_and_figures(run_psctl: RunPsctl, tmp_path: Path) -> None:
    write_profile(tmp_path / TABLE)
    done = run_psctl("train-predictor", "cache", "--device", "cpu", "--threshold", "0.02", "--json", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert Path(result["predictor"]) == PREDICTOR
    assert (result["model"], result["scheduler"], result["patch_size"]) == ("emoji-xl", "EulerDiscreteScheduler", 8)
    assert result["blocks"] == ["down0", "mid", "up0"]
    assert result["threshold"] == 0.02
    assert result["precision"] > 0.9
    assert result["recall"] > result["baseline"]["recall"]
    loaded = CachePredictor.load(tmp_path / PREDICTOR, expect=FACTS)
    assert loaded.report["recall"] == result["recall"]
    with Image.open(tmp_path / result["plot"]) as plot:
        assert plot.format == "PNG"
        assert plot.width > 1000
    assert sorted(path.name for path in (tmp_path / PREDICTOR).parent.iterdir()) == ["cache.png", "cache.safetensors"]


def test_table_and_output_path_are_printed_without_json(run: Run, tmp_path: Path) -> None:
    table = write_profile(tmp_path / "mine.parquet", facts=replace(FACTS, model="a/b"))
    code, out, err = run("--table", str(table), "--output-file", "new/p.safetensors", "--trees", "3", "--depth", "4")
    assert code == 0
    for word in ("a/b, EulerDiscreteScheduler, threshold 0.01", "random forest", "input changed by at most", "recall"):
        assert word in out
    assert "Predictor: " in err
    assert CachePredictor.load("new/p.safetensors").forest.num_trees == 3
    assert CachePredictor.load("new/p.safetensors").forest.depth <= 4
    assert Path("new/p.png").is_file()


@pytest.mark.slow
def test_options_reach_the_training(run: Run, tmp_path: Path) -> None:
    write_profile(tmp_path / TABLE)
    options = ("--seed", "5", "--min-confidence", "0.7", "--max-rows", "5000", "--trees", "2", "--json", "--quiet")
    results = []
    for _ in range(2):
        code, out, err = run(*options)
        assert (code, err) == (0, "")
        results.append(json.loads(out))
    assert results[0] == results[1]
    assert (results[0]["seed"], results[0]["min_confidence"], results[0]["trees"]) == (5, 0.7, 2)
    assert 4500 < results[0]["rows"] < 5500 < results[0]["profiled_rows"]
    assert CachePredictor.load(PREDICTOR).min_confidence == 0.7


def test_defaults_equal_those_of_the_settings() -> None:
    defaults = {name: option.default for name, option in inspect.signature(train_predictor_cache).parameters.items()}
    settings = FitSettings()
    for name in ("trees", "depth", "min_confidence", "seed", "backend"):
        assert defaults[name] == getattr(settings, name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--threshold", "0"), "threshold is 0, but it must be a number above 0"),
        (("--threshold", "nan"), "threshold is nan"),
        (("--threshold", "little"), "Invalid value for '--threshold'"),
        (("--trees", "0"), "Invalid value for '--trees'"),
        (("--depth", "99"), "Invalid value for '--depth'"),
        (("--min-confidence", "1.1"), "Invalid value for '--min-confidence'"),
        (("--backend", "xgboost"), "Invalid value for '--backend'"),
        (("--max-rows", "3"), "Invalid value for '--max-rows'"),
        (("--device", "tpu"), "unknown device 'tpu'"),
        (("--model", "emoji-3"), "no block profile psctl-workspace/emoji-3/cpu/tables/blocks.parquet; make one with: "),
        (("--table", "none.parquet"), "no block profile none.parquet; make one with: psctl profile blocks"),
        (("--model", "emoji-3", "--table", str(TABLE)), "is a profile of emoji-xl; train its predictor with --model"),
        (("--threshold", "1e-9"), "0 of the "),
    ],
)
def test_bad_usage_gives_a_one_line_error(run: Run, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    write_profile(tmp_path / TABLE, num_requests=4, num_steps=6)
    code, out, err = run("--quiet", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("Error: ")
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / PREDICTOR).exists()


def test_damaged_profile_keeps_the_old_predictor(run: Run, tmp_path: Path) -> None:
    write_profile(tmp_path / TABLE)
    assert run("--trees", "1")[0] == 0
    before = PREDICTOR.read_bytes()
    content = TABLE.read_bytes()
    TABLE.write_bytes(content[: len(content) // 2])
    code, out, err = run("--quiet")
    assert (code, out) == (2, "")
    assert err == f"Error: {TABLE}: cannot read the blocks table: it is damaged or not parquet\n"
    assert PREDICTOR.read_bytes() == before


def test_unwritable_folder_is_reported(run: Run, tmp_path: Path) -> None:
    write_profile(tmp_path / TABLE, num_requests=2, num_steps=3)
    (tmp_path / "file").write_text("")
    code, _, err = run("--quiet", "--output-file", "file/cache.safetensors")
    assert code == 1
    assert err.count("\n") == 1
