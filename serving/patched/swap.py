"""Puts the patch engine's leaves into an unmodified diffusers model, and takes them out again.

Only leaves are swapped; the model's own `forward` runs. Every module must be of a class known to work on patches: one
that could read beyond a patch without our knowing is refused by name.
"""

from collections.abc import Iterator
from typing import Any

from diffusers import SD3Transformer2DModel, UNet2DConditionModel
from torch import nn

from ...data.errors import UsageError
from .attention import PatchedCrossAttention, PatchedJointAttention, PatchedSelfAttention
from .context import PatchContext
from .leaves import (
    ActivationUnlessDone,
    PatchedConv,
    PatchedGroupNorm,
    PatchedPatchEmbed,
    PatchedUpsample,
    RowsToPatches,
    RowTimesteps,
)

# Classes whose forward treats tokens (or rows) one by one, or only calls its children.
_POINTWISE = {
    *("Linear", "LoRACompatibleLinear", "LayerNorm", "RMSNorm", "FP32LayerNorm", "SiLU", "GELU", "GEGLU", "Dropout"),
    *("Identity", "ModuleList", "Sequential", "Timesteps", "TimestepEmbedding", "PixArtAlphaTextProjection", "Tanh"),
    *("FeedForward", "BasicTransformerBlock", "Transformer2DModel", "ResnetBlock2D", "Downsample2D", "Attention"),
    *("UNet2DConditionModel", "DownBlock2D", "CrossAttnDownBlock2D", "UpBlock2D", "CrossAttnUpBlock2D"),
    *("UNetMidBlock2DCrossAttn", "CombinedTimestepTextProjEmbeddings", "AdaLayerNormZero", "AdaLayerNormContinuous"),
    *("SD35AdaLayerNormZeroX", "JointTransformerBlock", "SD3Transformer2DModel"),
}
_SWAPPED = {"Conv2d", "GroupNorm", "Attention", "Upsample2D", "PatchEmbed", "Timesteps"}


class Swap:
    """The leaves that were put into one model. The model works only through `PatchedModel` until `undo`.

    Attributes:
        convs: of a U-Net, by name.
        norms: those that are followed by a convolution with SiLU between, by that convolution.
    """

    def __init__(self, model: nn.Module, context: PatchContext) -> None:
        """Swap the leaves of `model` in place.

        Raises:
            UsageError: if the model's class, or a module in it, is not known to work on patches; nothing is
                changed then.
        """
        self.convs: dict[str, PatchedConv] = {}
        self.norms: dict[PatchedConv, PatchedGroupNorm] = {}
        self._undo: list[tuple[nn.Module, str, nn.Module]] = []
        check_model(model)
        self._context = context
        if isinstance(model, UNet2DConditionModel):
            self._swap_unet(model)
        else:
            assert isinstance(model, SD3Transformer2DModel)
            self._swap_transformer(model)

    def undo(self) -> None:
        """Put every original module back."""
        for parent, name, module in reversed(self._undo):
            setattr(parent, name, module)
        self._undo.clear()

    def _put(self, parent: nn.Module, name: str, leaf: nn.Module) -> None:
        self._undo.append((parent, name, getattr(parent, name)))
        # ModuleList names its children by number, and setattr takes that.
        setattr(parent, name, leaf)

    def _swap_unet(self, model: UNet2DConditionModel) -> None:
        context = self._context
        modules: dict[str, nn.Module] = dict(model.named_modules())
        for name, module in modules.items():
            kind, parent, attribute = type(module).__name__, *_parent(modules, name)
            if kind == "Conv2d":
                self.convs[name] = leaf = PatchedConv(module, context)  # type: ignore[arg-type]
                self._put(parent, attribute, leaf)
            elif kind == "Attention":
                # attn2 attends to the text, except where a block has self attention only.
                is_cross = attribute == "attn2" and module.is_cross_attention
                leaf = (PatchedCrossAttention if is_cross else PatchedSelfAttention)(module, context)
                self._put(parent, attribute, leaf)
            elif attribute == "time_emb_proj" and isinstance(module, nn.Linear):
                self._put(parent, attribute, RowsToPatches(module, context))
        fused = self._fused_norms(model, modules)
        for name, module in modules.items():
            kind, parent, attribute = type(module).__name__, *_parent(modules, name)
            if kind == "GroupNorm":
                conv = fused.get(name)
                norm = PatchedGroupNorm(module, context, conv)  # type: ignore[arg-type]
                self._put(parent, attribute, norm)
                if conv is not None:
                    self.norms[conv] = norm
            elif kind == "Upsample2D":
                self._put(parent, attribute, PatchedUpsample(self.convs[f"{name}.conv"], context))
        self._put(model, "time_proj", RowTimesteps(model.time_proj, context))

    def _fused_norms(self, model: nn.Module, modules: dict[str, nn.Module]) -> dict[str, PatchedConv]:
        """Norms with the convolution that follows with only SiLU between; that SiLU is swapped."""
        fused: dict[str, PatchedConv] = {}
        for name, module in modules.items():
            if type(module).__name__ == "ResnetBlock2D" and isinstance(module.nonlinearity, nn.SiLU):
                fused[f"{name}.norm1"] = self.convs[f"{name}.conv1"]
                if module.time_embedding_norm == "default":
                    fused[f"{name}.norm2"] = self.convs[f"{name}.conv2"]
                self._put(module, "nonlinearity", ActivationUnlessDone(module.nonlinearity, self._context))
        if isinstance(modules.get("conv_act"), nn.SiLU):
            fused["conv_norm_out"] = self.convs["conv_out"]
            self._put(model, "conv_act", ActivationUnlessDone(modules["conv_act"], self._context))
        return fused

    def _swap_transformer(self, model: SD3Transformer2DModel) -> None:
        context = self._context
        self._put(model, "pos_embed", PatchedPatchEmbed(model.pos_embed, context))
        self._put(model.norm_out, "linear", RowsToPatches(model.norm_out.linear, context))
        for block in model.transformer_blocks:
            self._put(block.norm1, "linear", RowsToPatches(block.norm1.linear, context))  # type: ignore[union-attr,arg-type]
            self._put(block, "attn", PatchedJointAttention(block.attn, context))
            if block.attn2 is not None:
                self._put(block, "attn2", PatchedSelfAttention(block.attn2, context))


def check_model(model: nn.Module) -> None:
    """Refuse a model that the patch engine could run wrongly.

    Raises:
        UsageError: naming the class or the module, and `--engine plain`.
    """
    if type(model) not in (UNet2DConditionModel, SD3Transformer2DModel):
        raise _refusal(f"{type(model).__name__} is not one of UNet2DConditionModel, SD3Transformer2DModel")
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()})
    if len(dtypes) > 1:
        raise _refusal(f"its weights have several dtypes ({', '.join(dtypes)})")
    for name, problem in _problems(model):
        raise _refusal(f"module {name or type(model).__name__} ({type(model.get_submodule(name)).__name__}) {problem}")


def _problems(model: Any) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind not in _POINTWISE | _SWAPPED:
            yield name, "is not known to work on patches"
        elif kind == "Conv2d" and not _is_known_conv(module) and not name.startswith("pos_embed"):
            yield name, f"is neither 1 x 1 nor 3 x 3 with padding 1 and stride 1 or 2: {module.extra_repr()}"
        elif kind == "ResnetBlock2D" and (module.upsample is not None or module.downsample is not None):
            yield name, "changes the resolution inside a residual block"
        elif kind == "Upsample2D" and (module.use_conv_transpose or not module.use_conv or module.norm is not None):
            yield name, "up-samples in another way than nearest neighbours and a convolution"
        elif kind in ("UpBlock2D", "CrossAttnUpBlock2D") and getattr(module, "s1", None) is not None:
            yield name, "uses FreeU, which filters whole images; turn it off first (disable_freeu)"
        elif kind == "Attention":
            if module.is_cross_attention and not name.endswith("attn2"):
                yield name, "attends to the text where other models attend to the image (only_cross_attention)"
            yield from ((name, problem) for problem in _attention_problems(module))
        elif kind == "PatchEmbed" and (not module.pos_embed_max_size or not module.flatten or module.layer_norm):
            yield name, "embeds positions in another way than SD3"
    if isinstance(model, UNet2DConditionModel):
        if model.config["encoder_hid_dim_type"] is not None:
            yield "", f"has encoder_hid_dim_type {model.config['encoder_hid_dim_type']}"
        if model.config["class_embed_type"] is not None or model.config["addition_embed_type"] not in (
            None,
            "text_time",
        ):
            yield "", "has conditions besides timestep, text and SDXL's added time ids"


def _is_known_conv(conv: nn.Conv2d) -> bool:
    same = (conv.dilation, conv.groups, conv.padding_mode) == ((1, 1), 1, "zeros")
    pointwise = (conv.kernel_size, conv.stride, conv.padding) == ((1, 1), (1, 1), (0, 0))
    square = conv.kernel_size == (3, 3) and conv.padding == (1, 1) and conv.stride in ((1, 1), (2, 2))
    return same and (pointwise or square)


def _attention_problems(attention: Any) -> Iterator[str]:
    if attention.group_norm is not None or attention.spatial_norm is not None or attention.norm_cross is not None:
        yield "has a norm of its own over all tokens"
    if attention.residual_connection or attention.rescale_output_factor != 1:
        yield "adds a residual or rescales its output"
    known = {"AttnProcessor", "AttnProcessor2_0", "JointAttnProcessor2_0"}
    kind = type(attention.processor).__name__
    if kind.startswith("Fused"):
        yield f"has fused projections ({kind}); undo them first (unfuse_qkv_projections)"
    elif kind not in known:
        yield f"has the processor {kind}"


def _parent(modules: dict[str, nn.Module], name: str) -> tuple[nn.Module, str]:
    parent, _, attribute = name.rpartition(".")
    return modules[parent], attribute


def _refusal(problem: str) -> UsageError:
    return UsageError(f"the patch engine cannot run this model: {problem}; use --engine plain")
