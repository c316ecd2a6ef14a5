"""Replacement of the leaves of an unmodified diffusers model by leaves that work on strips."""

from functools import partial
from typing import Any

from diffusers import UNet2DConditionModel
from torch import nn

from ..core.swap import Swap, parent_of
from ..families.table import SUPPORTED_MODELS
from ..families.transformer import Transformer
from ..patched.row_leaves import CachedConstant
from .attention import (
    StripCrossAttention,
    StripJointAttention,
    StripParallelAttention,
    StripSelfAttention,
    StripStreamAttention,
)
from .context import StripContext
from .leaves import StripConv, StripGroupNorm, feed_convolutions
from .model_levels import attends_to_text_only, attentions_of, unit_of
from .tokens import StripPads, StripPatchEmbed, StripRotary, StripStreamTokens, with_pads


class StripSwap(Swap):
    """Puts the leaves for strips into one model. The model works only through `StripModel` until `undo`.

    Attributes:
        text_readers: leaves that keep keys and values of the text.
        num_exchanges: number of times that ranks wait for each other in an exact call.

    Raises:
        UsageError: the model is not supported, as in `Swap`.
    """

    def __init__(self, model: nn.Module, context: StripContext) -> None:
        self._context = context
        self.text_readers: list[StripCrossAttention] = []
        self.num_exchanges = 0
        super().__init__(model, "--parallel", "leave it out", SUPPORTED_MODELS)

    def swap_unet(self, model: UNet2DConditionModel) -> None:
        context, num_blocks = self._context, len(model.down_blocks)
        modules: dict[str, nn.Module] = dict(model.named_modules())
        for name, module in modules.items():
            kind, parent, attribute = type(module).__name__, *parent_of(modules, name)
            factor = factor_of(name, num_blocks)
            if kind == "Conv2d" and module.kernel_size != (1, 1):
                self.put(parent, attribute, StripConv(module, context, has_halo=name == "conv_in"))  # type: ignore[arg-type]
            elif kind == "GroupNorm":
                self.put(parent, attribute, StripGroupNorm(module, context, factor))  # type: ignore[arg-type]
            elif kind == "Attention" and attribute == "attn2" and module.is_cross_attention:
                leaf = StripCrossAttention(module, context, len(self.text_readers))
                self.text_readers.append(leaf)
                self.put(parent, attribute, leaf)
            elif kind == "Attention":
                self.put(parent, attribute, StripSelfAttention(module, context, factor))
        # The first layer gets its halo with the latents.
        self.num_exchanges = len(self._undo) - len(self.text_readers) - 1 - feed_convolutions(model)

    def swap_transformer(self, model: Any, transformer: Transformer) -> None:
        context, factor = self._context, unit_of(model)
        for blocks in transformer.lists:
            is_stream = blocks is transformer.single or transformer.layout != "joint"
            for name, _ in list(attentions_of(model, blocks)):
                self.wrap(model, name, partial(self._leaf_of, factor=factor, is_stream=is_stream))
        if transformer.layout == "padded":
            for name, with_ends in with_pads(model, transformer, StripPads(model, context, factor)).items():
                self.put(model, name, with_ends)
        elif transformer.layout == "one row":
            self.wrap(model, "rope_embedder", StripStreamTokens, context, factor)
        elif transformer.image_ids is not None or transformer.joint_angles is not None:
            self.wrap(model, "pos_embed", StripRotary, transformer, context, factor)
        else:
            self.wrap(model, "pos_embed", StripPatchEmbed, context, transformer.positions)
        for name, kind in transformer.leaves.items():
            if kind == "constant":
                self.wrap(model, name, CachedConstant, model.device)

    def _leaf_of(self, attention: Any, factor: int, *, is_stream: bool) -> nn.Module:
        """Return the leaf for an attention of a transformer's blocks, whose tokens may be those of image and text."""
        context = self._context
        if attends_to_text_only(attention):
            reader = StripCrossAttention(attention, context, len(self.text_readers))
            self.text_readers.append(reader)
            return reader
        self.num_exchanges += 1
        if hasattr(attention, "to_qkv_mlp_proj"):
            return StripParallelAttention(attention, context, factor)
        if is_stream:
            return StripStreamAttention(attention, context, factor)
        is_joint = getattr(attention, "add_k_proj", None) is not None
        return (StripJointAttention if is_joint else StripSelfAttention)(attention, context, factor)


def factor_of(name: str, num_blocks: int) -> int:
    """Return the factor by which images are smaller than latents at a norm or an attention of a U-Net."""
    stage, number, *_ = [*name.split("."), ""]
    if stage == "down_blocks" and number:
        return 2 ** int(number)
    if stage == "up_blocks" and number:
        return 2 ** (num_blocks - 1 - int(number))
    return 2 ** (num_blocks - 1) if stage == "mid_block" else 1
