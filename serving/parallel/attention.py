"""Attention of a strip's tokens to those of the whole image: queries of one rank, keys and values of all ranks.

Strips are in raster order, and so are their keys, concatenated by rank. Source: DistriFusion figure 4.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..core.attention import FusedLinear, attend, check_unused, heads_of, normed
from .context import StripContext
from .exchange import RowName


def keys_values_of_all(context: StripContext, key: nn.Module, own: Tensor, factor: int) -> Tensor:
    """Gather the keys and values of all strips, [rows, tokens of the image, 2, heads, width], in raster order."""
    heights = context.heights(factor)
    width = own.shape[1] // heights[context.place]
    shapes = [(own.shape[0], height * width, *own.shape[2:]) for height in heights]
    return torch.cat(context.gather(key, own.contiguous(), shapes)[0], 1)


class StripSelfAttention(nn.Module):
    """Self attention of a U-Net's transformer block, or the second attention of SD3.5."""

    def __init__(self, attention: Any, context: StripContext, factor: int) -> None:
        super().__init__()
        self.attention, self.context, self._factor = attention, context, factor
        self.qkv = FusedLinear(attention.to_q, attention.to_k, attention.to_v)

    def forward(self, hidden_states: Tensor, encoder_hidden_states: None = None, **unused: object) -> Tensor:
        """[rows, tokens, channels] -> the same."""
        attention = self.attention
        assert encoder_hidden_states is None
        check_unused(unused)
        qkv = normed(heads_of(self.qkv(hidden_states), 3, attention.heads), attention.norm_q, attention.norm_k)
        key, value = keys_values_of_all(self.context, self, qkv[:, :, 1:], self._factor).unbind(2)
        return attention.to_out[0](attend(qkv[:, :, 0], key, value, attention.scale).flatten(2))


class StripCrossAttention(nn.Module):
    """Attention of image tokens to the text of their row, whose keys and values are computed once per request."""

    def __init__(self, attention: Any, context: StripContext) -> None:
        super().__init__()
        self.attention, self.context = attention, context
        self.keys_values = FusedLinear(attention.to_k, attention.to_v)
        self.text: dict[RowName, Tensor] = {}
        self._joined: tuple[tuple[RowName, ...], Tensor] | None = None

    def learn(self, rows: tuple[RowName, ...], text: Tensor) -> None:
        """Compute keys and values of the text [rows, length, channels] of some rows."""
        attention = self.attention
        key, value = heads_of(self.keys_values(text), 2, attention.heads).unbind(2)
        if attention.norm_k is not None:
            key = attention.norm_k(key)
        self.text |= dict(zip(rows, torch.stack([key, value], 2), strict=True))

    def retain(self, rows: set[RowName]) -> None:
        """Discard the text of all other rows."""
        self.text = {row: kept for row, kept in self.text.items() if row in rows}
        self._joined = None

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, **unused: object) -> Tensor:
        """[rows, tokens, channels] -> the same. The keys and values from `learn` are used in place of the text."""
        attention, rows = self.attention, self.context.now.rows
        check_unused(unused)
        if self._joined is None or self._joined[0] != rows:
            self._joined = rows, torch.stack([self.text[row] for row in rows])
        query = heads_of(attention.to_q(hidden_states), 1, attention.heads)[:, :, 0]
        if attention.norm_q is not None:
            query = attention.norm_q(query)
        key, value = self._joined[1].unbind(2)
        return attention.to_out[0](attend(query, key, value, attention.scale).flatten(2))


class StripJointAttention(nn.Module):
    """SD3's joint attention: the tokens of an image and of its text attend to both.

    Every rank has either the whole text or a part of it. With parts, the keys of all strips come first, then those of
    all parts of the text.
    """

    def __init__(self, attention: Any, context: StripContext, factor: int) -> None:
        super().__init__()
        self.attention, self.context, self._factor = attention, context, factor
        self.image_qkv = FusedLinear(attention.to_q, attention.to_k, attention.to_v)
        self.text_qkv = FusedLinear(attention.add_q_proj, attention.add_k_proj, attention.add_v_proj)

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, **unused: object
    ) -> tuple[Tensor, Tensor | None]:
        """Image [rows, tokens, channels] and text [rows, length, channels] -> the same two."""
        attention, heads = self.attention, self.attention.heads
        check_unused(unused)
        image = normed(heads_of(self.image_qkv(hidden_states), 3, heads), attention.norm_q, attention.norm_k)
        text = heads_of(self.text_qkv(encoder_hidden_states), 3, heads)
        text = normed(text, attention.norm_added_q, attention.norm_added_k)
        query = image[:, :, 0]
        if not attention.context_pre_only:
            query = torch.cat([query, text[:, :, 0]], 1)
        everyone = self._keys_values(image[:, :, 1:], text[:, :, 1:])
        key, value = everyone.unbind(2)
        attended = attend(query, key, value, attention.scale).flatten(2)
        out = attention.to_out[0](attended[:, : hidden_states.shape[1]])
        return out, None if attention.context_pre_only else attention.to_add_out(attended[:, hidden_states.shape[1] :])

    def _keys_values(self, image: Tensor, text: Tensor) -> Tensor:
        """Gather keys and values of all ranks, [rows, tokens of image and text, 2, heads, width], given this rank's."""
        context = self.context
        if not context.now.text_starts:
            return torch.cat([keys_values_of_all(context, self, image, self._factor), text], 1)
        heights, starts = context.heights(self._factor), context.now.text_starts
        width = image.shape[1] // heights[context.place]
        tokens = [height * width for height in heights]
        shapes = [
            (image.shape[0], own + end - start, *image.shape[2:])
            for own, (start, end) in zip(tokens, pairwise(starts), strict=True)
        ]
        parts = context.gather(self, torch.cat([image, text], 1), shapes)[0]
        images = [part[:, :own] for part, own in zip(parts, tokens, strict=True)]
        return torch.cat([*images, *(part[:, own:] for part, own in zip(parts, tokens, strict=True))], 1)
