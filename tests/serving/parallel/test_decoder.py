"""Decoding in strips equals decoding the whole image."""

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor

from patchedserve.data.errors import UsageError
from patchedserve.serving.parallel.context import Pass, Team
from patchedserve.serving.parallel.decoder import StripDecoder
from patchedserve.serving.parallel.group import GroupError, VirtualEnd
from patchedserve.serving.parallel.options import ParallelOptions
from patchedserve.serving.parallel.virtual import VirtualRanks

from ...support.tiny_models import tiny_sd3, tiny_sdxl
from ...support.virtual_ranks import on_ranks, relative


def latents_of(autoencoder: Any, height: int) -> Tensor:
    return torch.randn(2, autoencoder.config.latent_channels, height, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("make", [tiny_sdxl, tiny_sd3])
@pytest.mark.parametrize(("height", "shares"), [(7, (1,)), (7, (1, 1)), (9, (1, 2, 1)), (5, (1, 1, 1, 1, 1))])
def test_strips_equal_the_whole_image(make: Callable[[], Any], height: int, shares: tuple[int, ...]) -> None:
    autoencoder = make().vae
    latents = latents_of(autoencoder, height)
    with torch.inference_mode():
        whole = autoencoder.decode(latents, return_dict=False)[0]

    def run(end: VirtualEnd) -> Tensor:
        decoder = StripDecoder(autoencoder)
        strips = decoder.strips(height, shares)
        start, stop = (each // decoder.factor for each in strips.starts[end.rank : end.rank + 2])
        call = Pass(Team(end, tuple(range(len(shares)))), strips, ((0, 0), (1, 0)))
        return decoder.decode(call, latents[:, :, start:stop])

    found = torch.cat(on_ranks(len(shares), run), 2)
    if len(shares) == 1:
        assert torch.equal(found, whole)
    assert relative(found, whole) <= 1e-5


def test_strips_are_at_most_the_rows_and_may_be_uneven() -> None:
    pipe = tiny_sdxl()
    options = ParallelOptions("virtual:4", shares="1,3,1,1")
    with closing(VirtualRanks(pipe.unet, options, pipe.vae)) as ranks, torch.inference_mode():
        assert ranks.decoder is not None
        for height in (1, 2, 3, 8):
            latents = latents_of(pipe.vae, height)
            assert relative(ranks.decoder(latents), pipe.vae.decode(latents, return_dict=False)[0]) <= 1e-5


def test_rank_0_can_decode_alone(capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tiny_sdxl()
    latents = latents_of(pipe.vae, 4)
    with closing(VirtualRanks(pipe.unet, ParallelOptions("virtual:2"), pipe.vae)) as ranks, torch.inference_mode():
        whole = pipe.vae.decode(latents, return_dict=False)[0]
        assert ranks.decoder is not None
        assert ranks._decoding is not None
        with ranks._decoding.end(0):
            ranks._decoding.abort(GroupError("rank 1 has gone"))
        for _ in range(2):
            assert torch.equal(ranks.decoder(latents), whole)
        said = capsys.readouterr().err
        assert said.count("Warning: images are decoded by rank 0 until the ranks meet again") == 1
        with ranks.end:
            ranks.recover(GroupError("rank 1 has gone"))
        assert relative(ranks.decoder(latents), whole) <= 1e-5
        assert not capsys.readouterr().err


def test_images_that_cannot_be_split_are_refused() -> None:
    decoder = StripDecoder(tiny_sdxl().vae)
    with pytest.raises(UsageError, match="3 ranks are too many for latents of 2 rows"):
        decoder.strips(2, (1, 1, 1))
    with pytest.raises(UsageError, match="Linear cannot be decoded in strips; try --parallel-decode whole"):
        StripDecoder(torch.nn.Linear(2, 2))
    other = tiny_sdxl().vae
    other.decoder.up_blocks[0].resnets[0].nonlinearity = torch.nn.Softmax()
    with pytest.raises(UsageError, match=r"module up_blocks\.0\.resnets\.0\.nonlinearity \(Softmax\)"):
        StripDecoder(other)
