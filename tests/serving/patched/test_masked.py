"""Masked passes over recorded ones: exact where the record is of the same input."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from patchedserve.serving.patched.masked import MaskedPasses, Seen

from ...support.patched_cases import TOLERANCE, model_of
from ...support.patched_models import MODELS, Row, Way, draw_rows, run_plain, stack_conditions

Mask = np.ndarray[Any, np.dtype[np.bool_]]
WAY = Way("image", None, "regroup")


@torch.no_grad()
def record(passes: MaskedPasses, rows: Sequence[Row]) -> list[dict[str, Tensor]]:
    """What operators see of rows, sorted by resolution, that run together."""
    packing = passes.pack([row.size for row in rows])
    batch = passes.batch(packing, repeats=1)
    tokens, timesteps = packing.pack([row.latents for row in rows]), torch.tensor([row.timestep for row in rows])
    return passes.record(batch, tokens, timesteps, stack_conditions(rows))


@torch.no_grad()
def run_masked(
    passes: MaskedPasses, rows: Sequence[Row], seen: Sequence[Seen], masks: Sequence[Mask]
) -> list[tuple[Tensor, Tensor]]:
    """Of each row the prediction, and where it holds, both [channels or 1, height, width]."""
    packing = passes.pack([row.size for row in rows])
    batch = passes.batch(packing, repeats=1, active=[mask.reshape(-1) for mask in masks])
    tokens, timesteps = packing.pack([row.latents for row in rows]), torch.tensor([row.timestep for row in rows])
    found = passes.run(batch, seen, tokens, timesteps, stack_conditions(rows))
    wide = [torch.from_numpy(np.kron(mask, np.ones((passes.cell, passes.cell), bool)))[None] for mask in masks]
    return [(packing.unpack(found, number), where) for number, where in enumerate(wide)]


def masks_for(passes: MaskedPasses, rows: Sequence[Row], share: float, seed: int = 0) -> list[Mask]:
    rng, masks = np.random.default_rng(seed), []
    for row in rows:
        mask = rng.random([side // passes.cell for side in row.size]) < share
        mask.flat[rng.integers(mask.size)] = True
        masks.append(mask)
    return masks


def error(found: Tensor, expected: Tensor, where: Tensor) -> float:
    wanted = expected.masked_select(where)
    return float((found.masked_select(where) - wanted).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_a_masked_pass_over_the_same_input_is_the_whole_pass(name: str) -> None:
    model = model_of(name)
    passes = MaskedPasses(WAY.build(model))
    rows = draw_rows(model, [(16, 16), (32, 16), (24, 24), (32, 32)], num_each=2, seed=3)
    expected = run_plain(model, rows)
    # Recorded in other company than they are read in.
    seen = [record(passes, [row])[0] for row in rows[:4]] + record(passes, rows[4:])
    for seed, share in enumerate((0.05, 0.3, 1.0)):
        masks = masks_for(passes, rows, share, seed)
        for (found, where), wanted in zip(run_masked(passes, rows, seen, masks), expected, strict=True):
            assert error(found, wanted, where) <= TOLERANCE
            assert not found.masked_select(~where).any()


@pytest.mark.parametrize("name", ["sdxl", "sd3"])
def test_with_all_cells_computed_the_record_does_not_matter(name: str) -> None:
    model = model_of(name)
    passes = MaskedPasses(WAY.build(model))
    rows, others = (draw_rows(model, [(16, 16), (32, 16)], seed=seed) for seed in (4, 5))
    masks = masks_for(passes, rows, 1.0)
    for (found, where), wanted in zip(
        run_masked(passes, rows, record(passes, others), masks), run_plain(model, rows), strict=True
    ):
        assert where.all()
        assert error(found, wanted, where) <= TOLERANCE


@pytest.mark.parametrize("name", ["sdxl", "sd3"])
def test_a_row_does_not_depend_on_the_others(name: str) -> None:
    model = model_of(name)
    passes = MaskedPasses(WAY.build(model))
    rows, edited = (draw_rows(model, [(16, 16), (32, 16), (32, 32)], seed=seed) for seed in (6, 7))
    seen, masks = record(passes, rows), masks_for(passes, rows, 0.3)
    together = run_masked(passes, edited, seen, masks)
    for index, (found, where) in enumerate(together):
        ((alone, _),) = run_masked(passes, [edited[index]], [seen[index]], [masks[index]])
        assert error(found, alone, where) <= TOLERANCE


def test_nothing_is_kept_between_passes() -> None:
    model = model_of("sdxl")
    patched = WAY.build(model)
    passes = MaskedPasses(patched)
    rows = draw_rows(model, [(16, 16)], seed=8)
    run_masked(passes, rows, record(passes, rows), masks_for(passes, rows, 0.3))
    assert patched.context.active is None
    assert patched.context.cells is None
    assert sum(buffer.num_bytes for buffer in passes._buffers.values()) == 0
