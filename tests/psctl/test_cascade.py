"""A cascade from its discriminator to a simulated trace, as users run it, on a bundled model in a few steps."""

import json
from pathlib import Path
from typing import Any

import pytest

from patchedserve.data.tables.cascade import LEGS, PLANS
from patchedserve.data.tables.schemas import RECORDS, read_rows

from ..conftest import RunPsctl

CASCADE = "emoji-xl:1,emoji-xl:3"
SMALL = ("--cascade", CASCADE, "--resolutions", "64,128x64")


def result_of(done: Any) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_from_the_discriminator_to_the_comparison_of_systems(run_psctl: RunPsctl, tmp_path: Path) -> None:
    missing = run_psctl("profile", "cascade", *SMALL, "--num-prompts", "0")
    assert missing.returncode == 2
    assert "psctl train-predictor discriminator --cascade emoji-xl:1,emoji-xl:3" in missing.stderr

    trained = result_of(
        run_psctl("train-predictor", "discriminator", *SMALL, "--num-prompts", "40", "--steps", "8", "--json")
    )
    assert trained["fit"]["num_real"] + trained["fit"]["num_drawn"] + trained["fit"]["num_held_out"] == 80
    assert Path(tmp_path, trained["file"]).is_file()

    measure = ("profile", "cascade", *SMALL, "--num-prompts", "24", "--batch-sizes", "1,2", "--json")
    profiled = result_of(run_psctl(*measure))
    for leg, steps in (("light", 1), ("heavy", 3)):
        assert profiled[leg]["num_steps"] == steps
        for times in profiled[leg]["sizes"].values():
            # Other tests run beside this one, so that a batch of one may take longer than one of two.
            assert all(number > 0 for number in (*times["latency_s"], *times["throughput"], *times["step_s"]))
    assert profiled["light"]["score_s"] > 0
    assert profiled["heavy"]["score_s"] == 0
    again = run_psctl(*measure)
    assert "Times were measured before" in again.stderr
    assert result_of(again)["bank"] == profiled["bank"]

    serve = ("simulate", "--cascade", CASCADE, "--gpus", "3", "--request-rate", "20", "--slo-scale", "3")
    summary = result_of(run_psctl(*serve, "--num-prompts", "80", "--json"))
    assert summary["total_requests"] == 80
    assert summary["config"]["system"] == "diffserve"
    assert summary["quality"]["num_images"] == summary["completed_requests"]
    run_dir = tmp_path / summary["run_dir"]
    assert len(read_rows(run_dir / "records.parquet", RECORDS)) == 80
    legs, plans = read_rows(run_dir / "legs.parquet", LEGS), read_rows(run_dir / "plans.parquet", PLANS)
    assert {row["request_id"] for row in legs} <= set(range(80))
    assert all(row["is_deferred"] == (row["confidence"] < row["threshold"]) for row in legs if row["confidence"])
    assert all(row["light_workers"] + row["heavy_workers"] == 3 for row in plans)
    page = (run_dir / "report.html").read_text()
    assert "Threshold" in page or "threshold of confidence" in page
    assert (run_dir / "plots" / "cascade.png").stat().st_size > 10_000
    own = ("--objective", "quality", "--skip-light", "--threshold-per-resolution")
    by_quality = result_of(run_psctl(*serve, "--num-prompts", "80", *own, "--json"))
    assert by_quality["config"]["objective"] == "quality"
    assert by_quality["total_requests"] == 80
    # The same seed gives the same run.
    other = result_of(run_psctl(*serve, "--num-prompts", "80", "--json"))
    for name in ("quality", "slo_violation_rate", "heavy_share", "switches"):
        assert other[name] == summary[name]

    compared = result_of(
        run_psctl(
            *("bench", "cascade", "--cascade", CASCADE, "--gpus", "3", "--trace", "shape", "--rate-range", "5:30"),
            *("--duration", "5", "--systems", "diffserve,proteus,clipper-light", "--num-seeds", "2", "--json"),
            *("--slo-scales", "2.5,4", "--num-resamples", "3", "--ours"),
        )
    )
    assert [row["system"] for row in compared["rows"][:3]] == ["diffserve", "proteus", "clipper-light"]
    assert compared["rows"][0]["against_base"] is None
    assert compared["rows"][1]["against_base"]["fid_difference"]["low"] is not None
    assert compared["rows"][2]["heavy_share"] == 0
    ours = {row["system"]: row for row in compared["rows"][3:8]}
    flags = ("objective quality", "on-late light", "replan-on-burst", "skip-light", "threshold-per-resolution")
    assert list(ours) == [f"diffserve --{flag}" for flag in flags]
    assert all(row["against_base"]["violation_difference"]["low"] is not None for row in ours.values())
    for name in ("over-lateness.png", "over-slo-scales.png", "report.html", "result.json"):
        assert (tmp_path / compared["run_dir"] / name).is_file()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("simulate", "--cascade", "emoji-xl:4"), "must be two models"),
        (("simulate", "--cascade", "emoji-xl:4,emoji-xl:50"), "psctl profile cascade --cascade emoji-xl:4,emoji-xl:50"),
        (("simulate", "--cascade", CASCADE, "--max-batch-size", "3"), "--max-batch-size is for a single model"),
        (("simulate", "--cascade", CASCADE, "--system", "bucketed"), "must be one of diffserve"),
        (("simulate", "--system", "diffserve"), "--system diffserve is of two models: give --cascade"),
        (("simulate", "--balance", "random"), "--balance belongs to --cascade"),
        (("simulate", "--cascade", CASCADE, "--cascade-profile", "none.json"), "none.json"),
        (("bench", "cascade", "--systems", "diffserve,other"), "no profile of the cascade"),
        (("profile", "cascade", "--batch-sizes", "2,4"), "begin with 1"),
        (("profile", "cascade", "--cascade", "emoji-xl:4,nobody"), "unknown model 'nobody'"),
        (("train-predictor", "discriminator", "--cascade", "emoji-xl,emoji-xl"), "must differ"),
        (("bench", "slo", "--trace", "shape"), "has rates of its own"),
        (("simulate", "--trace", "shape"), "needs its least and greatest rate"),
        (("simulate", "--rate-range", "1:2"), "belongs to --trace shape"),
    ],
)
def test_bad_requests_get_one_line(run_psctl: RunPsctl, arguments: tuple[str, ...], reason: str) -> None:
    done = run_psctl(*arguments)
    assert done.returncode == 2, done.stderr
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
