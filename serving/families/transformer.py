"""A family's description of its transformer, with which diffusers' own blocks run on packed tokens of a mixed batch.

Image tokens of all rows are concatenated; text keeps a row for each row of the batch. Computations that treat each
token separately need no change. Attention, positions and inputs that a row has once (timestep, guidance, pooled text)
are mapped to the tokens of that row by leaves, which `serving.patched.swap` inserts where the family says.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Call = Callable[[Any, Tensor, Tensor, dict[str, Any]], Tensor]
"""(model, latents (rows, channels, height, width) in its dtype, timesteps (rows,) of the scheduler, conditions under
the names of the family) -> the prediction, shaped like the latents. The patched model is called the same way, with
patches in place of rows of latents; rows of timesteps and conditions are then those of the batch."""

PAD = 2
"""Mask value of text tokens that become pads, see `Transformer.pads_to`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """One list of a transformer's blocks.

    Attributes:
        name: name of the list in the model.
        kind: class of the blocks.
        modulation: name in a block of the linear layer whose output, one per row, scales and shifts the tokens of the
            image, or of both streams if they are one; or of the norm that takes `emb`, one per row, for this purpose.
            Layers of the text's own stream are not named. None if blocks share one, see `shared` and `Transformer`.
        shared: name in the model of a linear layer that does the same for all these blocks; None if there is none.
        attention: possible names of attention modules in a block.
    """

    name: str
    kind: str
    modulation: str | None
    shared: str | None = None
    attention: tuple[str, ...] = ("attn",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """Description of a transformer whose blocks run on packed tokens.

    Attributes:
        call: calls the model as its pipeline does, and packs and unpacks latents if the pipeline does so.
        embed: turns latents into tokens as the patched model does before its first block, [..., ..., channels]; the
            cache compares them. None if `pos_embed` does this.
        joint: blocks with a stream of tokens for the image and one for the text, which attend to both; or with a stream
            for the image, which attends to the text.
        single: blocks after them that take both as one stream, text first; None if there are none.
        image_ids: returns the position ids, (tokens, axes), of an image of (height, width) tokens, with dtype and
            device of the last argument; the model's `pos_embed` turns them into rotary angles. Text stays at zero.
            None if `pos_embed` is a patch embedding that adds positions.
        text_ids: returns the position ids of a text of `length` tokens, independent of its image, for a model with
            `text_embedder`; None if text stays at zero.
        joint_angles: returns the rotary angles of an image of (height, width) tokens, [height * width, half a head's
            width], and of its text of `length` tokens, computed by the model's `pos_embed`: complex numbers of length
            1. None if text stays at zero.
        positions: returns the positions that the patch embedding adds to the tokens of an image of (height, width)
            tokens, (height * width, width of a token); None to compute them as SD3 does.
        norm_out: name of the module that modulates tokens after the last block.
        modulation: name of the module whose outputs, one per row, scale and shift image tokens in all blocks and after
            them; None if each block has its own.
        caption: name of the module that projects text for cross attention, if its output is used there.
        text_embedder: name of the layer that embeds the text, for a model whose forward drops as many tokens at the end
            as it receives of text: it then receives none, and the text is embedded once for a batch. None for others.
        text_refiner: name of the blocks that refine the text before it joins the image, for a model whose forward
            joins both row by row, such as Lumina 2's; None if blocks join them. `joint` blocks then see the image
            alone.
        pads_to: number to a multiple of which the forward of a model with `text_refiner` pads text and image, with
            tokens that take part in attention, such as Z-Image's; None without padding.
        constant: name of a module whose output depends only on the number of rows, and whose input is on the CPU; None
            if there is none.
        mask: name in the model's forward of the condition that marks valid text tokens of each row, (rows, length);
            None if all are valid. With `pads_to`, `PAD` marks tokens that become pads.
        adds_mask: whether the pipeline adds the mask to attention scores, as numbers and only between valid tokens, so
            that other tokens get less weight instead of none.
        attention: classes of its attention modules, besides those with diffusers' usual processor, each with the
            processor that the leaves replace.
        known_classes: classes of the model's modules, besides those of all families, that compute token by token (or
            row by row), only call their children, or are replaced.
    """

    call: Call
    joint: Blocks
    single: Blocks | None = None
    embed: Callable[[Any, Tensor], Tensor] | None = None
    image_ids: Callable[[int, int, Tensor], Tensor] | None = None
    text_ids: Callable[[int, Tensor], Tensor] | None = None
    joint_angles: Callable[[Any, int, int, int, torch.device], tuple[Tensor, Tensor]] | None = None
    positions: Callable[[Any, int, int], Tensor] | None = None
    norm_out: str | None = "norm_out.linear"
    modulation: str | None = None
    caption: str | None = None
    text_embedder: str | None = None
    text_refiner: str | None = None
    pads_to: int | None = None
    constant: str | None = None
    mask: str | None = None
    adds_mask: bool = False
    attention: Mapping[str, str] = field(default_factory=dict)
    known_classes: frozenset[str] = frozenset()

    @property
    def lists(self) -> tuple[Blocks, ...]:
        """Lists of blocks, in the order in which they run."""
        return (self.joint,) if self.single is None else (self.joint, self.single)
