"""A family's description of its transformer, with which diffusers' own blocks run on packed tokens of a mixed batch.

Image tokens of all rows are concatenated; text keeps a row for each row of the batch. Computations that treat each
token separately need no change. Attention, positions and inputs that a row has once (timestep, guidance, pooled text)
are mapped to the tokens of that row by leaves, which `serving.patched.swap` inserts where the family says.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

Call = Callable[[Any, Tensor, Tensor, dict[str, Any]], Tensor]
"""(model, latents (rows, channels, height, width) in its dtype, timesteps (rows,) of the scheduler, conditions under
the names of the family) -> the prediction, shaped like the latents. The condition `references` holds the latents
(rows, channels, height, width) of each reference. The patched model is called the same way, with patches in place of
rows of latents, those of references among them; rows of timesteps and conditions are then those of the batch."""

JointAngles = Callable[[Any, Sequence[tuple[int, int]], int, torch.device], tuple[Sequence[Tensor], Tensor]]
"""Computes rotary angles of images and text, as `Transformer.joint_angles` describes."""

PAD = 2
"""Mask value of text tokens that become pads, in the layout "padded"."""

Layout = Literal["joint", "one row", "padded"]
"""How image and text come together: in joint blocks; or after blocks that refine each of them, in a forward that joins
them row by row, such as Lumina 2's, and may pad both with tokens that take part in attention, such as Z-Image's."""

Leaf = Literal["rows", "results", "stream", "constant", "caption", "text"]
"""Leaf in place of a module whose output has an entry for each row: a linear layer, or a norm that takes `emb`, that
scales and shifts the tokens of the row's image ("rows"), or of its stream in the blocks to come ("stream"); a module
with several such outputs ("results"); one whose output depends only on the number of rows, and whose input is on the
CPU ("constant"); a projection of the text for cross attention ("caption"); or a layer that embeds the text of a model
whose forward drops as many tokens at the end as it receives of text, and then receives none ("text"). The last two run
once for a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """One list of a transformer's blocks.

    Attributes:
        name: name of the list in the model.
        kind: class of the blocks.
        modulation: name in a block of the linear layer whose output, one per row, scales and shifts the tokens of the
            image, or of both streams if they are one; or of the norm that takes `emb`, one per row, for this purpose.
            Layers of the text's own stream are not named. None if all blocks share one, which `leaves` then names.
        attention: possible names of attention modules in a block.
    """

    name: str
    kind: str
    modulation: str | None
    attention: tuple[str, ...] = ("attn",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """Description of a transformer whose blocks run on packed tokens.

    Attributes:
        call: calls the model as its pipeline does, and packs and unpacks latents if the pipeline does so.
        call_packed: calls the patched model, where that takes more than `call`; the leaves hold the mask.
        layout: see `Layout`. In other layouts than "joint", `joint` blocks see the image alone.
        embed: turns latents into tokens as the patched model does before its first block, [..., ..., channels]; the
            cache compares them. None if `pos_embed` does this.
        joint: blocks with a stream of tokens for the image and one for the text, which attend to both; or with a stream
            for the image, which attends to the text.
        single: blocks after them that take both as one stream, text first; None if there are none.
        image_ids: returns the position ids, (tokens, axes), of an image of (height, width) tokens, with dtype and
            device of the last argument; the model's `pos_embed` turns them into rotary angles. Text stays at zero.
            None if `pos_embed` is a patch embedding that adds positions.
        reference_ids: returns the same for a reference of a number, from 0: the number, its (height, width) in tokens,
            and the last argument. References are images whose tokens follow those of the image that is drawn. None if
            the model takes none.
        text_ids: returns the position ids of a text of `length` tokens, independent of its image, for a model with a
            leaf "text"; None if text stays at zero.
        joint_angles: returns the rotary angles of an image and its references, given their (height, width) in tokens,
            [height * width, half a head's width] each, and of their text of `length` tokens, computed by the model's
            `pos_embed`: complex numbers of length 1. For models that compute both at once. None if text stays at zero.
        positions: returns the positions that the patch embedding adds to the tokens of an image of (height, width)
            tokens, (height * width, width of a token); None to compute them as SD3 does.
        leaves: leaves outside the blocks, by the name of the module, in the layout "joint".
        mask: name in the model's forward of the condition that marks valid text tokens of each row, (rows, length);
            None if all are valid. In the layout "padded", `PAD` marks tokens that become pads.
        at_zero: name of the model's attribute that is set if tokens of references are modulated as at timestep 0; None
            if there is none. The patch engine clears it, and `call` then passes these timesteps after those of the
            rows.
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
    call_packed: Call | None = None
    layout: Layout = "joint"
    embed: Callable[[Any, Tensor], Tensor] | None = None
    image_ids: Callable[[int, int, Tensor], Tensor] | None = None
    reference_ids: Callable[[int, int, int, Tensor], Tensor] | None = None
    text_ids: Callable[[int, Tensor], Tensor] | None = None
    joint_angles: JointAngles | None = None
    positions: Callable[[Any, int, int], Tensor] | None = None
    leaves: Mapping[str, Leaf] = field(default_factory=lambda: {"norm_out.linear": "rows"})
    mask: str | None = None
    at_zero: str | None = None
    adds_mask: bool = False
    attention: Mapping[str, str] = field(default_factory=dict)
    known_classes: frozenset[str] = frozenset()

    @property
    def lists(self) -> tuple[Blocks, ...]:
        """Lists of blocks, in the order in which they run."""
        return (self.joint,) if self.single is None else (self.joint, self.single)
