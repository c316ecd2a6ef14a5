"""Insertion of the patch engine's leaves into an unmodified diffusers model."""

from typing import Any

from diffusers import UNet2DConditionModel
from torch import nn

from ..core.swap import Swap, parent_of
from ..families.table import SUPPORTED_MODELS
from ..families.transformer import Transformer
from .attention import (
    PatchedCrossAttention,
    PatchedJointAttention,
    PatchedParallelAttention,
    PatchedSelfAttention,
    PatchedStreamAttention,
)
from .context import PatchContext
from .leaves import FusableActivation, PatchedConv, PatchedGroupNorm, PatchedUpsample
from .one_row import RefinedText, SingleStreamTokens, StreamStart, SwappedAxes
from .padded import (
    ImageStreamEnd,
    ImageStreamStart,
    JointStreamEnd,
    JointStreamStart,
    PaddedStream,
    PaddedText,
    StreamRotaryAttention,
    no_angles,
)
from .row_leaves import (
    CachedCaption,
    CachedConstant,
    EmbToPatches,
    PatchedPatchEmbed,
    ResultsToPatches,
    RowsToPatches,
    RowTimesteps,
)
from .streams import (
    BlocksWithBoundaries,
    CachedText,
    EmbToStream,
    JoinStreams,
    JointRotary,
    RotaryPositions,
    RowsToStream,
    RowsToUpcomingStream,
    SplitStreams,
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
        super().__init__(model, "the patch engine", "use --engine plain", SUPPORTED_MODELS)

    def swap_unet(self, model: UNet2DConditionModel) -> None:
        context = self._context
        modules: dict[str, nn.Module] = dict(model.named_modules())
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
        context, ids = self._context, transformer.image_ids
        if transformer.text_refiner is not None and transformer.pads_to is not None:
            self._swap_padded(model, transformer, transformer.text_refiner, transformer.pads_to)
            return
        if transformer.text_refiner is not None:
            self._swap_one_row(model, transformer, transformer.text_refiner)
            return
        if transformer.joint_angles is not None:
            self.put(model, "pos_embed", JointRotary(model.pos_embed, transformer.joint_angles, context))
        elif ids is None:
            self.put(model, "pos_embed", PatchedPatchEmbed(model.pos_embed, context, transformer.positions))
        else:
            self.put(model, "pos_embed", RotaryPositions(model.pos_embed, ids, transformer.text_ids, context))
        if transformer.modulation is not None:
            shared = getattr(model, transformer.modulation)
            self.put(model, transformer.modulation, ResultsToPatches(shared, context))
        if transformer.constant is not None:
            where, _, attribute = transformer.constant.rpartition(".")
            parent = model.get_submodule(where)
            self.put(parent, attribute, CachedConstant(getattr(parent, attribute), model.device))
        if transformer.text_embedder is not None:
            embed = getattr(model, transformer.text_embedder)
            self.put(model, transformer.text_embedder, CachedText(embed, context))
        if transformer.caption is not None:
            self.put(model, transformer.caption, CachedCaption(getattr(model, transformer.caption), context))
        self._modulate(model, transformer.norm_out, RowsToPatches, EmbToPatches)
        self._modulate(model, transformer.joint.shared, RowsToPatches, EmbToPatches)
        for block in getattr(model, transformer.joint.name):
            self._modulate(block, transformer.joint.modulation, RowsToPatches, EmbToPatches)
            for name in transformer.joint.attention:
                attention = getattr(block, name, None)
                if attention is not None:
                    self.put(block, name, _leaf_of(attention)(attention, context))
        if transformer.single is None:
            return
        self._modulate(model, transformer.single.shared, RowsToUpcomingStream, EmbToStream)
        for block in getattr(model, transformer.single.name):
            self._modulate(block, transformer.single.modulation, RowsToStream, EmbToStream)
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

    def _swap_one_row(self, model: Any, transformer: Transformer, refiner: str) -> None:
        """Insert the leaves into a model like Lumina 2, see `one_row`."""
        context, image, both = self._context, transformer.joint, transformer.single
        assert both is not None, "text that is refined joins a stream"
        rotary = model.rope_embedder
        text = RefinedText(model.time_caption_embed, getattr(model, refiner), rotary, context)
        self._modulate(model, transformer.norm_out, RowsToStream, EmbToStream)
        for blocks in (image, both):
            for block in getattr(model, blocks.name):
                self._modulate(block, blocks.modulation, RowsToStream, EmbToStream)
                for name in blocks.attention:
                    self.put(block, name, PatchedStreamAttention(getattr(block, name), context))
        self.put(model, "time_caption_embed", text)
        self.put(model, refiner, nn.ModuleList())
        self.put(model, "rope_embedder", SingleStreamTokens(rotary, context))
        self.put(model, "x_embedder", SwappedAxes(model.x_embedder))
        self.put(model.norm_out, "linear_2", SwappedAxes(model.norm_out.linear_2))
        behind = [SwappedAxes(nn.Identity())]
        self.put(model, image.name, BlocksWithBoundaries(getattr(model, image.name), behind=behind))
        self.put(model, both.name, BlocksWithBoundaries(getattr(model, both.name), before=[StreamStart(context)]))

    def _swap_padded(self, model: Any, transformer: Transformer, refiner: str, multiple: int) -> None:
        """Insert the leaves into a model like Z-Image, see `padded`."""
        stream, image, both = PaddedStream(model, multiple, self._context), transformer.joint, transformer.single
        assert both is not None, "text that is refined joins a stream"
        for blocks in (image, both):
            for block in getattr(model, blocks.name):
                self._modulate(block, blocks.modulation, RowsToStream, EmbToStream)
                self.put(block, "attention", StreamRotaryAttention(block.attention, stream))
        for final in model.all_final_layer.values():
            self._modulate(final, "adaLN_modulation.1", RowsToStream, EmbToStream)
            self.put(final, "linear", SwappedAxes(final.linear))
        self.put(model, "cap_embedder", PaddedText(model, getattr(model, refiner), self._context))
        self.put(model, refiner, nn.ModuleList())
        self.put(model, "rope_embedder", no_angles)
        ends = {image.name: (ImageStreamStart, ImageStreamEnd), both.name: (JointStreamStart, JointStreamEnd)}
        for name, (begin, end) in ends.items():
            self.put(
                model, name, BlocksWithBoundaries(getattr(model, name), before=[begin(stream)], behind=[end(stream)])
            )

    def _modulate(self, block: nn.Module, name: str | None, of_linear: Any, of_norm: Any) -> None:
        """Wrap the module of this name so that its values, one per row, apply to the tokens of the row; None: none."""
        if name is None:
            return
        where, _, attribute = name.rpartition(".")
        parent = block.get_submodule(where)
        module = getattr(parent, attribute)
        leaf = of_linear if isinstance(module, nn.Linear) else of_norm
        self.put(parent, attribute, leaf(module, self._context))


def _leaf_of(attention: Any) -> Any:
    """Return the leaf class for an attention of blocks in which the image is a separate stream."""
    if getattr(attention, "add_k_proj", None) is not None:
        return PatchedJointAttention
    return PatchedCrossAttention if getattr(attention, "is_cross_attention", False) else PatchedSelfAttention
