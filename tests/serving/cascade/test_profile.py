"""Profiles of cascades: their files, mixes of resolutions, and errors of damaged files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.cascade.policy import CascadePolicy
from patchedserve.serving.cascade.profile import CascadeProfile, LegProfile, SizeTimes, read_profile
from patchedserve.serving.simulator.simulator import simulate

from ...support.cascades import leg, profile
from ...support.latency_tables import CIRCUMSTANCES


def test_profile_round_trips_through_a_file(tmp_path: Path) -> None:
    written = profile()
    written.save(tmp_path / "cascade.json")
    assert read_profile(tmp_path / "cascade.json") == written
    assert written.resolutions == (Resolution(64, 64), Resolution(128, 128))
    assert written.standalone_s(Resolution(64, 64)) == pytest.approx(2.0)


def test_heavy_images_from_light_ones_have_separate_times(tmp_path: Path) -> None:
    whole = profile()
    with pytest.raises(UsageError, match="psctl profile cascade --reuse-light STRENGTH"):
        whole.serving(reuses_light=True)
    reused = replace(leg(24), num_steps=40, strength=0.6)
    both = replace(whole, reused=reused)
    both.save(tmp_path / "cascade.json")
    assert read_profile(tmp_path / "cascade.json") == both
    assert both.serving(reuses_light=False) == whole.legs
    assert both.serving(reuses_light=True) == {"light": whole.legs["light"], "heavy": reused}
    # The standalone latency, on which SLOs are based, does not depend on it.
    assert both.standalone_s(Resolution(64, 64)) == whole.standalone_s(Resolution(64, 64))
    model = reused.model({"64x64": 1.0})
    assert (model.num_steps, model.strength, model.num_taken) == (40, 0.6, 24)
    assert (model.for_workers().num_steps, model.for_workers().strength) == (40, 0.6)


def test_throughput_of_a_mix_follows_its_batch_times() -> None:
    leg = profile().legs["light"]
    alone = [leg.batches({name: 1.0}).throughput for name in ("64x64", "128x128")]
    # With two requests of the first size to one of the second, 3 requests take 2 / T_1 + 1 / T_2 seconds.
    mixed = leg.batches({"64x64": 2.0, "128x128": 1.0}).throughput
    assert mixed == pytest.approx([3 / (2 / one + 1 / other) for one, other in zip(*alone, strict=True)])
    model = leg.model({"64x64": 1.0})
    assert model.durations.steps.policy_latency.step_latency_s([Resolution(64, 64)]) == pytest.approx(0.05, rel=0.05)


def test_stages_of_a_cpu_worker_share_its_core() -> None:
    size, slow = Resolution(64, 64), SizeTimes((2.0,), (0.5,), (0.5,), 0.25, 0.75)
    requests = [Request(number, "", size, 1, 1.0, seed=0) for number in range(4)]
    for device, end_s in (
        ("cpu", 4 * (0.25 + 0.5 + 0.75)),
        # On a GPU, one request is prepared while another is denoised, and a batch runs to completion.
        ("cuda:0", 0.25 + 4 * (0.5 + 0.75)),
    ):
        facts = replace(CIRCUMSTANCES, device=device)
        model = LegProfile(1, 1.0, (1,), {"64x64": slow}, 0.1, 1.0, 0.0, facts).model({"64x64": 1.0})
        result = simulate(
            requests,
            CascadePolicy(lambda resolution, count: 0.0),
            model.durations.steps.policy_latency,
            max_batch_size=1,
            times=model.times,
            durations=model.durations,
        )
        assert max(record.finish_s or 0.0 for record in result.records) == pytest.approx(end_s), device


def test_costs_are_relative_to_their_mean_and_need_a_profile() -> None:
    leg = profile().legs["heavy"]
    # Steps take 50 and 80 ms.
    assert leg.costs_of(["128x128", "64x64", "128x128"]) == pytest.approx([8 / 6.5, 5 / 6.5, 8 / 6.5])
    assert sum(leg.costs().values()) == pytest.approx(2)
    with pytest.raises(UsageError, match="256x256 is not profiled"):
        leg.costs_of(["64x64", "256x256"])


def test_resolution_missing_from_one_model_is_reported() -> None:
    whole = profile()
    heavy = whole.legs["heavy"]
    part = LegProfile(4, 4.0, (1, 2, 4, 8), {"64x64": heavy.sizes["64x64"]}, 0.1, 1.0, 0.0, CIRCUMSTANCES)
    assert CascadeProfile({"light": whole.legs["light"], "heavy": part}, "x").resolutions == (Resolution(64, 64),)
    with pytest.raises(UsageError, match="128x128 is not profiled for emoji-xl, only 64x64"):
        part.batches({"64x64": 1.0, "128x128": 1.0})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: content.pop("kind"), "is not the profile of a cascade"),
        (lambda content: content.update(version=99), "is not the profile of a cascade"),
        (lambda content: content.pop("heavy"), "damaged"),
        (lambda content: content["light"].pop("facts"), "damaged"),
        (lambda content: content["light"]["sizes"]["64x64"].update(throughput=[1.0]), "damaged"),
        (lambda content: content["light"]["sizes"]["64x64"].update(throughput=[1.0, 0.0]), "damaged"),
        (lambda content: content["light"]["sizes"]["64x64"].update(latency_s=[1.0, -2.0]), "damaged"),
        (lambda content: content["light"]["sizes"]["64x64"].update(prepare_s=-1.0), "damaged"),
        (lambda content: content["heavy"].update(batch_sizes=[2, 4, 8, 16]), "batches of one request are missing"),
        (lambda content: content["heavy"].update(strength=1.5), "strength is 1.5"),
        (lambda content: content.update(reused={}), "damaged"),
    ],
)
def test_damaged_profiles_are_reported(tmp_path: Path, change: Any, reason: str) -> None:
    path = tmp_path / "cascade.json"
    profile().save(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=reason):
        read_profile(path)
    path.write_text("{")
    with pytest.raises(UsageError, match="not valid JSON"):
        read_profile(path)
    with pytest.raises(UsageError, match="there is no such file"):
        read_profile(tmp_path / "other.json")


def test_missing_numbers_are_reported() -> None:
    with pytest.raises(UsageError, match="for throughput"):
        LegProfile(
            4, 4.0, (1, 2), {"64x64": SizeTimes((1.0, 2.0), (1.0,), (0.1, 0.2), 0.0, 0.0)}, 0.1, 1.0, 0.0, CIRCUMSTANCES
        )
