"""The patch engine's models (serving/patched) against unmodified diffusers, which runs each row alone."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patchedserve.serving.layout import packing
from patchedserve.serving.patched import leaves

from ...support.patched_cases import (
    BATCHES,
    BUNDLED,
    FEW_WAYS,
    FOUR_LEVELS,
    MIXED,
    SOME,
    TOLERANCE,
    TRANSFORMERS,
    UNETS,
    WAYS,
    WITH_ODD_SIDES,
    model_of,
    ways_for,
)
from ...support.patched_models import (
    Alternation,
    Row,
    Way,
    draw_rows,
    relative_error,
    run_patched,
    run_plain,
    to_dtype,
)
from ...support.random_models import MODELS
from ...support.triton_case import run_triton_case, triton_case


def rms_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    error = sum(float((one.float() - other).square().sum()) for one, other in zip(found, expected, strict=True))
    return (error / sum(float(other.square().sum()) for other in expected)) ** 0.5


def exact_in_bfloat16(rows: Sequence[Row]) -> list[Row]:
    """Replace timesteps and guidance scales by values that are exact in bfloat16, also divided and multiplied by 1000.

    FLUX takes timesteps divided and guidance scales multiplied by 1000.
    """
    found = []
    for number, row in enumerate(rows):
        guidance = {"guidance": torch.tensor(2.0 ** (number % 3))} if "guidance" in row.conditions else {}
        found.append(replace(row, timestep=1000 * 0.5 ** (number % 5), conditions=row.conditions | guidance))
    return found


# Mixed batches


@pytest.mark.product
@pytest.mark.slow
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", [*UNETS, *TRANSFORMERS])
def test_mixed_batch_equals_plain(name: str, batch: str) -> None:
    sizes, num_each = BATCHES[batch]
    ways = ways_for(name, sizes)
    if name in TRANSFORMERS and batch == "odd sides" and name not in WITH_ODD_SIDES:
        assert ways == []
        return
    model = model_of(name)
    rows = draw_rows(model, sizes, num_each=num_each, seed=2)
    expected = run_plain(model, rows)
    errors = {}
    for way in ways:
        patched = way.build(model)
        errors[str(way)] = relative_error(run_patched(patched, rows), expected)
        if way.strategy == "mixed":
            assert isinstance(patched.context.choose, Alternation)
            assert set(patched.context.choose.chosen.values()) == {"stitch", "regroup"}
    assert max(errors.values()) <= TOLERANCE, errors


def test_every_way_is_covered() -> None:
    """The test above silently skips a way that no batch of a model allows."""
    for name in [*UNETS, *TRANSFORMERS]:
        tried = {way for sizes, _ in BATCHES.values() for way in ways_for(name, sizes)}
        assert tried == {
            way
            for way in WAYS
            if (name in UNETS or way.strategy == "regroup") and ((way.patch_size or 8) >= 8 or name not in FOUR_LEVELS)
        }


@pytest.mark.product(most=1)
@pytest.mark.slow
@pytest.mark.parametrize("batch", ["all three sizes", "128x256 and 256x128"])
@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_model_equals_plain(name: str, batch: str) -> None:
    sizes, _ = BATCHES[batch]
    model = model_of(name)
    rows = draw_rows(model, sizes, num_each=2, seed=3)
    expected = run_plain(model, rows)
    errors = {str(way): relative_error(run_patched(way.build(model), rows), expected) for way in ways_for(name, sizes)}
    assert len(errors) >= 3
    assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("name", MODELS)
def test_every_input_affects_the_output(name: str) -> None:
    """Otherwise equality with plain would not reveal mixed-up rows."""
    model = model_of(name)
    row = draw_rows(model, [(16, 16)], seed=4)[0]
    other = draw_rows(model, [(8, 8), (24, 24)], seed=5)[1]
    changed = {"timestep": replace(row, timestep=row.timestep - 37)}
    for key, value in other.conditions.items():
        for inner in value if isinstance(value, dict) else [None]:
            new = value if inner is None else row.conditions[key] | {inner: value[inner]}
            changed[inner or key] = replace(row, conditions=row.conditions | {key: new})
    assert len(changed) == {
        "sdxl": 4,
        "flux": 4,
        **dict.fromkeys(("sd3", "sd35", "schnell", "flux2", "chroma", "pixart", "lumina2", "qwen", "z-image"), 3),
    }.get(name, 2)
    before = run_plain(model, [row])
    for what, changed_row in changed.items():
        assert relative_error(run_plain(model, [changed_row]), before) > 1000 * TOLERANCE, what


# Rows do not see each other


@pytest.mark.product(most=1)
@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_rows_are_independent_of_their_batch(name: str) -> None:
    rows = draw_rows(model_of(name), MIXED, seed=6)
    for way in ways_for(name, MIXED, FEW_WAYS):
        patched = way.build(model_of(name))
        together = run_patched(patched, rows)
        for place, row in enumerate(rows):
            assert relative_error(run_patched(patched, [row]), [together[place]]) <= TOLERANCE, way
        for kept in ([0, 3], [1, 2, 5], [0, 1, 3, 4]):
            found = run_patched(patched, [rows[place] for place in kept])
            assert relative_error(found, [together[place] for place in kept]) <= TOLERANCE, way


@pytest.mark.product(most=2)
@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", SOME)
def test_non_finite_row_does_not_affect_others(name: str, value: float) -> None:
    rows = draw_rows(model_of(name), MIXED, seed=7)
    spoilt = list(rows)
    # Spoilt are the first row, which patches at an edge read in place of a missing neighbour, a row between two of the
    # same resolution, and the corners of another one, which are next to patches of other rows.
    for place in (0, 2):
        spoilt[place] = replace(rows[place], latents=torch.full_like(rows[place].latents, value))
    corners = rows[4].latents.clone()
    corners[:, [0, -1], [0, -1]] = value
    spoilt[4] = replace(rows[4], latents=corners)
    for way in ways_for(name, MIXED, FEW_WAYS):
        patched = way.build(model_of(name))
        before, after = run_patched(patched, rows), run_patched(patched, spoilt)
        for place in range(len(rows)):
            if place in (0, 2, 4):
                assert not after[place].isfinite().all(), way
            else:
                assert after[place].isfinite().all(), way
                assert torch.equal(after[place], before[place]), way


# Other dtypes and kernels


@pytest.mark.product(most=1)
@pytest.mark.slow
@pytest.mark.parametrize("name", [*SOME, *BUNDLED])
def test_bfloat16_is_as_accurate_as_plain(name: str) -> None:
    low = nn.Module.to(copy.deepcopy(model_of(name)), torch.bfloat16)
    # Weights and inputs are the same, so errors come from the arithmetic alone.
    high = copy.deepcopy(low).float()
    rows = [to_dtype(row, torch.bfloat16) for row in exact_in_bfloat16(draw_rows(low, MIXED, seed=19))]
    exact = run_plain(high, [to_dtype(row, torch.float32) for row in rows])
    allowed = 1.5 * rms_error(run_plain(low, rows), exact)
    assert 0.001 < allowed < 0.1
    for way in ways_for(name, MIXED, FEW_WAYS):
        found = run_patched(way.build(low), rows)
        assert {one.dtype for one in found} == {torch.bfloat16}
        assert rms_error(found, exact) <= allowed, way


def test_choice_of_kernels_reaches_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are the same with either kernel, so the test records the calls."""
    asked: dict[str, set[str]] = {}

    def recorded(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, kernels: str = "none", **kwargs: Any) -> Any:
            asked.setdefault(original.__name__, set()).add(kernels)
            return original(*args, kernels="torch", **kwargs)

        return run

    names = {
        "halo_gather",
        "group_norm_stats",
        "group_norm_apply",
        "group_norm_silu_stitch",
        "patch_split",
        "patch_join",
    }
    for module in (leaves, packing):
        for name in names & vars(module).keys():
            monkeypatch.setattr(module, name, recorded(getattr(module, name)))
    model, rows = triton_case()
    assert (
        relative_error(
            run_patched(Way("patch", None, "stitch").build(model, kernels="triton"), rows), run_plain(model, rows)
        )
        <= TOLERANCE
    )
    assert asked == {name: {"triton"} for name in names}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_triton_kernels_in_a_whole_model(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    model, rows = triton_case()
    assert len({row.size for row in rows}) > 1
    # With "triton", the kernels have no fallback.
    with pytest.raises(ValueError, match="Triton kernels need CUDA"):
        run_triton_case()
    # The interpreter must be selected before diffusers imports triton, so this runs in a process of its own.
    path = tmp_path / "found.pt"
    command = [sys.executable, "-m", "patchedserve.tests.support.triton_case", str(path)]
    subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True, timeout=300)
    assert relative_error(torch.load(path), run_plain(model, rows)) <= TOLERANCE
