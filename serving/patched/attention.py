"""Attention over packed tokens: every image attends to its own tokens and its own text, and to nothing else.

Linear layers run once over the tokens of all rows; the attention itself runs once per resolution or, in a padded
batch, once over the sequences of all rows where it can (`takes_sequences`). The tokens of an image may come in any
order, so patches need not be reassembled. Text keys and values of cross attention are computed once for a batch, not at
every step. Source: PatchedServe section 4.2.1, "Self-Attention".
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..cache.cells import CellTables
from ..cache.slots import TokenSlots
from ..core.attention import (
    FusedLinear,
    Rotary,
    attend,
    attend_sequences,
    check_unused,
    constant,
    grouped_heads_of,
    heads_of,
    normed,
)
from ..core.captured import Results
from .context import PatchContext
from .queries import attended_keys_values, resolutions_of, sequences_of
from .tokens import joined


class PatchedSelfAttention(nn.Module):
    """Self attention of a U-Net's transformer block, or the second attention of SD3.5."""

    def __init__(self, attention: Any, context: PatchContext) -> None:
        super().__init__()
        self.attention, self.context, self.heads = attention, context, constant(attention.heads)
        self.qkv = FusedLinear(attention.to_q, attention.to_k, attention.to_v)
        self.slots = TokenSlots()

    def forward(self, hidden_states: Tensor, encoder_hidden_states: None = None, **unused: object) -> Tensor:
        """[P, tokens, channels] -> the same."""
        attention, context = self.attention, self.context
        assert encoder_hidden_states is None
        check_unused(unused)
        qkv = heads_of(self.qkv(hidden_states.flatten(0, 1)), 3, self.heads())
        qkv = normed(qkv, attention.norm_q, attention.norm_k, kernels=context.kernels)
        kept = attended_keys_values(self.slots, qkv[:, 1:], context)

        def by_resolution(query: Tensor, kept: Tensor) -> Results:
            parts = []
            for images in resolutions_of(context):
                key, value = images.keys_values(kept).unbind(2)
                parts.append(images.pack(attend(images.queries(query), key, value, attention.scale)))
            return (joined(parts, context.num_padding),)

        query = qkv[:, 0]
        if (sequences := sequences_of(context, query, 0)) is not None:
            offsets, longest = (sequences.offsets, sequences.key_offsets), (sequences.longest, sequences.longest)
            attended = attend_sequences(query, kept[:, 0], kept[:, 1], offsets, longest, attention.scale).flatten(1)
        else:
            (attended,) = context.eagerly(by_resolution, query, kept)
        return attention.to_out[0](attended).view(hidden_states.shape)


class PatchedCrossAttention(nn.Module):
    """Attention of image tokens to the text of their row."""

    def __init__(self, attention: Any, context: PatchContext) -> None:
        super().__init__()
        self.attention, self.context, self.heads = attention, context, constant(attention.heads)
        self.keys_values = FusedLinear(attention.to_k, attention.to_v)
        self.text: tuple[Tensor, Tensor] | None = None

    def read(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [rows, length, heads, width each] of text [rows, length, width], for `self.text`."""
        attention = self.attention
        key, value = heads_of(self.keys_values(text), 2, self.heads()).unbind(2)
        if attention.norm_k is not None:
            key = attention.norm_k(key)
        return key.contiguous(), value.contiguous()

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, **unused: object) -> Tensor:
        """[P, tokens, channels] -> the same. The text argument is ignored in favour of the result of `read`."""
        attention, context, rows = self.attention, self.context, self.context.rows
        assert self.text is not None
        check_unused(unused)
        text = self.text if rows is None else tuple(each.index_select(0, rows.rows) for each in self.text)
        query = heads_of(attention.to_q(hidden_states.flatten(0, 1)), 1, self.heads())[:, 0]
        if attention.norm_q is not None:
            query = attention.norm_q(query)

        def by_resolution(query: Tensor, *text: Tensor) -> Results:
            parts = []
            for images in resolutions_of(context):
                key, value = map(images.of_rows, text)
                bias = images.bias(key.shape[1])
                parts.append(images.pack(attend(images.queries(query), key, value, attention.scale, bias)))
            return (joined(parts, context.num_padding),)

        length = text[0].shape[1]
        if (sequences := sequences_of(context, query, length, context.text_bias)) is not None:
            offsets, longest = (sequences.image_offsets, sequences.text_offsets), (sequences.longest, length)
            key, value = (each.flatten(0, 1) for each in text)
            attended = attend_sequences(query, key, value, offsets, longest, attention.scale).flatten(1)
        else:
            (attended,) = context.eagerly(by_resolution, query, *text)
        return attention.to_out[0](attended).view(hidden_states.shape)


class PatchedJointAttention(nn.Module):
    """SD3's joint attention: the tokens of an image and of its text attend to both.

    Equal text tokens at the end (from SD3 without T5) may be merged into one, with `context.text_bias`: a key that
    counts n times has ln n added to its score. Where attention runs over sequences, which have no bias, such a key is
    repeated n times instead.
    """

    def __init__(self, attention: Any, context: PatchContext) -> None:
        super().__init__()
        self.attention, self.context, self.heads = attention, context, constant(attention.heads)
        self.image_qkv = FusedLinear(attention.to_q, attention.to_k, attention.to_v)
        self.text_qkv = FusedLinear(attention.add_q_proj, attention.add_k_proj, attention.add_v_proj)
        self.slots = TokenSlots()

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        image_rotary_emb: Rotary | None = None,
        **unused: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Image [P, tokens, channels] and text [rows, length, channels] -> the same two.

        Rotary angles, if any, apply to image tokens, and to text tokens if theirs come first. If only some cells are
        active, the text is that of the rows which have such cells.
        """
        attention, context = self.attention, self.context
        check_unused(unused)
        image = heads_of(self.image_qkv(hidden_states.flatten(0, 1)), 3, self.heads())
        text_turns, turns = _parted(image_rotary_emb, len(image))
        image = normed(image, attention.norm_q, attention.norm_k, turns, kernels=context.kernels)
        text = heads_of(self.text_qkv(encoder_hidden_states).flatten(0, 1), 3, self.heads())
        text = normed(text, attention.norm_added_q, attention.norm_added_k, text_turns, kernels=context.kernels)
        text = text.unflatten(0, encoder_hidden_states.shape[:2])
        ends_text = getattr(attention, "context_pre_only", False)
        image, text = _attend_both(self.slots, image, text, context, queries_text=not ends_text)
        out = attention.to_out[0](image).view(hidden_states.shape)
        return out, None if ends_text else attention.to_add_out(text)


class PatchedStreamAttention(nn.Module):
    """Attention of single-stream blocks: as `PatchedJointAttention`, with the same layers for text and image.

    The stream holds text first, then image tokens, or image tokens alone. Several heads may share keys and values.
    """

    def __init__(self, attention: Any, context: PatchContext) -> None:
        super().__init__()
        self.attention, self.context, self.heads = attention, context, constant(attention.heads)
        self.qkv = FusedLinear(attention.to_q, attention.to_k, attention.to_v)
        self.sharing = constant(attention.to_q.out_features // attention.to_k.out_features)
        self.slots = TokenSlots()

    def forward(
        self,
        hidden_states: Tensor,
        image_rotary_emb: Rotary | None = None,
        encoder_hidden_states: Tensor | None = None,
        **unused: object,
    ) -> Tensor:
        """Tokens [tokens, 1, channels] -> the same; blocks may pass them twice.

        Rotary angles are those of all tokens, or only of image tokens.
        """
        attention = self.attention
        check_unused(unused)
        qkv = grouped_heads_of(self.qkv(hidden_states[:, 0]), self.heads(), self.sharing())
        out = _attend_in_stream(self, qkv, image_rotary_emb)
        return (out if attention.pre_only else attention.to_out[0](out))[:, None]


class PatchedParallelAttention(nn.Module):
    """FLUX.2's attention of single-stream blocks, parallel to the feed-forward layers.

    One projection computes the inputs of both, and another one combines their outputs.
    """

    def __init__(self, attention: Any, context: PatchContext) -> None:
        super().__init__()
        self.attention, self.context, self.heads = attention, context, constant(attention.heads)
        self.width = constant(3 * attention.inner_dim)
        self.slots = TokenSlots()

    def forward(self, hidden_states: Tensor, image_rotary_emb: Rotary | None = None, **unused: object) -> Tensor:
        """Tokens [tokens, 1, channels] -> the same, with the arguments of `PatchedStreamAttention`."""
        attention = self.attention
        check_unused(unused)
        packed, width = attention.to_qkv_mlp_proj(hidden_states[:, 0]), self.width()
        attended = _attend_in_stream(self, heads_of(packed[:, :width], 3, self.heads()), image_rotary_emb)
        return attention.to_out(torch.cat([attended, attention.mlp_act_fn(packed[:, width:])], 1))[:, None]


def _attend_in_stream(
    leaf: PatchedStreamAttention | PatchedParallelAttention, qkv: Tensor, all_turns: Rotary | None
) -> Tensor:
    """Attend from each token of a stream [tokens, 3, heads, width] to the tokens of its image and its text.

    Returns [tokens, heads * width]. Rotary angles are those of all tokens, or only of image tokens.
    """
    attention, context, num_tokens = leaf.attention, leaf.context, leaf.context.num_tokens
    num_text = len(qkv) - num_tokens
    num_rows = context.level.num_rows if context.active is None else len(context.active.rows)
    text_turns, turns = _parted(all_turns, num_tokens)
    text, image = qkv.split([num_text, num_tokens])
    text = normed(text, attention.norm_q, attention.norm_k, text_turns, kernels=context.kernels)
    text = text.unflatten(0, (num_rows, num_text // num_rows))
    image = normed(image, attention.norm_q, attention.norm_k, turns, kernels=context.kernels)
    image, text = _attend_both(leaf.slots, image, text, context)
    return torch.cat([text.flatten(0, 1), image])


def _parted(turns: Rotary | None, num_tokens: int) -> tuple[Rotary | None, Rotary | None]:
    """Split rotary angles into those of text, None if it has none, and those of `num_tokens` image tokens after it."""
    if turns is None or len(turns[0]) == num_tokens:
        return None, turns
    cosines, sines = turns
    num_text = len(cosines) - num_tokens
    return (cosines[:num_text], sines[:num_text]), (cosines[num_text:], sines[num_text:])


def _attend_both(
    slots: TokenSlots, image: Tensor, text: Tensor, context: PatchContext, *, queries_text: bool = True
) -> Results:
    """Attend from the tokens of each image and of its text to both.

    Args:
        slots: slots for keys and values of the image.
        image: [tokens, 3, heads, width], queries, keys and values.
        text: [rows, length, 3, heads, width].
        context: context of the model.
        queries_text: whether text tokens attend, too; otherwise their result is empty.

    Returns:
        [tokens, heads * width] and [rows, length, heads * width].
    """
    kept = attended_keys_values(slots, image[:, 1:], context)
    length, repeats = text.shape[1], context.batch_values.repeats

    def by_resolution(packed: Tensor, kept: Tensor, text: Tensor) -> Results:
        image_parts, text_parts = [], []
        for images in resolutions_of(context):
            own_text, query = text[images.text_rows], images.queries(packed)
            key, value = torch.cat([images.keys_values(kept), own_text[:, :, 1:]], 1).unbind(2)
            num_queries, bias = query.shape[1], images.bias(key.shape[1]) if own_text.shape[1] else None
            own_query = own_text[:, :, 0] if queries_text else own_text[:, :0, 0]
            if context.biased_text is None:
                attended = attend(torch.cat([query, own_query], 1), key, value, bias=bias)
                parts = attended[:, :num_queries], attended[:, num_queries:]
            else:
                assert bias is not None
                own_bias = bias * images.of_rows(context.biased_text)[:, None, :, None]
                parts = attend(query, key, value, bias=bias), attend(own_query, key, value, bias=own_bias)
            image_parts.append(images.pack(parts[0]))
            text_parts.append(parts[1].flatten(2))
        return joined(image_parts, context.num_padding), joined(text_parts, context.packing.num_dummies)

    query, bias = image[:, 0], context.text_bias if length and repeats == 1 else None
    queries = sequences_of(context, query, length if queries_text else 0, bias)
    if queries is None:
        return context.eagerly(by_resolution, query, kept, text)
    all_text = text[:, :, 1:]
    if length and repeats > 1:
        all_text = torch.cat([all_text, all_text[:, -1:].expand(-1, repeats - 1, -1, -1, -1)], 1)
    keys = context.sequences(all_text.shape[1])
    query = queries.together(query, text[:, :, 0])
    offsets, longest = (queries.offsets, keys.key_offsets), (queries.longest, keys.longest)
    every = keys.together(kept, all_text)
    attended = attend_sequences(query, every[:, 0], every[:, 1], offsets, longest)
    return queries.parted(attended.flatten(1))


LEFT_OUT = -1e4
"""Bias that diffusers adds to the scores of masked tokens; their exponentials become 0."""


def text_bias_of(text: Tensor, repeats: int, mask: Tensor | None, *, adds_mask: bool) -> Tensor | None:
    """Return the bias for the scores of text keys, [rows or 1, keys] for the last keys; None for no bias.

    Args:
        text: [rows, length, width].
        repeats: number of times that the last token counts.
        mask: mask of `Transformer`, if it has one.
        adds_mask: see `Transformer`. A constant added to all keys of a query has no effect, so the bias is 0 for valid
            tokens.
    """
    if mask is not None:
        assert repeats == 1, "masked text is not shortened by equal tokens"
        return ((mask > 0).to(text.dtype) - 1) * (1.0 if adds_mask else -LEFT_OUT)
    return None if repeats == 1 else text.new_full((1, 1), math.log(repeats))


def keep_keys_values(
    leaf: PatchedSelfAttention | PatchedJointAttention, hidden_states: Tensor, tables: CellTables, level: int
) -> None:
    """Keep keys and values of all image tokens [P, tokens, channels] of a level, for a pass over some of the cells."""
    attention, tokens = leaf.attention, hidden_states.flatten(0, 1)
    key, value = (heads_of(layer(tokens), 1, leaf.heads()) for layer in (attention.to_k, attention.to_v))
    key = key if attention.norm_k is None else attention.norm_k(key)
    leaf.slots.buffer.store(torch.cat([key, value], 1), tables, level)
