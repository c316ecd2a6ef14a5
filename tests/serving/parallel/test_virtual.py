"""Whole models on virtual ranks against plain diffusers."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from patchedserve.data.errors import UsageError
from patchedserve.serving.core.denoiser import denoise
from patchedserve.serving.families import transformer_of
from patchedserve.serving.families.transformer import Transformer
from patchedserve.serving.parallel.group import Message, RankError, VirtualEnd, VirtualPending
from patchedserve.serving.parallel.options import ParallelOptions
from patchedserve.serving.parallel.ranks import Ranks
from patchedserve.serving.parallel.recovery import call_with_recovery
from patchedserve.serving.parallel.strip_model import StripModel, flat
from patchedserve.serving.parallel.virtual import VirtualRanks

from ...support.patched_models import Row, draw_rows, run_plain, stack_conditions
from ...support.random_models import (
    MODELS,
    WITH_ALL_OPTIONS,
    flux2_transformer,
    qwen_transformer,
    sd3_transformer,
    sdxl_unet,
)

EXACT = 1e-5
"""Largest difference over largest magnitude, in float32."""


def predict(model: Any, rows: Sequence[Row], size: int, **settings: Any) -> Tensor:
    """Return the prediction of `size` ranks for guided requests of one resolution."""
    names = [(index // 2, index % 2) for index in range(len(rows))]
    with (
        closing(VirtualRanks(model, ParallelOptions(f"virtual:{size}", **settings))) as virtual,
        virtual.end,
        torch.inference_mode(),
    ):
        virtual.ranks.learn(names, flat(stack_conditions(rows)))
        latents, timesteps = torch.stack([row.latents for row in rows]), torch.tensor([row.timestep for row in rows])
        return virtual.ranks.predict(names, latents, timesteps)


def error(found: Tensor, wanted: Sequence[Tensor]) -> float:
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(found, wanted, strict=True))


@pytest.mark.product(most=1)
@pytest.mark.parametrize(
    ("name", "count"),
    [(name, count) for name in WITH_ALL_OPTIONS for count in (range(1, 9) if name in ("sdxl", "sd3") else (3, 8))],
)
def test_any_number_of_ranks_equals_one(name: str, count: int) -> None:
    model = MODELS[name]()
    # A U-Net of 4 levels keeps 8 rows together; with 61 rows, the last strip has an odd end at every level.
    size = (36, 14) if name.startswith("sd3") else (61, 13)
    rows = draw_rows(model, [size, size], num_each=2)
    wanted = run_plain(model, rows)
    assert error(predict(model, rows, count, cfg_split="off"), wanted) <= EXACT
    assert error(predict(model, rows, count), wanted) <= EXACT
    if name.startswith("sd3"):
        assert error(predict(model, rows, count, text="split"), wanted) <= EXACT


FAMILIES = [name for name in MODELS if name not in WITH_ALL_OPTIONS]
QUICK = ("flux", "qwen")


def each_family(names: Sequence[str]) -> Any:
    """Parametrise a test by transformers, most of which are exhaustive."""
    cases = [pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive) for name in names]
    return pytest.mark.parametrize("name", cases)


@each_family(FAMILIES)
def test_transformers_of_all_families_equal_one_rank(name: str) -> None:
    """Sizes differ in the pads of Z-Image: those of one rank's strip, of all strips, and none."""
    model = MODELS[name]()
    rows = draw_rows(model, [(20, 6)] * 2, num_each=2)
    wanted = run_plain(model, rows)
    assert error(predict(model, rows, 2), wanted) <= EXACT
    for settings in ({}, {"text": "split"}, {"shares": "3,1,2"}):
        assert error(predict(model, rows, 3, cfg_split="off", **settings), wanted) <= EXACT, settings
    rows = draw_rows(model, [(16, 16)], num_each=2)
    assert error(predict(model, rows, 3, cfg_split="off"), run_plain(model, rows)) <= EXACT


@each_family(["qwen", "pixart", "lumina2", "z-image"])
def test_texts_of_any_length_share_a_call(name: str) -> None:
    """A request whose text is longer joins another one, whose text was shorter when the ranks learnt it."""
    model = MODELS[name]()
    rows = draw_rows(model, [(16, 12)] * 2, num_each=1, seed=3)
    mask = cast(str, cast(Transformer, transformer_of(model)).mask)
    length = max(int((rows[0].conditions[mask] > 0).sum()), 1)
    own = {
        key: value[:length] if key in (mask, "encoder_hidden_states") else value
        for key, value in rows[0].conditions.items()
    }
    rows[0] = replace(rows[0], conditions=own)
    assert length < len(rows[1].conditions[mask])
    wanted = run_plain(model, rows)
    ways = (
        ParallelOptions("virtual:2", mode="sync", text="split"),
        ParallelOptions("virtual:2", mode="displaced", warmup=9),
    )
    for options in ways:
        with closing(VirtualRanks(model, options)) as virtual, virtual.end, torch.inference_mode():
            for order in ([0], [0, 1]):
                names = [(number, 0) for number in order]
                for number in order:
                    virtual.ranks.learn([(number, 0)], flat(stack_conditions([rows[number]])))
                latents = torch.stack([rows[number].latents for number in order])
                timesteps = torch.tensor([rows[number].timestep for number in order])
                found = virtual.ranks.predict(names, latents, timesteps)
                assert error(found, [wanted[number] for number in order]) <= EXACT


@each_family(FAMILIES)
def test_displaced_transformers_read_the_previous_call(name: str) -> None:
    """What is displaced equals the current data only if nothing has changed since the previous call."""
    model = MODELS[name]()
    rows = draw_rows(model, [(16, 12)], num_each=2)
    names = [(0, 0), (0, 1)]
    latents, timesteps = torch.stack([row.latents for row in rows]), torch.tensor([row.timestep for row in rows])
    options = ParallelOptions("virtual:2", mode="displaced", warmup=0, cfg_split="off")
    with closing(VirtualRanks(model, options)) as virtual, virtual.end, torch.inference_mode():
        virtual.ranks.learn(names, flat(stack_conditions(rows)))
        found = [virtual.ranks.predict(names, scale * latents, timesteps) for scale in (1, 1, 1.5)]
    changed = run_plain(model, [replace(row, latents=1.5 * row.latents) for row in rows])
    assert [error(each, run_plain(model, rows)) <= EXACT for each in found[:2]] == [True, True]
    assert error(found[2], changed) > EXACT


def swaps_of(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of swaps of two ranks in a synchronous call."""
    swaps, swap = [0, 0], VirtualEnd.swap

    def counted(end: VirtualEnd, *given: Any) -> VirtualPending:
        swaps[end.rank] += 1
        return swap(end, *given)

    monkeypatch.setattr(VirtualEnd, "swap", counted)
    predict(model, draw_rows(model, [(16, 16)], num_each=2), 2, cfg_split="off", mode="sync")
    return swaps


def test_ranks_of_a_transformer_wait_once_for_each_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, exchanges in (("sd35", 5), ("qwen", 2), ("pixart", 3), ("lumina2", 3)):
        model = MODELS[name]()
        assert StripModel(model).num_exchanges == exchanges
        with monkeypatch.context() as patched:
            assert swaps_of(model, patched) == [exchanges, exchanges]


def test_size_of_an_image_is_that_of_its_pixels() -> None:
    """FLUX.2 folds 2 x 2 latents into one."""
    for model, side in ((qwen_transformer(), 32), (flux2_transformer(), 16)):
        with (
            closing(VirtualRanks(model, ParallelOptions("virtual:2", from_pixels=str(256**2)))) as virtual,
            virtual.end,
        ):
            assert [virtual.ranks.draws_whole(height, side) for height in (side - 2, side)] == [True, False]


@pytest.mark.parametrize(("name", "fed_per_resnet"), [("sdxl", 2), ("scale-shift", 1), ("gelu", 2)])
def test_number_of_rank_synchronisations_matches_the_latency_model(
    name: str, fed_per_resnet: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm before a convolution also exchanges the convolution's rows around a strip."""
    model = MODELS[name]()
    exchanges = StripModel(model).num_exchanges
    assert swaps_of(model, monkeypatch) == [exchanges, exchanges]
    modules = list(model.modules())
    norms = sum(isinstance(each, nn.GroupNorm) for each in modules)
    convolutions = sum(isinstance(each, nn.Conv2d) and each.kernel_size == (3, 3) for each in modules)
    attentions = sum(type(each).__name__ == "BasicTransformerBlock" for each in modules)
    resnets = sum(type(each).__name__ == "ResnetBlock2D" for each in modules)
    # The first layer gets its rows with the latents; the last norm feeds the last layer.
    assert exchanges == norms + convolutions - 1 + attentions - (fed_per_resnet * resnets + 1)


def test_one_rank_is_bit_equal_to_plain_diffusers() -> None:
    for model in (sdxl_unet(), sd3_transformer()):
        rows = draw_rows(model, [(16, 16)], num_each=2)
        plain = denoise(
            model,
            torch.stack([row.latents for row in rows]),
            torch.tensor([row.timestep for row in rows]),
            stack_conditions(rows),
        )
        assert torch.equal(predict(model, rows, 1), plain)
        # On two ranks, each half of the rows is a batch of its own, which sums in another order.
        assert error(predict(model, rows, 2), list(plain)) <= EXACT


@pytest.mark.parametrize("shares", ["2,1", "1,3", "5,1,2"])
def test_uneven_shares(shares: str) -> None:
    for model in (sdxl_unet(), sd3_transformer()):
        rows = draw_rows(model, [(36, 12)], num_each=2)
        assert (
            error(predict(model, rows, len(shares.split(",")), shares=shares, cfg_split="off"), run_plain(model, rows))
            <= EXACT
        )


def test_rows_join_and_leave() -> None:
    model = sdxl_unet()
    rows = draw_rows(model, [(16, 12)] * 3, num_each=1)
    wanted = run_plain(model, rows)
    with closing(VirtualRanks(model, ParallelOptions("virtual:3"))) as virtual, virtual.end, torch.inference_mode():
        for order in ([0], [0, 1], [2, 1, 0], [1], [1, 2]):
            names, own = [(number, 0) for number in order], [rows[number] for number in order]
            virtual.ranks.retain(names)
            virtual.ranks.learn(names, flat(stack_conditions(own)))
            latents, timesteps = torch.stack([row.latents for row in own]), torch.tensor([row.timestep for row in own])
            found = virtual.ranks.predict(names, latents, timesteps)
            assert error(found, [wanted[number] for number in order]) <= EXACT


def test_image_with_too_few_rows_is_refused() -> None:
    with closing(VirtualRanks(sdxl_unet(), ParallelOptions("virtual:4"))) as virtual, virtual.end:
        assert virtual.ranks.count_for(13, 8) == 4
        with pytest.raises(UsageError, match="4 ranks are too many for latents of 12 rows, of which 4 stay together"):
            virtual.ranks.count_for(12, 8)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_smaller_images_are_drawn_by_fewer_ranks() -> None:
    model = sdxl_unet()
    rows = draw_rows(model, [(12, 16)], num_each=2)
    options = ParallelOptions("virtual:4", may_use_fewer=True, from_pixels=str(64 * 8 * 16))
    with closing(VirtualRanks(model, options)) as virtual, virtual.end:
        assert [virtual.ranks.count_for(height, 16) for height in (4, 8, 12, 13)] == [1, 2, 3, 4]
        assert [virtual.ranks.draws_whole(height, 16) for height in (7, 8)] == [True, False]
    assert error(predict(model, rows, 4, may_use_fewer=True), run_plain(model, rows)) <= EXACT


def test_naive_parts_are_independent_images() -> None:
    """Calls split images by rows and by columns in turn, and each part equals the plain model's (DistriFusion 5.1)."""
    for model in (sdxl_unet(), sd3_transformer()):
        rows = draw_rows(model, [(16, 24)], num_each=2)
        names, conditions = [(0, 0), (0, 1)], stack_conditions(rows)
        latents, timesteps = torch.stack([row.latents for row in rows]), torch.tensor([row.timestep for row in rows])
        options = ParallelOptions("virtual:2", mode="naive")
        with closing(VirtualRanks(model, options)) as virtual, virtual.end, torch.inference_mode():
            virtual.ranks.learn(names, flat(conditions))
            for axis in (2, 3, 2):
                parts = [denoise(model, part, timesteps, conditions) for part in latents.chunk(2, axis)]
                assert torch.equal(virtual.ranks.predict(names, latents, timesteps), torch.cat(parts, axis))


def test_naive_parts_need_enough_columns() -> None:
    with closing(VirtualRanks(sdxl_unet(), ParallelOptions("virtual:4", mode="naive"))) as virtual, virtual.end:
        assert virtual.ranks.count_for(16, 16) == 4
        with pytest.raises(UsageError, match="4 ranks are too many for latents of 12 rows"):
            virtual.ranks.count_for(16, 12)


def test_rank_error_is_reported_and_the_group_recovers() -> None:
    model = sdxl_unet()
    rows = draw_rows(model, [(16, 12)], num_each=2)
    names, conditions = [(0, 0), (0, 1)], flat(stack_conditions(rows))
    latents, timesteps = torch.stack([row.latents for row in rows]), torch.tensor([row.timestep for row in rows])

    def ask(ranks: Ranks) -> Tensor:
        ranks.learn(names, conditions)
        return ranks.predict(names, latents, timesteps)

    def ask_too_much(ranks: Ranks) -> Tensor:
        ranks.learn(names, conditions)
        # Rank 1 keeps one row fewer than the call names.
        ranks._broadcast(Message("keep", {"rows": names[:1]}))
        return ranks.predict(names, latents, timesteps)

    def fail(ranks: Ranks) -> Tensor:
        ranks.learn(names, conditions)
        return ranks.predict(names, latents, timesteps[:1])

    options = ParallelOptions("virtual:2", cfg_split="off")
    with closing(VirtualRanks(model, options)) as virtual, virtual.end, torch.inference_mode():
        wanted = call_with_recovery(virtual, ask)
        with pytest.raises(RankError, match=r"rank 1: KeyError: \(0, 1\)"):
            call_with_recovery(virtual, ask_too_much)
        assert torch.equal(call_with_recovery(virtual, ask), wanted)
        with pytest.raises(IndexError):
            call_with_recovery(virtual, fail)
        assert torch.equal(call_with_recovery(virtual, ask), wanted)
