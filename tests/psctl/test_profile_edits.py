"""`psctl profile edits` on a tiny model, the file that it writes, and bad input."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from patchedserve.data.edits import TemplateSpec
from patchedserve.data.errors import UsageError
from patchedserve.data.resolution import Resolution, parse_list
from patchedserve.data.work import Work
from patchedserve.data.workspace import Workspace
from patchedserve.profiling.measure.edits import EditProfileSettings, profile_edits
from patchedserve.serving.core.record_key import RecordKey
from patchedserve.serving.editing.profile import EditProfile, Fit
from patchedserve.serving.editing.step_latency import TERMS, on_line, terms_of
from patchedserve.serving.editing.templates import TemplateStore
from patchedserve.serving.models.build import build_model
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.scheduling.step_latency import TableLatency

from ..conftest import RunPsctl
from ..support.edits import edit_request
from ..support.tiny_models import save_tiny, tiny_sd3, tiny_sdxl

SIZES = parse_list("64,128")
FEW = ("--resolutions", "64,128", "--combinations", "13", "--max-batch-size", "2", "--repeats", "1")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("edits")
    save_tiny(folder / "sdxl", tiny_sdxl(), guidance_scale=3.0, num_inference_steps=4, resolutions=["64", "128"])
    return {
        "PSCTL_MODEL": str(folder / "sdxl"),
        "PSCTL_WORKSPACE": str(folder / "workspace"),
        "PSCTL_DTYPE": "float32",
        "PSCTL_DEVICE": "cpu",
    }


@pytest.fixture(scope="module")
def profile(environment: dict[str, str]) -> dict[str, Any]:
    place = Workspace(environment["PSCTL_WORKSPACE"]).for_model(environment["PSCTL_MODEL"], "cpu")
    model = load_model(environment["PSCTL_MODEL"], "cpu", "float32")
    parts: list[tuple[str, int]] = []
    calls: list[int] = []

    def start(name: str, total: int) -> Any:
        parts.append((name, total))
        return lambda: calls.append(1)

    settings = EditProfileSettings(SIZES, 13, 2, 1)
    found = profile_edits(model, settings, place, on_start=start)
    assert parts == [("records", 2), ("visits of batches", 13), ("loads", 16)]
    assert len(calls) == 31
    assert model.reuse.store is None
    return found.to_json()


def test_batches_cover_the_whole_range() -> None:
    settings = EditProfileSettings(parse_list("128,192,256"), 200, 8)
    drawn = settings.drawn(0.6)
    assert drawn == settings.drawn(0.6)
    assert drawn != replace(settings, seed=1).drawn(0.6)
    assert len(drawn) == 200
    assert drawn[:12] == [
        ((size, share * 0.6),) * count for size in settings.resolutions for count in (1, 8) for share in (0.1, 1.0)
    ]
    inner = drawn[12:]
    assert {len(batch) for batch in inner} == set(range(1, 9))
    means = sorted(sum(share for _, share in batch) / len(batch) for batch in inner if len(batch) == 8)
    assert means[0] < 0.1
    assert means[-1] > 0.5
    assert all(0 < share <= 0.6 for batch in drawn for _, share in batch)
    held_out = settings.held_out(200, 12)
    assert (len(held_out), min(held_out) >= 12) == (40, True)


@pytest.mark.exhaustive
def test_steps_and_loads_of_real_edits_are_recorded(profile: dict[str, Any]) -> None:
    rows, loads = profile["steps"], profile["loads"]
    assert (len(rows), len(loads)) == (13, 16)
    # Corners of each size: one edit and two, with few cells and with many; none of them is held out.
    assert [len(row["edits"]) for row in rows[:8]] == [1, 1, 2, 2] * 2
    assert not any(row["is_held_out"] for row in rows[:8])
    assert sum(row["is_held_out"] for row in rows) == profile["compute"]["num_held_out"] == 3
    shares = [share for row in rows for *_, share in row["edits"]]
    assert 0 < min(shares) < 0.2
    assert 0.4 < max(shares) <= profile["up_to"] == 0.6
    assert {(width, height) for row in rows for width, height, _ in row["edits"]} == {(64, 64), (128, 128)}
    assert all(row[name] > 0 for row in rows for name in ("masked_s", "first_s", "whole_s", "ratio"))
    whole = [row["bytes"] for row in loads[:2]]
    assert whole[1] == pytest.approx(4 * whole[0], rel=0.05)
    assert profile["bytes_per_pixel_step"] == whole[1] / (128 * 128 * 8)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_record_has_the_stated_size(profile: dict[str, Any], tmp_path: Path) -> None:
    found = read(profile, tmp_path)
    model = build_model(tiny_sdxl(), name="tiny")
    edit = edit_request(0, SIZES[0], num_steps=3, template=TemplateSpec())
    model.reuse.use_template(edit, tmp_path / "t", lambda count: None)
    (one,) = TemplateStore(tmp_path / "t").list()
    assert found.record_bytes(RecordKey("emoji:0", SIZES[0], 3)) == pytest.approx(one["bytes"], rel=0.05)


def read(content: dict[str, Any], folder: Path) -> EditProfile:
    path = folder / "edits-1.json"
    path.write_text(json.dumps(content))
    return EditProfile.read(path)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_profile_round_trips_through_a_file(profile: dict[str, Any], tmp_path: Path) -> None:
    found = read(profile, tmp_path)
    assert found.to_json() == json.loads(json.dumps(profile)) | {
        name: found.to_json()[name] for name in ("steps", "loads", "compute", "first", "load", "terms", "load_terms")
    }
    whole = TableLatency({(SIZES[0],): 0.5})
    edits = [Work(64, 64, 0.25), Work(64, 64, 0.5)]
    assert found.steady_latency(whole).step_latency_s(edits) == on_line(found.compute.coefficients, terms_of(edits))
    assert found.first_latency(whole).step_latency_s([SIZES[0], *edits]) == 0.5 + on_line(
        found.first.coefficients, terms_of(edits)
    )
    assert found.load_s(1e6) == pytest.approx(found.load.coefficients[0] + 1e6 * found.load.coefficients[1])


def test_errors_are_measured_on_held_out_points() -> None:
    terms = [(1.0, float(number)) for number in range(10)]
    exact = Fit.of(terms, [2.0 + 0.5 * number for number in range(10)], [3, 7])
    assert exact.coefficients == pytest.approx((2.0, 0.5))
    assert (exact.num_held_out, exact.mape, exact.r2) == (2, pytest.approx(0.0, abs=1e-9), pytest.approx(1.0))
    # Held-out points do not move the line, which predicts 3.5 and 5.5 for 7 and 5.5.
    off = Fit.of(terms, [2.0 + 0.5 * number if number != 3 else 7.0 for number in range(10)], [3, 7])
    assert off.coefficients == pytest.approx((2.0, 0.5))
    assert off.mape == pytest.approx(0.25)
    assert off.r2 == pytest.approx(1 - 3.5**2 / (2 * 0.75**2))
    assert Fit.of(terms, [2.0] * 10, [3, 7]).r2 is None


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "psctl-steps"}, "is no profile of edits: psctl profile edits makes one"),
        ({"version": 7}, "is of version 7, but it must be 1: measure it again"),
        ({"keep": "some"}, "is damaged: keep is 'some'"),
        ({"up_to": 0}, "is damaged: up_to is 0"),
        ({"load": None}, "is damaged: load is None, but it must be"),
        ({"compute": {"coefficients": [1, 2], "num_held_out": 1, "mape": 0, "r2": 0}}, "has 2 coefficients, but there"),
        ({"load": {"coefficients": [0, -1], "num_held_out": 1, "mape": 0, "r2": 0}}, "none may be below 0"),
        ({"facts": {}}, "is damaged: 'facts.model' is missing; measure it again"),
    ],
)
def test_other_files_are_refused(profile: dict[str, Any], tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read(profile | change, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_command_writes_a_profile_and_no_records(run_psctl: RunPsctl, environment: dict[str, str]) -> None:
    done = run_psctl("profile", "edits", *FEW, "--json", **environment)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    place = Path(result["profile"])
    found = EditProfile.read(place)
    assert {path.name for path in place.parent.parent.iterdir()} == {"tables"}
    assert (found.facts.engine, found.facts.dtype, found.keep) == ("patched", "float32", "all")
    assert len(found.compute.coefficients) == len(TERMS)
    assert math.isfinite(found.compute.mape)
    # Each set of circumstances has one file.
    again = run_psctl("profile", "edits", *FEW, "--keep", "outputs", "--seed", "1", **environment)
    assert "MAPE" in again.stdout, again.stderr
    assert "computed whole take" in again.stdout
    assert len(list(place.parent.glob("edits-*.json"))) == 2
    smaller = EditProfile.read(next(path for path in place.parent.glob("edits-*.json") if path != place))
    assert smaller.keep == "outputs"
    assert smaller.bytes_per_pixel_step < 0.8 * found.bytes_per_pixel_step


@pytest.mark.slow
def test_transformer_is_profiled(tmp_path: Path) -> None:
    place = Workspace(tmp_path).for_model("tiny", "cpu")
    model = build_model(tiny_sd3(), name="tiny")
    found = profile_edits(
        model, EditProfileSettings(SIZES[:1], 8, 2, 1), place, on_start=lambda name, total: lambda: None
    )
    assert found.compute.num_held_out == 2
    assert Resolution(64, 64).pixels * found.bytes_per_pixel_step > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--combinations", "9"), "9 batches were asked for, but for 2 resolutions at least 13 are needed"),
        (("--resolutions", "72"), "for a record of the image, width and height must be multiples of 32"),
        (("--keep", "most"), "most"),
        (("--resolutions", "32"), "resolution 32x32 is a single cell of"),
    ],
)
def test_bad_usage_gives_a_one_line_error(
    run_psctl: RunPsctl, environment: dict[str, str], arguments: tuple[str, ...], said: str
) -> None:
    done = run_psctl("profile", "edits", "--max-batch-size", "2", *arguments, "--quiet", **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
