"""Masked passes over recorded ones: exact if the record has the same input."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from patchedserve.data.errors import UsageError
from patchedserve.data.templates import KEEPS, Keep, unit_of
from patchedserve.serving.core.denoiser import of_rows
from patchedserve.serving.layout.bucket import Bucket, rounded_up
from patchedserve.serving.patched.masked import MaskedPasses, RecordedRow

from ...support.patched_cases import TOLERANCE, model_of
from ...support.patched_models import Row, Way, draw_rows, run_plain, stack_conditions
from ...support.random_models import MODELS, WITH_ALL_OPTIONS
from ...support.tape import Tape

Mask = np.ndarray[Any, np.dtype[np.bool_]]
WAY = Way("image", None, "regroup")
LESS: list[tuple[str, Keep]] = [(name, keep) for keep in ("outputs", "kv") for name in WITH_ALL_OPTIONS]
"""Models, and the values of `keep` other than `all` that their records support."""


@torch.no_grad()
def record(passes: MaskedPasses, rows: Sequence[Row]) -> list[dict[str, Tensor]]:
    """Run rows, sorted by resolution, in one batch; return the tensors that operators record for each."""
    packing = passes.pack([row.size for row in rows])
    batch = passes.batch(packing, repeats=1)
    tokens, timesteps = packing.pack([row.latents for row in rows]), torch.tensor([row.timestep for row in rows])
    return passes.record(batch, tokens, timesteps, stack_conditions(rows))[1]


@torch.no_grad()
def run_masked(
    passes: MaskedPasses,
    rows: Sequence[Row],
    seen: Sequence[RecordedRow],
    masks: Sequence[Mask],
    reuses: Sequence[bool] | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Return each row's prediction [channels, height, width] and the mask of where it holds [1, height, width].

    If passes are recorded, the batch is padded, and the padding is not zero.
    """
    is_recorded = passes.captured is not None
    packing = passes.pack([row.size for row in rows], is_recorded=is_recorded, is_padded=is_recorded)
    batch = passes.batch(packing, repeats=1, active=[mask.reshape(-1) for mask in masks], reuses=reuses)
    tokens, timesteps = packing.pack([row.latents for row in rows]), torch.tensor([row.timestep for row in rows])
    tokens = torch.cat([tokens, tokens[:1].expand(packing.num_patches - len(tokens), -1, -1, -1)])
    conditions = of_rows(stack_conditions(rows), packing.value_rows)
    found = passes.run(batch, seen, tokens, timesteps.index_select(0, packing.value_rows), conditions)
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


@pytest.mark.product(most=2)
@pytest.mark.parametrize(("name", "keep"), [*((name, "all") for name in MODELS), *LESS])
def test_masked_pass_over_the_same_input_equals_the_full_pass(name: str, keep: Keep) -> None:
    model = model_of(name)
    passes = MaskedPasses(WAY.build(model), keep)
    rows = draw_rows(model, [(16, 16), (32, 16), (24, 24), (32, 32)], num_each=2, seed=3)
    expected = run_plain(model, rows)
    # Rows are recorded in other batches than they are read in.
    seen = [record(passes, [row])[0] for row in rows[:4]] + record(passes, rows[4:])
    for seed, share in enumerate((0.05, 0.3, 1.0)):
        masks = masks_for(passes, rows, share, seed)
        for (found, where), wanted in zip(run_masked(passes, rows, seen, masks), expected, strict=True):
            assert error(found, wanted, where) <= TOLERANCE
            assert not found.masked_select(~where).any()


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("name", ["sdxl", "sd3"])
def test_record_has_no_effect_if_all_cells_are_computed(name: str, keep: Keep) -> None:
    model = model_of(name)
    passes = MaskedPasses(WAY.build(model), keep)
    rows, others = (draw_rows(model, [(16, 16), (32, 16)], seed=seed) for seed in (4, 5))
    masks = masks_for(passes, rows, 1.0)
    for (found, where), wanted in zip(
        run_masked(passes, rows, record(passes, others), masks), run_plain(model, rows), strict=True
    ):
        assert where.all()
        assert error(found, wanted, where) <= TOLERANCE


@pytest.mark.parametrize(("name", "matters"), [("sdxl", True), ("sd3", False)])
def test_frozen_norms_use_the_statistics_of_the_record(name: str, matters: bool) -> None:
    model = model_of(name)
    passes = MaskedPasses(WAY.build(model))
    rows, others = (draw_rows(model, [(16, 16), (32, 16)], seed=seed) for seed in (4, 5))
    masks, seen = masks_for(passes, rows, 1.0), record(passes, others)
    usual = run_masked(passes, rows, seen, masks)
    passes.freezes_norms = True
    frozen, expected = run_masked(passes, rows, seen, masks), run_plain(model, others)
    for (found, where), (other, _) in zip(frozen, usual, strict=True):
        assert (error(found, other, where) > 1e-3) is matters, "SD3 has no GroupNorm"
    for (found, where), wanted in zip(run_masked(passes, others, seen, masks), expected, strict=True):
        assert error(found, wanted, where) <= TOLERANCE


def plans_of(passes: MaskedPasses) -> list[list[bool]]:
    """Return some of the plans that passes can follow, from reusing all parts to reusing none."""
    count = len(passes.parts)
    if not passes.returns:
        return [[False] * whole + [True] * (count - whole) for whole in range(count + 1)]
    by_turns = [[number % 2 == first for number in range(count)] for first in range(2)]
    return [[True] * count, *by_turns, [False] * count]


@pytest.mark.product(most=1)
@pytest.mark.parametrize(("name", "keep"), [*((name, "all") for name in MODELS), *LESS])
def test_template_input_equals_the_full_pass_for_any_plan(name: str, keep: Keep) -> None:
    model = model_of(name)
    passes = MaskedPasses(WAY.build(model), keep)
    rows = draw_rows(model, [(16, 16), (32, 16)], num_each=2, seed=11)
    expected, seen = run_plain(model, rows), record(passes, rows)
    masks = masks_for(passes, rows, 0.3)
    for plan in plans_of(passes):
        units = {unit for part, is_reused in zip(passes.parts, plan, strict=True) if is_reused for unit in part}
        # Records lack the operators that the plan does not reuse.
        own = [{operator: each[operator] for operator in each if unit_of(operator) in units} for each in seen]
        for (found, where), wanted in zip(run_masked(passes, rows, own, masks, plan), expected, strict=True):
            assert error(found, wanted, where) <= TOLERANCE


@pytest.mark.product(most=2)
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("name", ["sdxl", "sd3"])
def test_full_layers_do_not_read_the_record(name: str, keep: Keep) -> None:
    """With a full mask or no part that reuses, an edit is exact whatever was recorded; with other plans it is not."""
    model = model_of(name)
    passes = MaskedPasses(WAY.build(model), keep)
    rows, others = (draw_rows(model, [(16, 16), (32, 16)], seed=seed) for seed in (4, 5))
    wanted, seen = run_plain(model, rows), record(passes, others)
    everywhere, some = masks_for(passes, rows, 1.0), masks_for(passes, rows, 0.3)
    errors = []
    for plan in plans_of(passes):
        for (found, where), exact in zip(run_masked(passes, rows, seen, everywhere, plan), wanted, strict=True):
            assert error(found, exact, where) <= TOLERANCE
        errors.append(
            max(
                error(found, exact, where)
                for (found, where), exact in zip(run_masked(passes, rows, seen, some, plan), wanted, strict=True)
            )
        )
    assert errors[-1] <= TOLERANCE < min(errors[:-1])


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("name", ["sdxl", "sd3"])
def test_rows_are_independent_of_their_batch(name: str, keep: Keep) -> None:
    model = model_of(name)
    passes = MaskedPasses(WAY.build(model), keep)
    rows, edited = (draw_rows(model, [(16, 16), (32, 16), (32, 32)], seed=seed) for seed in (6, 7))
    seen, masks = record(passes, rows), masks_for(passes, rows, 0.3)
    together = run_masked(passes, edited, seen, masks)
    for index, (found, where) in enumerate(together):
        ((alone, _),) = run_masked(passes, [edited[index]], [seen[index]], [masks[index]])
        assert error(found, alone, where) <= TOLERANCE


MIXES = [([3, 3, 3], [(16, 16), (32, 16), (32, 32)]), ([1, 3, 3, 3], [(8, 8), (16, 16), (16, 24), (32, 32)])]
"""Numbers of active cells of each row, and sizes: different rows, patches and cells in one bucket."""


def edit_masks(passes: MaskedPasses, rows: Sequence[Row], counts: Sequence[int], seed: int) -> list[Mask]:
    """Return masks with these numbers of cells."""
    rng, masks = np.random.default_rng(seed), []
    for row, count in zip(rows, counts, strict=True):
        mask = np.zeros([side // passes.cell for side in row.size], bool)
        mask.flat[rng.choice(mask.size, count, replace=False)] = True
        masks.append(mask)
    return masks


@pytest.mark.slow
@pytest.mark.product(most=2)
@pytest.mark.parametrize(("name", "keep"), [*((name, "all") for name in MODELS), *LESS])
def test_edits_of_a_bucket_share_a_recorded_pass(name: str, keep: Keep) -> None:
    """Padded passes, recorded or not, equal passes that are not padded; the batch changes from pass to pass."""
    model, tape = model_of(name), Tape()
    eager = MaskedPasses(WAY.build(model), keep)
    patched = WAY.build(model)
    patched.use_sizes([(8, 8)])
    patched.use_graphs(tape, patience=0)
    recorded = MaskedPasses(patched, keep)
    for number, (counts, sizes) in enumerate([*MIXES, *MIXES]):
        rows, others = (draw_rows(model, sizes, seed=seed + number) for seed in (20, 30))
        seen, masks = record(eager, others), edit_masks(eager, rows, counts, seed=number)
        for (found, where), (expected, _) in zip(
            run_masked(recorded, rows, seen, masks), run_masked(eager, rows, seen, masks), strict=True
        ):
            assert error(found, expected, where) <= TOLERANCE
            assert not found.masked_select(~where).any()
    # The first pass runs eagerly, to find out what it reads.
    assert (tape.recorded, tape.played) == (1, 3)


def test_recorded_passes_differ_in_frozen_norms() -> None:
    model, tape = model_of("sdxl"), Tape()
    eager, patched = MaskedPasses(WAY.build(model)), WAY.build(model)
    patched.use_graphs(tape, patience=0)
    recorded = MaskedPasses(patched)
    rows, others = (draw_rows(model, [(16, 16)], seed=seed) for seed in (4, 5))
    seen, masks = record(eager, others), edit_masks(eager, rows, [3], seed=0)
    for freezes_norms in (False, True, False, True):
        eager.freezes_norms = recorded.freezes_norms = freezes_norms
        ((found, where),), ((expected, _),) = (run_masked(each, rows, seen, masks) for each in (recorded, eager))
        assert error(found, expected, where) <= TOLERANCE
    assert (tape.recorded, tape.played) == (2, 3)


def test_many_mixes_of_edits_have_few_buckets() -> None:
    """10,000 random batches of up to 8 guided edits of three sizes, with masks from one cell to all."""
    rng, found = np.random.default_rng(0), set[tuple[Bucket, int]]()
    for _ in range(10_000):
        cells = rng.choice([256, 576, 1024], rng.integers(1, 9))
        active = 2 * int(np.ceil(cells * rng.random(len(cells)) ** 2).sum())
        bucket = Bucket.of_memory(2 * int(cells.sum()), 2 * len(cells))
        assert bucket.num_patches > 2 * cells.sum()
        assert active <= rounded_up(active) < 1.25 * active + 1e-9
        found.add((bucket, rounded_up(active)))
    # Rows: 2, 4, 8, 16; cells of a number of rows: powers of two; active cells: four numbers for each doubling.
    buckets = {bucket for bucket, _ in found}
    assert {bucket.num_rows for bucket in buckets} == {3, 5, 9, 17}
    assert len(buckets) <= 4 * 4
    assert len(found) <= sum(4 * math.log2(bucket.num_patches - 1) for bucket in buckets)


@pytest.mark.parametrize("keep", KEEPS)
def test_nothing_is_retained_between_passes(keep: Keep) -> None:
    model = model_of("sdxl")
    patched = WAY.build(model)
    passes = MaskedPasses(patched, keep)
    rows = draw_rows(model, [(16, 16)], seed=8)
    run_masked(passes, rows, record(passes, rows), masks_for(passes, rows, 0.3))
    assert patched.context.active is None
    assert patched.context.cells is None
    assert sum(buffer.num_bytes for buffer in passes._buffers) == 0
    # The hooks that a masked pass adds to blocks are removed: whole passes are as before.
    whole = patched.pack([row.size for row in rows])
    patched.begin(whole)
    tokens, timesteps = whole.pack([row.latents for row in rows]), torch.tensor([row.timestep for row in rows])
    (wanted,) = run_plain(model, rows)
    found = whole.unpack(patched(tokens, timesteps, **stack_conditions(rows)), 0)
    assert error(found, wanted, torch.ones_like(wanted, dtype=torch.bool)) <= TOLERANCE


@pytest.mark.product
@pytest.mark.parametrize(("name", "keep"), [*((name, "all") for name in MODELS), *LESS])
def test_record_units_are_in_reading_order(name: str, keep: Keep) -> None:
    model, asked = model_of(name), list[str]()

    class Noted(dict[str, Tensor]):
        def __getitem__(self, operator: str) -> Tensor:
            asked.append(unit_of(operator))
            return super().__getitem__(operator)

    passes = MaskedPasses(WAY.build(model), keep)
    rows = draw_rows(model, [(16, 16)], seed=10)
    seen = record(passes, rows)
    run_masked(passes, rows, [Noted(seen[0])], masks_for(passes, rows, 0.3))
    assert tuple(dict.fromkeys(asked)) == passes.units
    assert tuple(unit for part in passes.parts for unit in part) == passes.units
    assert set(asked) == set(map(unit_of, seen[0]))


def test_plan_may_start_reading_at_any_unet_layer() -> None:
    model = model_of("sdxl")
    kinds = [type(module).__name__ for module in model.modules()]
    layers = sum(map(kinds.count, ("ResnetBlock2D", "Transformer2DModel", "Downsample2D", "Upsample2D")))
    passes = MaskedPasses(WAY.build(model))
    assert len(passes.parts) == layers > 10
    assert not passes.returns


def tokens_at(name: str, row: Row) -> int:
    """Return the number of tokens of a row in a part of a U-Net with three levels."""
    part, number = name.split(".")[:2]
    level = 2 if part == "mid_block" else int(number) if part == "down_blocks" else 2 - int(number)
    return row.size[0] * row.size[1] >> (2 * level)


def test_record_sizes_equal_those_of_the_paper() -> None:
    """Records hold Y of every block, or K and V of its self attention and Y of each stack: float32 [tokens, width]."""
    model = model_of("sdxl")
    rows = draw_rows(model, [(16, 24)], seed=9)
    blocks = [
        (name, module) for name, module in model.named_modules() if type(module).__name__ == "BasicTransformerBlock"
    ]
    stacks = {name.rpartition(".")[0]: module for name, module in blocks}
    sizes = {}
    for keep in KEEPS:
        (seen,) = record(MaskedPasses(WAY.build(model), keep), rows)
        sizes[keep] = sum(tensor.nbytes for tensor in seen.values())
        assert all(bool(tensor.isfinite().all()) for tensor in seen.values())
    outputs, of_stacks = (
        sum(4 * tokens_at(name, rows[0]) * module.norm1.weight.numel() for name, module in each)
        for each in (blocks, stacks.items())
    )
    assert sizes["outputs"] == outputs
    assert sizes["kv"] == 2 * outputs + of_stacks
    assert sizes["kv"] < sizes["all"]


@pytest.mark.parametrize("name", ["flux", "aura", "chroma", "pixart"])
def test_outputs_of_unknown_blocks_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="--keep outputs knows the transformer blocks of Stable Diffusion"):
        MaskedPasses(WAY.build(model_of(name)), "outputs")
