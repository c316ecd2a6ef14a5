"""Leaves on strips against the modules that they replace, on whole images."""

import pytest
import torch
from torch import Tensor, nn

from patchedserve.serving.parallel.leaves import StripConv, StripGroupNorm
from patchedserve.serving.parallel.strips import Strips

from ...support.virtual_ranks import on_strips, relative

RANKS = range(1, 9)


def image(height: int, width: int = 6, channels: int = 8) -> Tensor:
    torch.manual_seed(height)
    # Strips differ in mean and spread, as those of images do.
    return (
        torch.randn(2, channels, height, width) * torch.linspace(0.5, 3, height)[:, None]
        + torch.arange(height)[:, None]
    )


@pytest.mark.parametrize("count", RANKS)
@pytest.mark.parametrize("height", [8, 9, 16, 17, 31])
def test_convolution(count: int, height: int) -> None:
    conv = nn.Conv2d(8, 5, 3, padding=1)
    whole, strips = image(height), Strips.of(height, 1, [1] * count)
    found = on_strips(whole, strips, lambda context: StripConv(conv, context))
    assert relative(found, conv(whole)) <= 1e-6


@pytest.mark.parametrize("count", RANKS)
@pytest.mark.parametrize("height", [16, 17, 30])
def test_convolution_that_halves(count: int, height: int) -> None:
    conv = nn.Conv2d(8, 5, 3, padding=1, stride=2)
    whole, strips = image(height, width=7), Strips.of(height, 2, [1] * count)
    found = on_strips(whole, strips, lambda context: StripConv(conv, context))
    assert relative(found, conv(whole)) <= 1e-6


@pytest.mark.parametrize("count", RANKS)
def test_a_first_layer_gets_the_rows_around_its_strip(count: int) -> None:
    conv = nn.Conv2d(8, 5, 3, padding=1)
    whole, strips = image(17), Strips.of(17, 2, [1] * count)
    found = on_strips(whole, strips, lambda context: StripConv(conv, context, has_halo=True), halo=int(count > 1))
    assert relative(found, conv(whole)) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", RANKS)
def test_group_norm(count: int, dtype: torch.dtype) -> None:
    norm = nn.GroupNorm(4, 8)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    norm = norm.to(dtype)
    whole, strips = image(17).to(dtype), Strips.of(17, 2, [2, *[1] * (count - 1)])
    found = on_strips(whole, strips, lambda context: StripGroupNorm(norm, context, factor=1))
    assert found.dtype == dtype
    assert relative(found.float(), norm(whole).float()) <= (1e-6 if dtype == torch.float32 else 1e-2)
