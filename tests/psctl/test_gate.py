"""`psctl gate` as users run it: exit codes, reports, baselines, bad usage."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ..conftest import RunPsctl
from ..support.gate_results import write_results, write_usual_results


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return write_usual_results(tmp_path)


def _write_gates(folder: Path, *gates: str) -> Path:
    file = folder / "gates.toml"
    file.write_text(
        'results = ["results.json"]\nbaseline = "baseline.json"\n' + "".join(f"[[gate]]\n{g}\n" for g in gates)
    )
    return file


@pytest.mark.parametrize(
    ("gates", "code", "verdict"),
    [
        (["metric = 'fid'\nmax = 33"], 0, "pass"),
        (["metric = 'fid'\nmax = 33", "metric = 'clip'\nmin = 31.1"], 3, "not enough evidence"),
        (["metric = 'fid'\nmax = 20", "metric = 'clip'\nmin = 31.1"], 1, "fail"),
    ],
)
def test_exit_codes_and_reports(
    run_psctl: RunPsctl, results: Path, tmp_path: Path, gates: list[str], code: int, verdict: str
) -> None:
    file = _write_gates(tmp_path, *gates)
    (tmp_path / "summary.md").write_text("# before\n")
    done = run_psctl(
        "gate",
        file,
        "--json",
        "--junit",
        "ci/gates.xml",
        "--markdown",
        "ci/gates.md",
        GITHUB_STEP_SUMMARY=str(tmp_path / "summary.md"),
    )
    assert done.returncode == code, done.stderr
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["verdict"] == verdict
    found = [each["verdict"] for each in report["gates"]]
    assert len(found) == len(gates)
    suite = ElementTree.parse(tmp_path / "ci" / "gates.xml").getroot()[0]
    assert suite.get("tests") == str(len(gates))
    assert suite.get("failures") == str(found.count("fail"))
    assert suite.get("errors") == str(found.count("not enough evidence"))
    assert len(suite.findall("testcase/failure")) == found.count("fail")
    assert len(suite.findall("testcase/error")) == found.count("not enough evidence")
    markdown = (tmp_path / "ci" / "gates.md").read_text()
    assert len([line for line in markdown.splitlines() if line.startswith("|")]) == len(gates) + 2
    assert (tmp_path / "summary.md").read_text() == "# before\n" + markdown


def test_table_is_printed_and_a_bar_in_a_name_is_kept(run_psctl: RunPsctl, results: Path, tmp_path: Path) -> None:
    file = _write_gates(tmp_path, "metric = 'clip'\nname = 'a|b [bold]'\nmin = 30")
    done = run_psctl("gate", file, "--markdown", "gates.md")
    assert done.returncode == 0, done.stderr
    assert "a|b [bold]" in done.stdout
    assert ">= 30" in done.stdout
    row = (tmp_path / "gates.md").read_text().splitlines()[-1]
    assert "a\\|b \\[bold]" in row
    assert row.replace("\\|", "").count("|") == 9


def test_baseline_is_written_and_then_compared_with(run_psctl: RunPsctl, results: Path, tmp_path: Path) -> None:
    file = _write_gates(tmp_path, "metric = 'fid'\nmax_increase = 5", "metric = 'clip'\nmin = 20")
    done = run_psctl("gate", file)
    assert done.returncode == 2
    assert "baseline.json: cannot read a result" in done.stderr
    done = run_psctl("gate", file, "--update-baseline", "--json")
    assert (done.returncode, json.loads(done.stdout)["verdict"]) == (0, "pass")
    assert [each["verdict"] for each in json.loads(done.stdout)["gates"]] == ["updated", "pass"]
    assert run_psctl("gate", file, "-q").returncode == 0
    # The value and its whole interval are worse by 15.
    write_results(results, fid=(45.0, 43.0, 47.0), clip__=(31.0, 30.8, 31.2))
    assert run_psctl("gate", file, "-q").returncode == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gates.toml"], "gates.toml: cannot be read: no such file"),
        (["good.toml", "--results", "none.json"], "none.json: cannot read a result"),
        (["unknown.toml"], "no metric 'sharpness' in"),
        (["good.toml", "--update-baseline"], "--update-baseline needs a file"),
        ([], "Missing argument"),
    ],
)
def test_bad_usage_gives_a_one_line_error(
    run_psctl: RunPsctl, results: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    head = 'results = ["results.json"]\n[[gate]]\n'
    (tmp_path / "good.toml").write_text(head + "metric = 'fid'\nmax = 3\n")
    (tmp_path / "unknown.toml").write_text(head + "metric = 'sharpness'\nmax = 3\n")
    done = run_psctl("gate", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
