"""Models and inputs that the patch engine refuses, with a one-line error that says what helps."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor2_0
from diffusers.models.resnet import ResnetBlock2D
from torch import nn

from patchedserve.data.errors import UsageError
from patchedserve.serving.patched.context import PatchContext
from patchedserve.serving.patched.patched_model import PatchedModel
from patchedserve.serving.patched.swap import PatchSwap

from ...support.patched_cases import (
    IMAGE,
    MIXED,
    TOLERANCE,
    model_of,
    modules_of,
)
from ...support.patched_models import Alternation, call_patched, draw_rows, relative_error, run_patched, run_plain
from ...support.random_models import flux_transformer, sd3_transformer, sd15_unet, sdxl_unet, small_unet


class UnknownOp(nn.SiLU):
    """A module that the patch engine does not know."""


class Processor(AttnProcessor2_0):
    """An attention processor that the patch engine does not know."""


class Subclass(UNet2DConditionModel):
    """A model whose `forward` the patch engine does not know."""


def _with(name: str, module: nn.Module, **changes: Any) -> nn.Module:
    model = small_unet(**changes)
    model.set_submodule(name, module)
    return model


def _after(method: str, *arguments: Any, build: Callable[..., Any] = small_unet) -> nn.Module:
    model = build()
    getattr(model, method)(*arguments)
    return model


_SIMPLE: dict[str, Any] = {
    "down_block_types": ("DownBlock2D", "SimpleCrossAttnDownBlock2D"),
    "up_block_types": ("SimpleCrossAttnUpBlock2D", "UpBlock2D"),
    "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
}
_RESNET: dict[str, Any] = {
    "down_block_types": ("ResnetDownsampleBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
}
_FIRST_RESNET = "down_blocks.0.resnets.0"
_TRANSFORMER = "down_blocks.1.attentions.0"

REFUSALS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "model": (lambda: nn.Linear(2, 2), "Linear is not one of UNet2DConditionModel, SD3Transformer2DModel"),
    "subclass": (lambda: Subclass(**small_unet().config), "Subclass is not one of UNet2DConditionModel, SD3"),
    "module": (lambda: _with("conv_act", UnknownOp()), r"module conv_act \(UnknownOp\) is not known to work on parts"),
    "activation": (lambda: small_unet(act_fn="mish"), r"module \S+ \(Mish\) is not known"),
    "mid block": (lambda: small_unet(mid_block_type="UNetMidBlock2D"), r"module mid_block \(UNetMidBlock2D\) is not"),
    "simple cross": (
        lambda: small_unet(**_SIMPLE),
        r"module down_blocks.1 \(SimpleCrossAttnDownBlock2D\) is not known",
    ),
    "resnet down": (lambda: small_unet(**_RESNET), r"module down_blocks.0 \(ResnetDownsampleBlock2D\) is not known"),
    "gligen": (lambda: small_unet(attention_type="gated"), r"\(GatedSelfAttentionDense\) is not known"),
    "dual cross": (lambda: small_unet(dual_cross_attention=True), r"\(DualTransformer2DModel\) is not known"),
    "fourier": (lambda: small_unet(time_embedding_type="fourier"), r"time_proj \(GaussianFourierProjection\) is not"),
    "kernel": (lambda: small_unet(conv_in_kernel=5), r"module conv_in \(Conv2d\) is neither .*kernel_size=\(5, 5\)"),
    "dilation": (
        lambda: _with("conv_in", nn.Conv2d(4, 8, 3, padding=1, dilation=2)),
        r"module conv_in \(Conv2d\) is neither .*dilation=\(2, 2\)",
    ),
    "groups": (
        lambda: _with("conv_in", nn.Conv2d(4, 8, 3, padding=1, groups=2)),
        r"module conv_in \(Conv2d\) is neither .*groups=2",
    ),
    "circular": (
        lambda: _with("conv_in", nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular")),
        r"module conv_in \(Conv2d\) is neither .*padding_mode=circular",
    ),
    "stride": (
        lambda: _with("conv_in", nn.Conv2d(4, 8, 3, padding=1, stride=3)),
        r"module conv_in \(Conv2d\) is neither .*stride=\(3, 3\)",
    ),
    "padding": (
        lambda: small_unet(downsample_padding=0),
        r"module down_blocks.0.downsamplers.0.conv \(Conv2d\) is neither .*stride=\(2, 2\)",
    ),
    "resnet up": (
        lambda: _with(_FIRST_RESNET, ResnetBlock2D(in_channels=8, temb_channels=32, groups=2, up=True)),
        rf"module {_FIRST_RESNET} \(ResnetBlock2D\) changes the resolution",
    ),
    "processor": (
        lambda: _after("set_attn_processor", Processor()),
        rf"module {_TRANSFORMER}.transformer_blocks.0.attn1 \(Attention\) has the processor Processor",
    ),
    "sliced": (lambda: _after("set_attention_slice", "max"), r"\(Attention\) has the processor SlicedAttnProcessor"),
    "fused": (
        lambda: _after("fuse_qkv_projections"),
        r"attn1 \(Attention\) has fused projections .* first \(unfuse_qkv_projections\)",
    ),
    "fused sd3": (
        lambda: _after("fuse_qkv_projections", build=sd3_transformer),
        r"module transformer_blocks.0.attn \(Attention\) has fused projections .*unfuse_qkv_projections",
    ),
    "fused flux": (
        lambda: _after("fuse_qkv_projections", build=flux_transformer),
        r"module transformer_blocks.0.attn \(FluxAttention\) has fused projections .*unfuse_qkv_projections",
    ),
    "cross only": (
        lambda: small_unet(only_cross_attention=True),
        r"attn1 \(Attention\) attends to the text .*only_cross_attention",
    ),
    "freeu": (
        lambda: _after("enable_freeu", 0.9, 0.2, 1.2, 1.4),
        r"module up_blocks.0 \(CrossAttnUpBlock2D\) uses FreeU, .*disable_freeu",
    ),
    "classes": (lambda: small_unet(num_class_embeds=10), r"module class_embedding \(Embedding\) is not known"),
    "class embedding": (
        lambda: small_unet(class_embed_type="timestep"),
        r"module UNet2DConditionModel \(UNet2DConditionModel\) has conditions besides timestep, text",
    ),
    "text projection": (
        lambda: small_unet(encoder_hid_dim_type="text_proj", encoder_hid_dim=8),
        r"\(UNet2DConditionModel\) has encoder_hid_dim_type text_proj",
    ),
    "positions": (
        lambda: sd3_transformer(pos_embed_max_size=None),
        r"module pos_embed \(PatchEmbed\) embeds positions in another way than SD3",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("problem", REFUSALS)
def test_unsupported_models_are_refused(problem: str) -> None:
    build, pattern = REFUSALS[problem]
    model = build()
    modules = modules_of(model)
    with pytest.raises(UsageError, match=pattern) as refusal:
        PatchedModel(model)
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).startswith("the patch engine cannot run this model: ")
    assert str(refusal.value).endswith("; use --engine plain")
    with pytest.raises(UsageError, match=pattern):
        PatchSwap(model, PatchContext(Alternation()))
    assert modules_of(model) == modules


@pytest.mark.parametrize(
    ("build", "on", "off"),
    [
        (small_unet, ("fuse_qkv_projections",), "unfuse_qkv_projections"),
        (sd3_transformer, ("fuse_qkv_projections",), "unfuse_qkv_projections"),
        (flux_transformer, ("fuse_qkv_projections",), "unfuse_qkv_projections"),
        (small_unet, ("enable_freeu", 0.9, 0.2, 1.2, 1.4), "disable_freeu"),
    ],
)
def test_advice_of_a_refusal_works(build: Callable[..., Any], on: tuple[Any, ...], off: str) -> None:
    model = build()
    rows = draw_rows(model, MIXED, seed=20)
    getattr(model, on[0])(*on[1:])
    getattr(model, off)()
    assert relative_error(run_patched(IMAGE.build(model), rows), run_plain(build(), rows)) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "patch_size", "message"),
    [
        (sdxl_unet, 12, r"patch size 12 does not fit: .*\(common divisor 8\).*multiple of 4 .*allowed here: 4, 8"),
        (sdxl_unet, 2, r"patch size 2 does not fit: .*multiple of 4 for this model; allowed here: 4, 8"),
        (sdxl_unet, 16, r"patch size 16 does not fit: .*allowed here: 4, 8"),
        (sd15_unet, 4, r"patch size 4 does not fit: .*multiple of 8 for this model; allowed here: 8"),
        (flux_transformer, 1, r"patch size 1 does not fit: .*multiple of 2 for this model; allowed here: 2, 4, 8"),
        (sd3_transformer, 1, r"patch size 1 does not fit: .*multiple of 2 for this model; allowed here: 2, 4, 8"),
    ],
)
def test_patch_size_that_does_not_divide_is_refused(build: Callable[..., Any], patch_size: int, message: str) -> None:
    patched = PatchedModel(build(), order="patch", patch_size=patch_size)
    with pytest.raises(UsageError, match=message) as refusal:
        patched.pack([(16, 16), (24, 24)])
    assert "\n" not in str(refusal.value)


def test_text_mask_is_refused() -> None:
    model = model_of("sdxl")
    rows = draw_rows(model, [(8, 8)], seed=21)
    patched = IMAGE.build(model)
    run_patched(patched, rows)
    masked = [replace(rows[0], conditions=rows[0].conditions | {"encoder_attention_mask": torch.ones(7)})]
    with pytest.raises(ValueError, match="no engine but plain supports the attention arguments attention_mask"):
        call_patched(patched, masked)
