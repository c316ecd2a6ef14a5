"""Whole models on virtual ranks against plain diffusers."""

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor

from patchedserve.data.errors import UsageError
from patchedserve.serving.core.denoiser import denoise
from patchedserve.serving.parallel.group import GroupError, Message
from patchedserve.serving.parallel.options import ParallelOptions
from patchedserve.serving.parallel.strip_model import flat
from patchedserve.serving.parallel.virtual import VirtualRanks

from ...support.patched_models import MODELS, Row, draw_rows, run_plain, sd3_transformer, sdxl_unet, stack_conditions

EXACT = 1e-5
"""Largest difference over largest magnitude, in float32."""


def predict(model: Any, rows: Sequence[Row], size: int, **settings: Any) -> Tensor:
    """What `size` ranks give for guided requests of one resolution."""
    names = [(index // 2, index % 2) for index in range(len(rows))]
    with (
        closing(VirtualRanks(model, size, ParallelOptions(**settings))) as virtual,
        virtual.end,
        torch.inference_mode(),
    ):
        virtual.ranks.learn(names, flat(stack_conditions(rows)))
        latents, timesteps = torch.stack([row.latents for row in rows]), torch.tensor([row.timestep for row in rows])
        return virtual.ranks.predict(names, latents, timesteps)


def error(found: Tensor, wanted: Sequence[Tensor]) -> float:
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("name", MODELS)
def test_any_number_of_ranks_gives_what_one_gives(name: str, count: int) -> None:
    model = MODELS[name]()
    # A U-Net of 4 levels keeps 8 rows together; 61 leaves the last strip with an odd end at every level.
    size = (36, 14) if name.startswith("sd3") else (61, 13)
    rows = draw_rows(model, [size, size], num_each=2)
    wanted = run_plain(model, rows)
    assert error(predict(model, rows, count), wanted) <= EXACT
    assert error(predict(model, rows, count, splits_guidance=True), wanted) <= EXACT


def test_one_rank_is_plain_diffusers_bit_by_bit() -> None:
    for model in (sdxl_unet(), sd3_transformer()):
        rows = draw_rows(model, [(16, 16)], num_each=2)
        plain = denoise(
            model,
            torch.stack([row.latents for row in rows]),
            torch.tensor([row.timestep for row in rows]),
            stack_conditions(rows),
        )
        assert torch.equal(predict(model, rows, 1), plain)
        # Each half of the rows is a batch of its own then, which sums in another order.
        assert error(predict(model, rows, 2, splits_guidance=True), list(plain)) <= EXACT


@pytest.mark.parametrize("shares", [(2, 1), (1, 3), (5, 1, 2)])
def test_uneven_shares(shares: tuple[float, ...]) -> None:
    for model in (sdxl_unet(), sd3_transformer()):
        rows = draw_rows(model, [(36, 12)], num_each=2)
        assert error(predict(model, rows, len(shares), shares=shares), run_plain(model, rows)) <= EXACT


def test_rows_come_and_go() -> None:
    model = sdxl_unet()
    rows = draw_rows(model, [(16, 12)] * 3, num_each=1)
    wanted = run_plain(model, rows)
    with closing(VirtualRanks(model, 3, ParallelOptions())) as virtual, virtual.end, torch.inference_mode():
        for order in ([0], [0, 1], [2, 1, 0], [1], [1, 2]):
            names, own = [(number, 0) for number in order], [rows[number] for number in order]
            virtual.ranks.keep(names)
            virtual.ranks.learn(names, flat(stack_conditions(own)))
            latents, timesteps = torch.stack([row.latents for row in own]), torch.tensor([row.timestep for row in own])
            found = virtual.ranks.predict(names, latents, timesteps)
            assert error(found, [wanted[number] for number in order]) <= EXACT


def test_an_image_that_is_too_low_is_refused() -> None:
    with closing(VirtualRanks(sdxl_unet(), 4, ParallelOptions())) as virtual, virtual.end:
        virtual.ranks.check(13)
        with pytest.raises(UsageError, match="4 ranks are too many for latents of 12 rows, of which 4 stay together"):
            virtual.ranks.check(12)


def test_a_rank_that_fails_ends_the_call_of_all() -> None:
    model = sdxl_unet()
    rows = draw_rows(model, [(16, 12)], num_each=2)
    with closing(VirtualRanks(model, 2, ParallelOptions())) as virtual, virtual.end, torch.inference_mode():
        names = [(0, 0), (0, 1)]
        virtual.ranks.learn(names, flat(stack_conditions(rows)))
        # Rank 0 has rank 1 learn of one row less than it asks for later.
        virtual.ranks._tell_all(Message("keep", {"rows": names[:1]}))
        with pytest.raises(GroupError, match=r"given up: \(0, 1\)"):
            virtual.ranks.predict(names, torch.stack([row.latents for row in rows]), torch.tensor([1.0, 1.0]))
