"""Cascade systems by name, the syntax of a cascade's models, and batch sizes that adapt to lateness."""

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.serving.cascade.aimd import Aimd
from patchedserve.serving.cascade.allocators import Cluster, Observations
from patchedserve.serving.cascade.deferral import deferral_curve
from patchedserve.serving.cascade.legs import CASCADE_SYSTEM_NAMES, LegSpec, cascade_name, parse_cascade
from patchedserve.serving.cascade.problem import ModelTimes
from patchedserve.serving.cascade.systems import CASCADE_SYSTEMS, CascadeKnobs, get_cascade_system

LIGHT = ModelTimes((1, 2, 4), (5.0, 8.0, 10.0), {"64x64": (0.2, 0.25, 0.4)})
HEAVY = ModelTimes((1, 2, 4), (0.5, 0.8, 1.0), {"64x64": (2.0, 2.5, 4.0)})
CLUSTER = Cluster(8, LIGHT, HEAVY, {"64x64": 6.0})
CURVE = deferral_curve([number / 100 for number in range(100)])


def test_command_line_names_equal_the_systems() -> None:
    assert tuple(CASCADE_SYSTEMS) == CASCADE_SYSTEM_NAMES
    with pytest.raises(UsageError, match="must be one of diffserve, diffserve-shared"):
        get_cascade_system("clipper")


@pytest.mark.parametrize("name", CASCADE_SYSTEM_NAMES)
@pytest.mark.parametrize("solver", ["milp", "enumerate"])
def test_every_system_plans_for_all_workers(name: str, solver: str) -> None:
    knobs = CascadeKnobs(solver)  # type: ignore[arg-type]
    allocate = get_cascade_system(name).allocator(CLUSTER, CURVE, 4.0, knobs)
    for demand in (0.0, 1.0, 4.0, 100.0):
        plan = allocate(Observations(demand, CURVE))
        assert plan.num_light + plan.num_heavy == (16 if plan.is_shared else 8)
        if name.startswith("clipper"):
            assert (plan.num_light, plan.threshold) == (8 if name == "clipper-light" else 0, None)
        if name == "proteus":
            assert plan.threshold is None


def test_static_threshold_is_the_given_one_or_that_of_the_peak() -> None:
    system = get_cascade_system("diffserve-static-threshold")
    given = system.allocator(CLUSTER, CURVE, 4.0, CascadeKnobs("enumerate", threshold=0.25))
    assert {given(Observations(demand, CURVE)).threshold for demand in (0.5, 2.0, 4.0)} == {0.25}
    found = system.allocator(CLUSTER, CURVE, 4.0, CascadeKnobs("enumerate"))
    wanted = get_cascade_system("diffserve-static").allocator(CLUSTER, CURVE, 4.0, CascadeKnobs("enumerate"))
    assert found(Observations(1.0, CURVE)).threshold == wanted(Observations(1.0, CURVE)).threshold


def test_slo_below_one_light_image_is_infeasible() -> None:
    cluster = Cluster(8, LIGHT, HEAVY, {"64x64": 0.1})
    with pytest.raises(UsageError, match=r"the SLO of 64x64 is 0.1 s, but one light image takes 0.2 s"):
        get_cascade_system("diffserve").allocator(cluster, CURVE, 4.0, CascadeKnobs())


@pytest.mark.parametrize("wrong", [{"queue_factor": -1.0}, {"queue_factor": float("nan")}, {"threshold": 1.5}])
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="must be"):
        CascadeKnobs(**wrong)  # type: ignore[arg-type]


def test_models_are_formatted_with_their_steps() -> None:
    specs = parse_cascade(" emoji-xl:4, some/dir:with:colons:50")
    assert specs == {"light": LegSpec("emoji-xl", 4), "heavy": LegSpec("some/dir:with:colons", 50)}
    assert cascade_name(specs) == "emoji-xl:4,some/dir:with:colons:50"
    assert parse_cascade("a,b")["light"] == LegSpec("a")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("emoji-xl", "two models"),
        ("a,b,c", "two models"),
        ("a,", "two models"),
        ("emoji-xl:4,emoji-xl:4", "must differ"),
        ("emoji-xl:0,emoji-xl", "from 1 to 1000"),
    ],
)
def test_invalid_cascades_are_refused(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        parse_cascade(text)


def test_batch_size_grows_when_in_time_and_halves_when_late() -> None:
    limit = Aimd((1, 2, 4, 8))
    sizes = []
    for number in range(7):
        limit.note(float(number), float(number), was_in_time=True)
        sizes.append(limit.batch_size)
    assert sizes == [2, 2, 4, 4, 4, 4, 8]
    # If all requests of a batch are late, the limit halves once.
    for _ in range(8):
        limit.note(10.0, 7.0, was_in_time=False)
    assert limit.batch_size == 4
    limit.note(12.0, 11.0, was_in_time=False)
    assert limit.batch_size == 2
    for number in range(5):
        limit.note(20.0 + number, 19.0 + number, was_in_time=False)
    assert limit.batch_size == 1
