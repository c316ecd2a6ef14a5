"""Sets that are drawn for DistriFusion's claims, and conditions under which a claim holds."""

from dataclasses import replace

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.eval.compare.paired import PairedResult
from patchedserve.eval.parallel.plan import PARTS, Claim, ParallelPlan, parse_parts, parse_ranks


def test_each_set_is_generated_once_and_claims_use_generated_sets() -> None:
    plan = ParallelPlan((2, 4))
    settings = {setting.name: setting for setting in plan.settings()}
    assert len(settings) == len(plan.settings())
    for claim in plan.claims():
        assert {claim.worse, claim.better} <= set(settings)
    displaced = settings["displaced, n = 4"].options
    assert displaced is not None
    assert (displaced.count, displaced.mode, displaced.warmup, displaced.cfg_split) == (4, "displaced", 4, "off")
    assert displaced.norms.guard == 0.25
    unguarded = settings["unguarded GroupNorm, n = 4"].options
    assert unguarded is not None
    assert unguarded.norms == replace(displaced.norms, guard=0.0)
    assert {setting.original for setting in settings.values()} == {"original", "original, 10 steps"}
    # Figure 8 uses table 1's set of the largest number of ranks for its corrected GroupNorm.
    only = {setting.name for setting in ParallelPlan((4,), ("fig8",)).settings()}
    others = {f"{mode} GroupNorm, n = 4" for mode in ("sync", "stale", "separate", "unguarded")}
    assert only == {"original", "displaced, n = 4"} | others
    assert "original" not in {setting.name for setting in ParallelPlan((4,), ("fig7",)).settings()}


@pytest.mark.parametrize(
    ("metric", "kind", "values", "interval", "holds"),
    [
        ("psnr", "better", (20, 30), (5, 15), True),
        ("psnr", "better", (20, 30), (-1, 21), False),
        ("psnr", "better", (30, 20), (-15, -5), False),
        ("lpips", "better", (0.5, 0.1), (-0.5, -0.3), True),
        ("lpips", "better", (0.1, 0.5), (0.3, 0.5), False),
        ("lpips", "better", (0.5, 0.1), (None, None), False),
        ("lpips", "no worse", (0.10, 0.11), (-0.01, 0.03), True),
        ("lpips", "no worse", (0.10, 0.12), (0.01, 0.03), False),
        ("lpips", "near", (0.10, 0.109), (0.008, 0.01), True),
        ("lpips", "near", (0.10, 0.112), (0.008, 0.02), False),
        ("fid", "within", (20, 27.9), (6, 9), True),
        ("fid", "within", (20, 28.1), (6, 9), False),
    ],
)
def test_verdicts(
    metric: str, kind: str, values: tuple[float, float], interval: tuple[float | None, float | None], holds: bool
) -> None:
    claim = replace(Claim("it is so", metric, "a", "b"), kind=kind)
    found = PairedResult(metric, *values, values[1] - values[0], *interval, n=9, direction="lower")
    assert claim.holds(found) is holds


def test_invalid_plans_are_refused() -> None:
    assert parse_parts("fig8, table1") == ("table1", "fig8")
    assert parse_parts(",".join(PARTS)) == PARTS
    with pytest.raises(UsageError, match="names 'fig9'"):
        parse_parts("table1,fig9")
    with pytest.raises(UsageError, match="whole numbers"):
        parse_ranks("2,four")
    for ranks in ((), (1, 2), (4, 2), (2, 2)):
        with pytest.raises(UsageError, match="rising numbers of 2 or more"):
            ParallelPlan(ranks)
