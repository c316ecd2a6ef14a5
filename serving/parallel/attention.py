"""Attention of a strip's tokens to those of the whole image: queries of one rank, keys and values of all ranks.

Strips are in raster order, and so are their keys, concatenated by rank. Source: DistriFusion figure 4.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from ..core.attention import FusedLinear, Rotary, attend, check_unused, grouped_heads_of, heads_of, normed
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
    """Attention of image tokens to the text of their row, whose keys and values are computed once per request.

    `number` distinguishes the leaves of a model.
    """

    def __init__(self, attention: Any, context: StripContext, number: int) -> None:
        super().__init__()
        self.attention, self.context, self._number = attention, context, number
        self.keys_values = FusedLinear(attention.to_k, attention.to_v)
        self.text: dict[RowName, Tensor] = {}

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

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, **unused: object) -> Tensor:
        """[rows, tokens, channels] -> the same. The keys and values from `learn` are used in place of the text."""
        attention, context = self.attention, self.context
        check_unused(unused)
        text = context.kept(
            "text", lambda: pad_sequence([self.text[row] for row in context.now.rows], batch_first=True), self._number
        )
        query = heads_of(attention.to_q(hidden_states), 1, attention.heads)[:, :, 0]
        if attention.norm_q is not None:
            query = attention.norm_q(query)
        key, value = text.unbind(2)
        bias = None if context.bias is None else context.bias[:, None, None]
        return attention.to_out[0](attend(query, key, value, attention.scale, bias).flatten(2))


class StripJointAttention(nn.Module):
    """Joint attention: the tokens of an image and of its text, which have layers of their own, attend to both."""

    def __init__(self, attention: Any, context: StripContext, factor: int) -> None:
        super().__init__()
        self.attention, self.context, self._factor = attention, context, factor
        self.image_qkv = FusedLinear(attention.to_q, attention.to_k, attention.to_v)
        self.text_qkv = FusedLinear(attention.add_q_proj, attention.add_k_proj, attention.add_v_proj)

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, image_rotary_emb: object = None, **unused: object
    ) -> tuple[Tensor, Tensor | None]:
        """Image [rows, tokens, channels] and text [rows, length, channels] -> the same two.

        Angles and masks are those of the context.
        """
        attention, heads = self.attention, self.attention.heads
        check_unused(unused)
        text_turns, turns = self.context.turns
        image = _turned(heads_of(self.image_qkv(hidden_states), 3, heads), attention.norm_q, attention.norm_k, turns)
        text = heads_of(self.text_qkv(encoder_hidden_states), 3, heads)
        text = _turned(text, attention.norm_added_q, attention.norm_added_k, text_turns)
        ends_text = getattr(attention, "context_pre_only", False)
        image, text = _attend_both(self, image, text, self.context, self._factor, queries_text=not ends_text)
        return attention.to_out[0](image), None if ends_text else attention.to_add_out(text)


class StripStreamAttention(nn.Module):
    """Attention of single-stream blocks: as `StripJointAttention`, with the same layers for text and image.

    The stream holds text first, then image tokens, or image tokens alone. Several heads may share keys and values.
    """

    def __init__(self, attention: Any, context: StripContext, factor: int) -> None:
        super().__init__()
        self.attention, self.context, self._factor = attention, context, factor
        self.qkv = FusedLinear(attention.to_q, attention.to_k, attention.to_v)
        self.sharing = attention.to_q.out_features // attention.to_k.out_features

    def forward(self, hidden_states: Tensor, *unused: object, **ignored: object) -> Tensor:
        """Tokens [rows, tokens, channels] -> the same. Angles and masks are those of the context."""
        attention = self.attention
        qkv = grouped_heads_of(self.qkv(hidden_states), attention.heads, self.sharing)
        out = _attend_in_stream(self, qkv, self.context, self._factor, self.sharing)
        return out if attention.pre_only else attention.to_out[0](out)


class StripParallelAttention(nn.Module):
    """FLUX.2's attention of single-stream blocks, parallel to the feed-forward layers (`PatchedParallelAttention`)."""

    def __init__(self, attention: Any, context: StripContext, factor: int) -> None:
        super().__init__()
        self.attention, self.context, self._factor = attention, context, factor

    def forward(self, hidden_states: Tensor, image_rotary_emb: object = None, **unused: object) -> Tensor:
        """Tokens [rows, tokens, channels] -> the same. Angles are those of the context."""
        attention, width = self.attention, 3 * self.attention.inner_dim
        check_unused(unused)
        packed = attention.to_qkv_mlp_proj(hidden_states)
        qkv = heads_of(packed[..., :width], 3, attention.heads)
        attended = _attend_in_stream(self, qkv, self.context, self._factor)
        return attention.to_out(torch.cat([attended, attention.mlp_act_fn(packed[..., width:])], -1))


def _turned(qkv: Tensor, norm_q: nn.Module | None, norm_k: nn.Module | None, turns: Rotary | None) -> Tensor:
    """Apply `normed` to [rows, tokens, 3, heads, width], with the angles of the tokens of all rows."""
    if turns is None:
        return normed(qkv, norm_q, norm_k)
    return normed(qkv.flatten(0, 1), norm_q, norm_k, turns).unflatten(0, qkv.shape[:2])


def _attend_in_stream(leaf: Any, qkv: Tensor, context: StripContext, factor: int, sharing: int = 1) -> Tensor:
    """Attend from each token of a stream [rows, tokens, 3, heads, width] to those of its image and its text.

    Returns [rows, tokens, heads * width].
    """
    attention, num_image, (text_turns, turns) = leaf.attention, context.own_tokens(factor), context.turns
    text, image = qkv.split([qkv.shape[1] - num_image, num_image], 1)
    image = _turned(image, attention.norm_q, attention.norm_k, turns)
    if text.shape[1]:
        text = _turned(text, attention.norm_q, attention.norm_k, text_turns)
    image, text = _attend_both(leaf, image, text, context, factor, sharing=sharing)
    return torch.cat([text, image], 1)


def _attend_both(
    leaf: nn.Module,
    image: Tensor,
    text: Tensor,
    context: StripContext,
    factor: int,
    *,
    queries_text: bool = True,
    sharing: int = 1,
) -> tuple[Tensor, Tensor]:
    """Attend from this rank's tokens of each image and of its text to those of all ranks.

    Args:
        leaf: key of the exchange.
        image, text: [rows, tokens, 3, heads, width], queries, keys and values of this rank.
        context, factor: those of the leaf.
        queries_text: whether text tokens attend, too; otherwise their result is empty.
        sharing: number of adjacent heads with the same keys and values, which are sent once.

    Returns:
        [rows, tokens, heads * width] of the image, and of the text.
    """
    everyone = _keys_values(leaf, image[:, :, 1:, ::sharing], text[:, :, 1:, ::sharing], context, factor)
    if sharing > 1:
        everyone = everyone.repeat_interleave(sharing, 3)
    key, value = everyone.unbind(2)
    own_text = text[:, :, 0] if queries_text else text[:, :0, 0]
    bias = context.bias if text.shape[1] else None
    if bias is not None:
        bias = F.pad(bias, (key.shape[1] - bias.shape[1], 0))[:, None, None]
    if bias is not None and (biased := context.text.biased) is not None:
        own_bias = bias * biased[:, None, :, None]
        parts = attend(image[:, :, 0], key, value, bias=bias), attend(own_text, key, value, bias=own_bias)
    else:
        both = attend(torch.cat([image[:, :, 0], own_text], 1), key, value, bias=bias)
        parts = both[:, : image.shape[1]], both[:, image.shape[1] :]
    return parts[0].flatten(2), parts[1].flatten(2)


def _keys_values(leaf: nn.Module, image: Tensor, text: Tensor, context: StripContext, factor: int) -> Tensor:
    """Gather keys and values of all ranks, [rows, tokens of image and text, 2, heads, width], given this rank's.

    Every rank has either the whole text or a part of it. With parts, the keys of all strips come first, then those of
    all parts of the text.
    """
    starts = context.now.text_starts
    if not starts:
        return torch.cat([keys_values_of_all(context, leaf, image, factor), text], 1)
    heights = context.heights(factor)
    width = image.shape[1] // heights[context.place]
    tokens = [height * width for height in heights]
    shapes = [
        (image.shape[0], own + end - start, *image.shape[2:])
        for own, (start, end) in zip(tokens, pairwise(starts), strict=True)
    ]
    parts = context.gather(leaf, torch.cat([image, text], 1), shapes)[0]
    images = [part[:, :own] for part, own in zip(parts, tokens, strict=True)]
    return torch.cat([*images, *(part[:, own:] for part, own in zip(parts, tokens, strict=True))], 1)
