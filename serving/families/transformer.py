"""What a family says of its transformer, so that diffusers' own blocks run on the packed tokens of a mixed batch.

Image tokens of all rows lie one after the other; text keeps a row for each row of the batch. What a block computes of
one token at a time needs nothing. Attention, positions and what a row has once (timestep, guidance, pooled text) are
given to the tokens of that row: `serving.patched.swap` puts leaves where the family says.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Call = Callable[[Any, Tensor, Tensor, dict[str, Any]], Tensor]
"""(model, latents (rows, channels, height, width) in its dtype, timesteps (rows,) of the scheduler, conditions as the
family names them) -> the prediction, shaped as the latents. The patched model is called the same way, with patches for
rows of latents; rows of timesteps and conditions are then those of the batch."""

PAD = 2
"""What masks say of text tokens that are to be made pads, see `Transformer.pads_to`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """One list of a transformer's blocks.

    Attributes:
        name: of the list in the model.
        kind: class of the blocks.
        modulation: name in a block of the linear layer whose result, one per row, scales and shifts tokens of the
            image, or of both streams where they are one; or of the norm that is given `emb`, one per row, to do so.
            Layers of the text's own stream need no mention. None where all blocks share one, see `Transformer`.
        shared: name in the model of a linear layer that does the same for all these blocks; None where there is none.
        attention: names in a block, as far as it has them.
    """

    name: str
    kind: str
    modulation: str | None
    shared: str | None = None
    attention: tuple[str, ...] = ("attn",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """How the blocks of a transformer run on packed tokens.

    Attributes:
        call: calls the model as its pipeline does; latents are packed and unpacked here where the pipeline does so.
        embed: makes tokens of latents as the patched model does before its first block, [..., ..., channels]; the cache
            compares them. None where `pos_embed` makes them.
        joint: blocks with a stream of tokens for the image and one for the text, which attend to both; or with a stream
            for the image, which attends to the text.
        single: the blocks behind them that take both as one stream, text first; None where there are none.
        image_ids: numbers the tokens of an image of (height, width) tokens for the model's `pos_embed`, which makes
            rotary angles of (tokens, axes) numbers, shaped and placed as the last argument; text stays at zero. None
            where `pos_embed` is a patch embedding that adds positions.
        text_ids: numbers in the same way the tokens of a text of `length` tokens, whatever its image, of a model with
            `text_embedder`; None where text stays at zero.
        turns: makes the rotary angles of an image of (height, width) tokens, [height * width, half a head's width], and
            of a text of `length` tokens that belongs to it, by the model's `pos_embed`: complex numbers of length 1.
            None where text stays at zero.
        positions: what that patch embedding adds to the tokens of an image of (height, width) tokens, (height * width,
            width of a token), by the embedding; None for SD3's way.
        norm_out: as the modulation of blocks, behind the last of them.
        modulation: name of the module whose results, one per row, scale and shift image tokens in all blocks and behind
            them; None where each has its own.
        caption: name of the module that projects text for cross attention, where that reads the result.
        text_embedder: name of the layer that embeds the text, of a model whose forward cuts off as many tokens at the
            end as it is given of text: it is given none, and the text embedded once for a batch. None for others.
        text_refiner: name of the blocks that refine the text before it joins the image, of a model whose forward puts
            both together row by row, as Lumina 2's; None where blocks do. Its `joint` blocks then see the image alone.
        pads_to: number to whose multiples the forward of a model with `text_refiner` pads text and image by tokens that
            count, as Z-Image's; None where it does not.
        constant: name of a module whose results depend on the number of rows alone, and which the model gives numbers
            that lie on the CPU; None where there is none.
        mask: the condition, as the model's forward names it, that says which text tokens of each row are valid, (rows,
            length); None where all are. With `pads_to` it says `PAD` of tokens that are to be made pads.
        adds_mask: whether the pipeline adds the mask to the scores of attention, as numbers and only between valid
            tokens, so that the others count less instead of not at all.
        attention: classes of its attention modules, beside those with diffusers' usual processor, and the processor
            whose work the leaves know.
        known: classes of the model's modules, beside those of all families, that compute token by token (or row by
            row), only call their children, or are replaced.
    """

    call: Call
    joint: Blocks
    single: Blocks | None = None
    embed: Callable[[Any, Tensor], Tensor] | None = None
    image_ids: Callable[[int, int, Tensor], Tensor] | None = None
    text_ids: Callable[[int, Tensor], Tensor] | None = None
    turns: Callable[[Any, int, int, int, torch.device], tuple[Tensor, Tensor]] | None = None
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
    known: frozenset[str] = frozenset()

    @property
    def lists(self) -> tuple[Blocks, ...]:
        """Of blocks, in the order in which they run."""
        return (self.joint,) if self.single is None else (self.joint, self.single)
