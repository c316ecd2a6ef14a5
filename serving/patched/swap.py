"""Insertion of the patch engine's leaves into an unmodified diffusers model."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..core.swap import Swap, UNetLike, parent_of
from ..families.table import SUPPORTED_MODELS
from ..families.transformer import Leaf, Transformer
from .attention import (
    PatchedCrossAttention,
    PatchedJointAttention,
    PatchedParallelAttention,
    PatchedSelfAttention,
    PatchedStreamAttention,
)
from .context import PatchContext
from .leaves import FusableActivation, PatchedConv, PatchedGroupNorm, PatchedUpsample
from .one_row import insert_one_row
from .padded import insert_padded
from .row_leaves import (
    CachedCaption,
    CachedConstant,
    PatchedPatchEmbed,
    ResultsToPatches,
    RowsAndZeroToPatches,
    RowsToPatches,
    RowTimesteps,
    rows_to_patches,
)
from .streams import (
    BlocksWithBoundaries,
    CachedText,
    JoinStreams,
    JointRotary,
    RotaryPositions,
    RowsToUpcomingStream,
    SplitStreams,
    rows_to_stream,
)


class PatchSwap(Swap):
    """The patch engine's leaves in one model. The model works only through `PatchedModel` until `undo`.

    Attributes:
        convs: convolutions of a U-Net, by name.
        norms: norms that a convolution follows with only SiLU between, by that convolution.

    Raises:
        UsageError: as `Swap`.
    """

    def __init__(self, model: nn.Module, context: PatchContext) -> None:
        self.convs: dict[str, PatchedConv] = {}
        self.norms: dict[PatchedConv, PatchedGroupNorm] = {}
        self._context = context
        super().__init__(model, "the patch engine", "use --engine plain", (*SUPPORTED_MODELS, "ControlNetModel"))

    def swap_unet(self, model: UNetLike) -> None:
        context = self._context
        # The last convolutions of a ControlNet run at all levels, and see single pixels.
        modules: dict[str, nn.Module] = {
            name: each for name, each in model.named_modules() if not name.startswith("controlnet_")
        }
        for name, module in modules.items():
            kind, parent, attribute = type(module).__name__, *parent_of(modules, name)
            if kind == "Conv2d":
                self.convs[name] = leaf = PatchedConv(module, context)  # type: ignore[arg-type]
                self.put(parent, attribute, leaf)
            elif kind == "Attention":
                # attn2 attends to the text, except where a block has self attention only.
                is_cross = attribute == "attn2" and module.is_cross_attention
                leaf = (PatchedCrossAttention if is_cross else PatchedSelfAttention)(module, context)
                self.put(parent, attribute, leaf)
            elif attribute == "time_emb_proj" and isinstance(module, nn.Linear):
                self.put(parent, attribute, RowsToPatches(module, context))
        fused = self._fused_norms(model, modules)
        for name, module in modules.items():
            kind, parent, attribute = type(module).__name__, *parent_of(modules, name)
            if kind == "GroupNorm":
                conv = fused.get(name)
                norm = PatchedGroupNorm(module, context, conv)  # type: ignore[arg-type]
                self.put(parent, attribute, norm)
                if conv is not None:
                    self.norms[conv] = norm
            elif kind == "Upsample2D":
                self.put(parent, attribute, PatchedUpsample(self.convs[f"{name}.conv"], context))
        self.put(model, "time_proj", RowTimesteps(model.time_proj, context))

    def _fused_norms(self, model: nn.Module, modules: dict[str, nn.Module]) -> dict[str, PatchedConv]:
        """Return the convolutions that follow a norm with only SiLU between, by the norm's name; swap that SiLU."""
        fused: dict[str, PatchedConv] = {}
        for name, module in modules.items():
            if type(module).__name__ == "ResnetBlock2D" and isinstance(module.nonlinearity, nn.SiLU):
                fused[f"{name}.norm1"] = self.convs[f"{name}.conv1"]
                if module.time_embedding_norm == "default":
                    fused[f"{name}.norm2"] = self.convs[f"{name}.conv2"]
                self.put(module, "nonlinearity", FusableActivation(module.nonlinearity, self._context))
        if isinstance(modules.get("conv_act"), nn.SiLU):
            fused["conv_norm_out"] = self.convs["conv_out"]
            self.put(model, "conv_act", FusableActivation(modules["conv_act"], self._context))
        return fused

    def swap_transformer(self, model: Any, transformer: Transformer) -> None:
        context = self._context
        if transformer.layout == "one row":
            insert_one_row(self, model, transformer, context)
            return
        if transformer.layout == "padded":
            insert_padded(self, model, transformer, context)
            return
        if transformer.joint_angles is not None:
            self.put(model, "pos_embed", JointRotary(model.pos_embed, transformer.joint_angles, context))
        elif transformer.image_ids is None:
            self.put(model, "pos_embed", PatchedPatchEmbed(model.pos_embed, context, transformer.positions))
        else:
            self.put(model, "pos_embed", RotaryPositions(model.pos_embed, transformer, context))
        for name, kind in transformer.leaves.items():
            if kind == "constant":
                self.wrap(model, name, CachedConstant, model.device)
            else:
                self.wrap(model, name, _LEAVES[kind], context)
        modulated = rows_to_patches
        if transformer.at_zero is not None and getattr(model, transformer.at_zero):
            self.put(model, transformer.at_zero, False)
            modulated = RowsAndZeroToPatches
        for block in getattr(model, transformer.joint.name):
            self.wrap(block, transformer.joint.modulation, modulated, context)
            for name in transformer.joint.attention:
                attention = getattr(block, name, None)
                if attention is not None:
                    self.put(block, name, _leaf_of(attention)(attention, context))
        if transformer.single is None:
            return
        for block in getattr(model, transformer.single.name):
            self.wrap(block, transformer.single.modulation, rows_to_stream, context)
            for name in transformer.single.attention:
                attention = getattr(block, name)
                is_parallel = hasattr(attention, "to_qkv_mlp_proj")
                leaf = PatchedParallelAttention if is_parallel else PatchedStreamAttention
                self.put(block, name, leaf(attention, context))
        # Outside these lists, the model itself joins and splits tensors with a row for each row of the batch.
        ends: dict[str, nn.Module] = {
            transformer.joint.name: JoinStreams(context),
            transformer.single.name: SplitStreams(context),
        }
        for name, end in ends.items():
            self.put(model, name, BlocksWithBoundaries(getattr(model, name), behind=[end]))


_LEAVES: Mapping[Leaf, Callable[[Any, PatchContext], nn.Module]] = {
    "rows": rows_to_patches,
    "results": ResultsToPatches,
    "stream": RowsToUpcomingStream,
    "caption": CachedCaption,
    "text": CachedText,
}


def _leaf_of(attention: Any) -> Any:
    """Return the leaf class for an attention of blocks in which the image is a separate stream."""
    if getattr(attention, "add_k_proj", None) is not None:
        return PatchedJointAttention
    return PatchedCrossAttention if getattr(attention, "is_cross_attention", False) else PatchedSelfAttention
