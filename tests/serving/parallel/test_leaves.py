"""Leaves on strips against the modules that they replace on whole images."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from patchedserve.serving.core.denoiser import copy_modules
from patchedserve.serving.parallel.context import StripContext
from patchedserve.serving.parallel.leaves import StripConv, StripGroupNorm, feed_convolutions
from patchedserve.serving.parallel.strips import Strips

from ...support.virtual_ranks import Leaf, in_calls, on_strips, relative

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
def test_strided_convolution(count: int, height: int) -> None:
    conv = nn.Conv2d(8, 5, 3, padding=1, stride=2)
    whole, strips = image(height, width=7), Strips.of(height, 2, [1] * count)
    found = on_strips(whole, strips, lambda context: StripConv(conv, context))
    assert relative(found, conv(whole)) <= 1e-6


@pytest.mark.parametrize("count", RANKS)
def test_first_layer_receives_the_rows_around_its_strip(count: int) -> None:
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


def _block(**settings: Any) -> ResnetBlock2D:
    """Return a block of a U-Net: twice a norm, an activation and a convolution."""
    torch.manual_seed(3)
    block = ResnetBlock2D(in_channels=8, out_channels=12, temb_channels=6, groups=4, **settings)
    for norm in (block.norm1, block.norm2):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return block


def _on_strips(block: ResnetBlock2D, num_fed: int) -> Callable[[StripContext], Leaf]:
    temb = torch.linspace(-1, 1, 12).view(2, 6)

    def make(context: StripContext) -> Leaf:
        strip = copy_modules(block)
        for name in ("norm1", "norm2"):
            setattr(strip, name, StripGroupNorm(getattr(block, name), context, factor=1))
        for name in ("conv1", "conv2"):
            setattr(strip, name, StripConv(getattr(block, name), context))
        assert feed_convolutions(strip) == num_fed
        return lambda x: strip(x, temb.to(x.dtype))

    return make


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_statistics_are_sent_with_the_rows_around_a_strip(
    count: int, dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    block = _block().to(dtype)
    whole = image(17).to(dtype, memory_format=memory_format)
    found = on_strips(whole, Strips.of(17, 1, [2, *[1] * (count - 1)]), _on_strips(block, 2))
    wanted = block(whole, torch.linspace(-1, 1, 12).view(2, 6).to(dtype))
    assert found.dtype == dtype
    assert relative(found.float(), wanted.float()) <= (1e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize(
    ("settings", "num_fed"), [({}, 2), ({"time_embedding_norm": "scale_shift"}, 1), ({"down": True}, 1)]
)
def test_calls_with_and_without_stored_state_are_equal(settings: dict[str, Any], num_fed: int) -> None:
    """The first call keeps slots for the second, so its norms and convolutions send separately."""
    block = _block(**settings)
    kept, last = in_calls([image(16)] * 2, Strips.of(16, 2, [1, 1]), _on_strips(block, num_fed), [(), ()])
    wanted = block(image(16), torch.linspace(-1, 1, 12).view(2, 6))
    assert relative(kept, wanted) <= 1e-6
    assert relative(last, wanted) <= 1e-6
