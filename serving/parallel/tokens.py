"""Replacements of the parts of a transformer that know where a token is: embeddings, rotary angles, ends of streams.

Each strip has its tokens at their places in the whole image. Text tokens are those of this rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.transformers.transformer_z_image import SEQ_MULTI_OF
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.attention import Rotary
from ..families.transformer import Transformer
from ..patched.attention import LEFT_OUT
from ..patched.one_row import places_of, text_ids_of
from ..patched.row_leaves import cropped_positions, embedded
from ..patched.streams import BlocksWithBoundaries, turns_of
from .context import StripContext, Turns


def size_of(context: StripContext, factor: int) -> tuple[int, int]:
    """Return height and width of the whole image, in tokens that represent a square of this side."""
    return context.now.strips.at(factor)[-1], -(-context.latents.shape[3] // factor)


def own_part(context: StripContext, tokens: Tensor, factor: int) -> Tensor:
    """Return the tokens of this rank's strip, of those of the whole image [tokens, ...]."""
    start = context.now.strips.at(factor)[context.place] * size_of(context, factor)[1]
    return tokens[start : start + context.own_tokens(factor)]


class StripPatchEmbed(nn.Module):
    """An embedding of latents that adds positions, as `PatchedPatchEmbed`."""

    def __init__(
        self, embed: Any, context: StripContext, positions: Callable[[Any, int, int], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.embed, self.context, self.positions = embed, context, positions or cropped_positions

    def forward(self, latent: Tensor) -> Tensor:
        """[rows, channels, height, width] -> [rows, tokens, width of a token]."""
        context, side = self.context, self.embed.patch_size
        pixels = latent.unflatten(3, (-1, side)).unflatten(2, (-1, side)).permute(0, 2, 4, 1, 3, 5)
        tokens = embedded(self.embed, pixels.flatten(3).flatten(1, 2))
        positions = context.kept(
            "positions", lambda: own_part(context, self.positions(self.embed, *size_of(context, side)), side)
        )
        return (tokens + positions).to(tokens.dtype)


class StripRotary(nn.Module):
    """A module that computes rotary angles from position ids or sizes, which are those of a strip, and are ignored."""

    def __init__(self, embed: Any, transformer: Transformer, context: StripContext, factor: int) -> None:
        super().__init__()
        self.embed, self.transformer, self.context, self._factor = embed, transformer, context, factor

    def forward(self, *ignored: object, **unused: object) -> Rotary:
        """Set the angles of the context, which attention reads; return empty ones."""
        context = self.context
        context.turns = context.kept("turns", self._turns)
        empty = context.latents.new_zeros(0)
        return empty, empty

    def _turns(self) -> Turns:
        context, transformer, like = self.context, self.transformer, self.context.latents
        size, length, text = size_of(context, self._factor), context.text.length, None
        if transformer.joint_angles is not None:
            (image,), text = transformer.joint_angles(self.embed, [size], length, like.device)
            image, text = (turns_of(each).unbind(1) for each in (image, text))
        else:
            assert transformer.image_ids is not None, "a rotary model has ids or angles"
            image = self.embed(transformer.image_ids(*size, like))
            if transformer.text_ids is not None:
                text = self.embed(transformer.text_ids(length, like))
        if text is not None and context.now.text_starts:
            part = slice(*context.now.text_starts[context.place :][:2])
            text = tuple(each[part] for each in text)
        own = tuple(own_part(context, each, self._factor) for each in image)
        return None if text is None else self._of_rows(text), self._of_rows(own)

    def _of_rows(self, angles: tuple[Tensor, ...]) -> Rotary:
        cosines, sines = (each.repeat(len(self.context.now.rows), 1) for each in angles)
        return cosines, sines


def image_places(context: StripContext, lengths: Tensor, factor: int) -> Tensor:
    """Return the position ids of the image tokens of all rows, (rows * tokens, 3): length of the text, row, column."""
    places = own_part(context, places_of(size_of(context, factor), lengths.device), factor)
    behind = lengths.to(places.dtype).repeat_interleave(len(places))
    return torch.cat([behind[:, None], places.repeat(len(lengths), 1)], 1)


def complex_turns(angles: Tensor) -> Rotary:
    """Complex [tokens, half the width] -> cosines and sines [tokens, width]."""
    cosines, sines = turns_of(angles).unbind(1)
    return cosines, sines


class StripStreamTokens(nn.Module):
    """Lumina 2's module that cuts latents into tokens and computes the angles of its one stream."""

    def __init__(self, rotary: Any, context: StripContext, factor: int) -> None:
        super().__init__()
        self.rotary, self.context, self._factor = rotary, context, factor

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> tuple[Any, ...]:
        """Cut a strip [rows, channels, height, width], and set the angles of the context.

        Returns:
            Its tokens [rows, tokens, channels]; the angles of the text, for the blocks that refine it; None for those
            that leaves read; the number of text tokens of each row, and of all tokens. Rows have the longest text, and
            a bias leaves out its padding.
        """
        context, side = self.context, self._factor
        tokens = hidden_states.unflatten(3, (-1, side)).unflatten(2, (-1, side)).permute(0, 2, 4, 3, 5, 1)
        tokens = tokens.flatten(3).flatten(1, 2)
        text, *turns = context.kept("turns", lambda: self._turns(attention_mask))
        context.turns = turns[0], turns[1]
        rows, length = attention_mask.shape
        return tokens, text.expand(rows, -1, -1), None, None, [length] * rows, [length + tokens.shape[1]] * rows

    def _turns(self, mask: Tensor) -> tuple[Tensor, Rotary, Rotary]:
        rows, length = mask.shape
        angles = self.rotary._get_freqs_cis
        text = angles(text_ids_of(length, mask.device)[None])
        image = angles(image_places(self.context, mask.sum(1), self._factor)[None])[0]
        return text, complex_turns(text[0].repeat(rows, 1)), complex_turns(image)


class StripPads:
    """The pads of Z-Image's images, which are equal, so that each rank has one for all of them (`PaddedStream`).

    The model pads a strip as if it were an image. Its pads are left out, and one pad of the whole image comes in front
    of the text.
    """

    def __init__(self, model: Any, context: StripContext, factor: int) -> None:
        self.context, self.rotary, self.pad, self._factor = context, model.rope_embedder, model.x_pad_token, factor
        self.pads: Tensor | None = None

    def begin_images(self, x: Tensor) -> Tensor:
        """[rows, tokens and the pads of the strip, width] -> [rows, pad and tokens, width]."""
        context = self.context
        pad, (text, image) = context.kept("pad", lambda: self._pad_bias(x)), context.kept("turns", self._turns)
        length = 1 + context.text.length
        context.turns = tuple(each.unflatten(0, (-1, length))[:, 0] for each in text), image  # type: ignore[assignment]
        context.bias = pad.expand(len(x), 1)
        own = x[:, : context.own_tokens(self._factor)]
        return torch.cat([self.pad.expand(len(x), 1, -1), own], 1)

    def end_images(self, x: Tensor) -> Tensor:
        """[rows, pad and tokens, width] -> [rows, tokens and as many pads as the model has added, width]."""
        self.pads = x[:, :1]
        missing = -self.context.own_tokens(self._factor) % SEQ_MULTI_OF
        return F.pad(x[:, 1:], (0, 0, 0, missing))

    def begin_all(self, x: Tensor) -> Tensor:
        """[rows, tokens and the pads of the strip and text, width] -> [rows, pad and text and tokens, width]."""
        context, num_tokens = self.context, self.context.own_tokens(self._factor)
        text = x[:, num_tokens + -num_tokens % SEQ_MULTI_OF :]
        text = F.pad(text, (0, 0, 0, context.text.length - text.shape[1]))
        assert self.pads is not None, "images come first"
        assert context.text.bias is not None, "text has a mask"
        context.turns = context.kept("turns", self._turns)
        pad = context.kept("pad", lambda: self._pad_bias(x))
        context.bias = torch.cat([pad.expand(len(x), 1), context.text.bias], 1)
        return torch.cat([self.pads, text, x[:, :num_tokens]], 1)

    def end_all(self, x: Tensor) -> Tensor:
        """[rows, pad and text and tokens, width] -> the image tokens."""
        return x[:, -self.context.own_tokens(self._factor) :]

    def _pad_bias(self, like: Tensor) -> Tensor:
        """Return the bias that weights a pad by the number of an image's pads, (1, 1)."""
        height, width = size_of(self.context, self._factor)
        count = -(height * width) % SEQ_MULTI_OF
        return like.new_tensor(float(count)).log().view(1, 1) if count else like.new_full((1, 1), LEFT_OUT)

    def _turns(self) -> Turns:
        """Return the angles of the pad and the text, and of the image, of all rows."""
        context, mask = self.context, self.context.text.mask
        assert mask is not None, "text has a mask"
        text = self.rotary(text_ids_of(1 + mask.shape[1], mask.device)).repeat(len(mask), 1)
        image = self.rotary(image_places(context, 1 + (mask > 0).sum(1), self._factor).long())
        return complex_turns(text), complex_turns(image)


class StreamEnd(nn.Module):
    """Module that is called as a block before or after the blocks of a stream, see `BlocksWithBoundaries`."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor, *unused: object) -> Tensor:
        return self.change(x)


def with_pads(model: Any, transformer: Transformer, pads: StripPads) -> dict[str, BlocksWithBoundaries]:
    """Return Z-Image's two lists of blocks by name, with what a strip needs before and after them."""
    assert transformer.single is not None, "text that is refined joins a stream"
    ends = {
        transformer.joint.name: (pads.begin_images, pads.end_images),
        transformer.single.name: (pads.begin_all, pads.end_all),
    }
    return {
        name: BlocksWithBoundaries(getattr(model, name), before=[StreamEnd(start)], behind=[StreamEnd(end)])
        for name, (start, end) in ends.items()
    }
