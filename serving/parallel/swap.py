"""Replacement of the leaves of an unmodified diffusers model by leaves that work on strips."""

from typing import Any

from diffusers import UNet2DConditionModel
from torch import nn

from ..core.swap import Swap, parent_of
from ..families.transformer import Transformer
from .attention import StripCrossAttention, StripJointAttention, StripSelfAttention
from .context import StripContext
from .leaves import StripConv, StripGroupNorm, StripPatchEmbed, feed_convolutions

MODELS = ("UNet2DConditionModel", "SD3Transformer2DModel")
"""Classes of models that run on strips."""


class StripSwap(Swap):
    """Puts the leaves for strips into one model. The model works only through `StripModel` until `undo`.

    Attributes:
        text_readers: leaves that keep keys and values of the text.

    Raises:
        UsageError: the model is not supported, as in `Swap`.
    """

    def __init__(self, model: nn.Module, context: StripContext) -> None:
        self._context = context
        self.text_readers: list[StripCrossAttention] = []
        self._num_fed = 0
        super().__init__(model, "--parallel", "leave it out", MODELS)

    @property
    def num_exchanges(self) -> int:
        """Number of times that ranks wait for each other in an exact call."""
        # The first layer gets its halo with the latents, or has none.
        return len(self._undo) - len(self.text_readers) - 1 - self._num_fed

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
                self.text_readers.append(leaf := StripCrossAttention(module, context))
                self.put(parent, attribute, leaf)
            elif kind == "Attention":
                self.put(parent, attribute, StripSelfAttention(module, context, factor))
        self._num_fed = feed_convolutions(model)

    def swap_transformer(self, model: Any, transformer: Transformer) -> None:
        context, factor = self._context, model.config["patch_size"]
        self.put(model, "pos_embed", StripPatchEmbed(model.pos_embed, context))
        for block in model.transformer_blocks:
            self.put(block, "attn", StripJointAttention(block.attn, context, factor))
            if block.attn2 is not None:
                self.put(block, "attn2", StripSelfAttention(block.attn2, context, factor))


def factor_of(name: str, num_blocks: int) -> int:
    """Return the factor by which images are smaller than latents at a norm or an attention of a U-Net."""
    stage, number, *_ = [*name.split("."), ""]
    if stage == "down_blocks" and number:
        return 2 ** int(number)
    if stage == "up_blocks" and number:
        return 2 ** (num_blocks - 1 - int(number))
    return 2 ** (num_blocks - 1) if stage == "mid_block" else 1


def unit_of(model: nn.Module) -> int:
    """Return the number of rows of latents that must stay together: those of one row at the model's deepest level."""
    if isinstance(model, UNet2DConditionModel):
        return 2 ** (len(model.down_blocks) - 1)
    return model.config["patch_size"]  # type: ignore[index,return-value]  diffusers' configuration is a dictionary
