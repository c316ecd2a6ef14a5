"""tests/benchmarks/lease.sh: the rehearsal of all parts, and what becomes of the others where one goes wrong."""

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from patchedserve.tests.benchmarks.lease import run
from patchedserve.tests.benchmarks.lease.forms import FORMS, problems_of
from patchedserve.tests.benchmarks.lease.plan import PLAN, Part
from patchedserve.tests.benchmarks.lease.scale import REHEARSAL
from patchedserve.tests.benchmarks.lease.versions import pins, versions

_LONG_S = 60.0


def _planted(name: str, *, most_s: float = _LONG_S, least_s: float = 0.0, worker: str = "none") -> Part:
    scale = REHEARSAL
    source = f"patchedserve.tests.lease.planted:{name}"
    return Part(name, worker, source, least_s / scale.least_share, most_s / scale.most_share)


def _manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def _labels(folder: Path, name: str) -> list[str]:
    return [row["label"] for row in json.loads((folder / "results" / f"{name}.json").read_text())["rows"]]


def _rehearse(folder: Path, plan: Sequence[Part], seconds: float = 600.0) -> int:
    return run.main(["--rehearse", str(folder), "--seconds", str(seconds)], plan)


def _lease(repository: Path, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [repository / "tests" / "benchmarks" / "lease.sh", *map(str, arguments)],
        env=os.environ | {"PYTHON": sys.executable} | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.exhaustive
@pytest.mark.slow
def test_rehearsal_stops_in_time_and_resumes(repository: Path, tmp_path: Path) -> None:
    state, out = tmp_path / "state", tmp_path / "out"
    arguments = ("--rehearse", state, "--out", out)
    own = {"PSCTL_LEASE_STATE": str(tmp_path / "none"), "OUT": ""}
    first = _lease(repository, *arguments, "--seconds", "12", **own)
    assert first.returncode == 1, first.stdout + first.stderr
    before = _manifest(state)
    statuses = {name: about["status"] for name, about in before["parts"].items()}
    # Fast machines come further than slow ones, but none as far as this.
    assert statuses["tests"] in ("left out", "partial")
    assert f"tests: {statuses['tests']}" in first.stdout
    assert set(statuses) == {part.name for part in PLAN}
    assert all(about["reason"] for about in before["parts"].values() if about["status"] != "done")
    assert before["runs"][0]["seconds"] < 20
    done = {path: path.stat().st_mtime_ns for path in (state / "results").iterdir() if statuses[path.stem] == "done"}
    rows = {path.stem: _labels(state, path.stem) for path in (state / "results").iterdir()}

    second = _lease(repository, *arguments, **own)
    assert second.returncode == 0, second.stdout + second.stderr
    after = _manifest(state)
    assert {name: about["status"] for name, about in after["parts"].items()} == {part.name: "done" for part in PLAN}
    assert {path: path.stat().st_mtime_ns for path in done} == done
    for part in PLAN:
        labels = _labels(state, part.name)
        assert labels[: len(rows.get(part.name, []))] == rows.get(part.name, [])
        assert len(labels) == len(set(labels)) > 0
        assert problems_of(part.name, json.loads((state / "results" / f"{part.name}.json").read_text())) == []
        for form in FORMS[part.name][:1]:
            assert form.title in (state / "tables.md").read_text()
            assert form.title in first.stdout + second.stdout
    assert [path.name for path in out.iterdir()] == ["lease.tar.gz"]
    with tarfile.open(out / "lease.tar.gz") as tar:
        names = set(tar.getnames())
    assert {"manifest.json", "tables.md", *(f"results/{part.name}.json" for part in PLAN)} <= names


@pytest.mark.exhaustive
@pytest.mark.slow
def test_run_continues_after_a_part_hangs_dies_or_raises(tmp_path: Path) -> None:
    plan = [_planted(name) for name in ("dies", "raises", "fine")]
    plan.insert(1, _planted("hangs", most_s=3.0))
    assert _rehearse(tmp_path, plan) == 1
    parts = _manifest(tmp_path)["parts"]
    assert {name: about["status"] for name, about in parts.items()} == {
        "dies": "failed",
        "hangs": "failed",
        "raises": "failed",
        "fine": "done",
    }
    assert parts["dies"]["reason"] == "the worker has ended (SIGKILL)"
    assert parts["hangs"]["reason"] == "killed after 3 s"
    assert parts["raises"]["reason"].startswith("nan: the result is not a number")
    raised = json.loads((tmp_path / "results" / "raises.json").read_text())
    assert [row["label"] for row in raised["rows"]] == ["right"]
    assert raised["errors"][0] == {"label": "wrong", "error": "ValueError: no such kernel"}
    # What they had measured before is kept.
    assert _labels(tmp_path, "hangs") == _labels(tmp_path, "dies") == ["before"]
    with tarfile.open(tmp_path / "lease.tar.gz") as tar:
        assert {"results/hangs.json", "logs/none.log"} <= set(tar.getnames())


@pytest.mark.exhaustive
@pytest.mark.slow
def test_parts_that_do_not_fit_are_skipped_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = [_planted("raises", least_s=500.0), _planted("slow"), _planted("fine")]
    assert _rehearse(tmp_path, plan, seconds=10.0) == 1
    parts = _manifest(tmp_path)["parts"]
    assert [parts[name]["status"] for name in ("raises", "slow")] == ["left out", "partial"]
    assert parts["raises"]["reason"].startswith("it needs 500 s, and ")
    assert parts["slow"]["reason"].startswith("no time for row ")
    assert "left out: raises" in capsys.readouterr().out
    measured = _labels(tmp_path, "slow")
    assert 0 < len(measured) < 20

    (tmp_path / "measured.txt").unlink(missing_ok=True)
    plan[0] = _planted("dies")
    (tmp_path / "repaired").touch()
    assert _rehearse(tmp_path, [plan[0], plan[1], _planted("fine")]) == 0
    assert _labels(tmp_path, "slow")[: len(measured)] == measured
    assert len(_labels(tmp_path, "slow")) == 20
    assert len(_manifest(tmp_path)["runs"]) == 2


@pytest.mark.exhaustive
@pytest.mark.slow
def test_nothing_is_measured_twice_and_failures_are_retried_last(tmp_path: Path) -> None:
    assert _rehearse(tmp_path, [_planted("dies"), _planted("fine")]) == 1
    (tmp_path / "repaired").touch()
    seen: list[str] = []
    plan = [_planted("dies"), _planted("fine"), _planted("slow", worker="other")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "_print", seen.append)
        assert _rehearse(tmp_path, plan) == 0
    order = [line.strip().partition(":")[0] for line in seen if " in " in line]
    assert order == ["slow", "dies"]
    assert _labels(tmp_path, "dies") == ["before"]
    assert (tmp_path / "measured.txt").read_text().split() == ["one", "two"]


@pytest.mark.slow
def test_rehearsal_folder_is_refused_for_real_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _rehearse(tmp_path, [_planted("fine")]) == 0
    with pytest.raises(SystemExit) as ended:
        run.main(["--state", str(tmp_path)], [])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("arguments", [("--seconds", "0"), ("--seconds", "soon"), ("--nothing",)])
def test_invalid_input_gives_a_one_line_error(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run.main(arguments, [])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("lease.sh: ")
    assert error.count("\n") == 1


@pytest.mark.slow
def test_too_large_tree_is_not_packed(repository: Path, tmp_path: Path) -> None:
    if not (repository / ".git").exists():
        pytest.skip("the tree is not a git checkout")
    done = _lease(repository, "--pack", PSCTL_LEASE_MOST_MIB="1", PSCTL_LEASE_STATE=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "are more than 1 MiB" in done.stderr
    assert "git sparse-checkout set" in done.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_outcomes_of_tests_are_reported_except_those_without_their_model(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "from patchedserve.data.models import bundled\n"
        "bundled.MODELS_DIR = bundled.MODELS_DIR / 'nowhere'\n"
        "def test_fine(): pass\n"
        "def test_wrong(): raise ValueError('no such kernel')\n"
        "def test_skipped(): pytest.skip('no device')\n"
        "def test_known(): raise ValueError\n"
        "def test_bundled(): bundled.bundled_model_path('emoji-xl').joinpath('model_index.json').read_text()\n"
    )
    report, known = tmp_path / "report.jsonl", tmp_path / "known.json"
    known.write_text('["test_some.py::test_known"]')
    plugin = "patchedserve.tests.benchmarks.lease.pytest_plugin"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", plugin, tmp_path],
        cwd=tmp_path,
        env=os.environ | {"LEASE_TESTS_REPORT": str(report), "LEASE_TESTS_KNOWN": str(known)},
        capture_output=True,
        check=False,
    )
    collected, *messages = map(json.loads, report.read_text().splitlines())
    assert len(collected["collected"]) == 4
    outcomes = {each["row"]["label"].rpartition("::")[2]: each["row"] for each in messages}
    assert {name: row["outcome"] for name, row in outcomes.items()} == {
        "test_fine": "passed",
        "test_wrong": "failed",
        "test_skipped": "skipped",
        "test_bundled": "left out",
    }
    assert outcomes["test_wrong"]["message"] == "ValueError: no such kernel"


def test_malformed_tables_have_problems() -> None:
    row = {"label": "SML", "unit": "GB/s", "value": 1.0, "ms": None}
    assert problems_of("ceilings", {"rows": [row]}) == []
    assert problems_of("ceilings", {"rows": [row | {"value": float("nan")}]}) != []
    assert problems_of("ceilings", {"rows": [{key: row[key] for key in ("label", "unit")}]}) != []
    assert (
        problems_of("vae", {"rows": [{"label": "1", "forms": [{"form": "a", "ms_an_image": "3", "difference": 0.0}]}]})
        != []
    )


def test_versions_are_listed_with_their_pins() -> None:
    pinned = pins()
    found = {str(each["name"]): each for each in versions()}
    assert found["torch"]["pinned"] == pinned["torch"]
    assert all(each["pinned"] for each in found.values())


def test_plan_fits_into_two_calls() -> None:
    assert len({part.name for part in PLAN}) == len(PLAN)
    assert set(FORMS) == {part.name for part in PLAN}
    assert sum(part.least_s for part in PLAN) <= 560
    assert all(part.least_s < part.most_s <= 570 for part in PLAN)
