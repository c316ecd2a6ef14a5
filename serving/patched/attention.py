"""Attention over packed tokens: every image attends to its own tokens and its own text, and to nothing else.

Linear layers run once over the tokens of all rows; the attention itself runs once per resolution. The tokens of an
image may come in any order, so patches need not be put together for it. Text keys and values of cross attention are
computed when a batch is put together, not at every step. Source: PatchedServe section 4.2.1, "Self-Attention".
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..cache.active import ActiveSet, QueryGroup
from ..cache.slots import TokenSlots
from ..layout.packing import Level
from .leaves import PatchContext, joined


class FusedLinear(nn.Module):
    """Several linear layers on the same input as one; the weights are put together at first use."""

    def __init__(self, *layers: nn.Linear) -> None:
        super().__init__()
        self._layers = layers
        self._fused: tuple[Tensor, Tensor | None] | None = None

    def fuse(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of all layers, put together where that has not been done for this dtype and device."""
        weight: Tensor = self._layers[0].weight
        if self._fused is None or self._fused[0].dtype != weight.dtype or self._fused[0].device != weight.device:
            has_bias = self._layers[0].bias is not None
            bias = torch.cat(tuple(layer.bias for layer in self._layers)) if has_bias else None
            self._fused = torch.cat(tuple(layer.weight for layer in self._layers)), bias
        return self._fused

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, *self.fuse())


class PatchedSelfAttention(nn.Module):
    """Self attention of a U-Net's transformer block, or the second attention of SD3.5."""

    def __init__(self, attention: Any, context: PatchContext) -> None:
        super().__init__()
        self.attention, self.context = attention, context
        self.qkv = FusedLinear(attention.to_q, attention.to_k, attention.to_v)
        self.slots = TokenSlots()

    def forward(self, hidden_states: Tensor, encoder_hidden_states: None = None, **unused: object) -> Tensor:
        """[P, tokens, channels] -> the same."""
        attention, context = self.attention, self.context
        assert context.level is not None
        assert encoder_hidden_states is None
        _check_unused(unused)
        heads = attention.heads
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        qkv = self.qkv(tokens).view(len(tokens), 3, heads, -1)
        qkv = _normed(qkv, attention.norm_q, attention.norm_k)
        if context.active is not None:
            active, level, parts = context.active, context.level, []
            kept = self.slots.write(qkv[:, 1:], active, level.index)
            for group in active.queries:
                query = _queries(qkv[:, 0], group, active, level)
                key, value = _kept_of(kept, group, active, level).unbind(2)
                attended = _attend(query, key.transpose(1, 2), value.transpose(1, 2), attention.scale)
                parts.append(_without_filling(attended, group, active, level))
            return attention.to_out[0](joined(parts)).view(hidden_states.shape)
        _keep(self.slots, qkv[:, 1:], context)
        parts = []
        for group in context.level.groups:
            # [rows, tokens, 3, heads, width] -> three of [rows, heads, tokens, width]
            part = qkv[group.start : group.end].view(group.rows, -1, 3, heads, qkv.shape[-1])
            query, key, value = part.transpose(1, 3).unbind(2)
            parts.append(_attend(query, key, value, attention.scale).reshape(group.end - group.start, -1))
        return attention.to_out[0](joined(parts)).view(hidden_states.shape)


class PatchedCrossAttention(nn.Module):
    """Attention of image tokens to the text of their row."""

    def __init__(self, attention: Any, context: PatchContext) -> None:
        super().__init__()
        self.attention, self.context = attention, context
        self.keys_values = FusedLinear(attention.to_k, attention.to_v)
        self.text: tuple[Tensor, Tensor] | None = None

    def read(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, heads, length, width each] of text [rows, length, width]; `text` takes them."""
        attention = self.attention
        both = self.keys_values(text)
        both = both.view(*both.shape[:2], 2, attention.heads, -1)
        key, value = both.transpose(1, 3).unbind(2)
        if attention.norm_k is not None:
            key = attention.norm_k(key)
        return key.contiguous(), value.contiguous()

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, **unused: object) -> Tensor:
        """[P, tokens, channels] -> the same. The text itself is not looked at, but what `read` has made of it."""
        attention, context = self.attention, self.context
        assert context.level is not None
        assert self.text is not None
        _check_unused(unused)
        heads = attention.heads
        key, value = self.text
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        query = attention.to_q(tokens).view(len(tokens), heads, -1)
        if attention.norm_q is not None:
            query = attention.norm_q(query)
        parts = []
        if context.active is not None:
            active, level = context.active, context.level
            for group in active.queries:
                own_key, own_value = key.index_select(0, group.rows), value.index_select(0, group.rows)
                attended = _attend(_queries(query, group, active, level), own_key, own_value, attention.scale)
                parts.append(_without_filling(attended, group, active, level))
            return attention.to_out[0](joined(parts)).view(hidden_states.shape)
        for group in context.level.groups:
            part = query[group.start : group.end].view(group.rows, -1, heads, query.shape[-1]).transpose(1, 2)
            attended = _attend(part, key[group.row_slice], value[group.row_slice], attention.scale)
            parts.append(attended.reshape(group.end - group.start, -1))
        return attention.to_out[0](joined(parts)).view(hidden_states.shape)


class PatchedJointAttention(nn.Module):
    """SD3's joint attention: the tokens of an image and of its text attend to both.

    Text tokens that are equal and stand at the end (what SD3 feeds where it has no T5) may be given once, with
    `context.biases`: a key that counts n times has ln n added to its score.
    """

    def __init__(self, attention: Any, context: PatchContext) -> None:
        super().__init__()
        self.attention, self.context = attention, context
        self.image_qkv = FusedLinear(attention.to_q, attention.to_k, attention.to_v)
        self.text_qkv = FusedLinear(attention.add_q_proj, attention.add_k_proj, attention.add_v_proj)
        self.slots = TokenSlots()

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, **unused: object
    ) -> tuple[Tensor, Tensor | None]:
        """Image [P, tokens, channels] and text [rows, length, channels] -> the same two."""
        attention, context = self.attention, self.context
        assert context.level is not None
        _check_unused(unused)
        heads, (num_rows, length, _) = attention.heads, encoder_hidden_states.shape
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        image = self.image_qkv(tokens).view(len(tokens), 3, heads, -1)
        image = _normed(image, attention.norm_q, attention.norm_k)
        text = self.text_qkv(encoder_hidden_states).view(num_rows, length, 3, heads, -1)
        text = _normed(text, attention.norm_added_q, attention.norm_added_k)
        images, texts = self._masked(image, text) if context.active is not None else self._whole(image, text)
        out = attention.to_out[0](joined(images)).view(hidden_states.shape)
        if attention.context_pre_only:
            return out, None
        return out, attention.to_add_out(joined(texts))

    def _whole(self, image: Tensor, text: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Attend with all tokens [tokens, 3, heads, width] and text [rows, length, 3, heads, width]."""
        attention, context, heads = self.attention, self.context, self.attention.heads
        assert context.level is not None
        _keep(self.slots, image[:, 1:], context)
        images, texts = [], []
        for group, bias in zip(context.level.groups, context.biases, strict=True):
            part = image[group.start : group.end].view(group.rows, -1, 3, heads, image.shape[-1])
            joint = torch.cat([part, text[group.row_slice]], 1)
            query, key, value = joint.transpose(1, 3).unbind(2)
            count = part.shape[1]
            if attention.context_pre_only:
                query = query[:, :, :count]
            attended = _attend(query, key, value, attention.scale, bias).flatten(2)
            images.append(attended[:, :count].reshape(group.end - group.start, -1))
            texts.append(attended[:, count:])
        return images, texts

    def _masked(self, image: Tensor, text: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Attend with the tokens of the active cells, and the text of the rows that have such cells."""
        attention, active, level = self.attention, self.context.active, self.context.level
        assert active is not None
        assert level is not None
        kept = self.slots.write(image[:, 1:], active, level.index)
        images, texts = [], []
        for group in active.queries:
            own_text = text[group.local]
            query = _queries(image[:, 0], group, active, level)
            count = query.shape[2]
            if not attention.context_pre_only:
                query = torch.cat([query, own_text[:, :, 0].transpose(1, 2)], 2)
            keys_values = torch.cat([_kept_of(kept, group, active, level), own_text[:, :, 1:]], 1)
            key, value = keys_values.transpose(1, 3).unbind(2)
            # Groups of active cells may leave out resolutions.
            bias = next(bias for bias in self.context.biases if bias is None or bias.shape[3] == key.shape[2])
            attended = _attend(query, key, value, attention.scale, bias)
            images.append(_without_filling(attended[:, :count], group, active, level))
            texts.append(attended[:, count:].flatten(2))
        return images, texts


def biases_of(level: Level, length: int, repeats: int, like: Tensor) -> tuple[Tensor | None, ...]:
    """What is added to the scores of each resolution's keys, [1, 1, 1, keys], when the last one counts `repeats` times.

    Args:
        level: of the image tokens.
        length: of the text behind them, in tokens.
        repeats: 1 or more; None is returned for every resolution if it is 1.
        like: says dtype and device.
    """
    if repeats == 1:
        return (None,) * len(level.groups)
    last = like.new_full((1, 1, 1, 1), math.log(repeats))
    return tuple(F.pad(last, (group.height * group.width + length - 1, 0)) for group in level.groups)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """Attention [rows, heads, tokens, width] -> [rows, tokens, heads, width], contiguous where torch gives it so."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale).transpose(1, 2)


def _keep(slots: TokenSlots, keys_values: Tensor, context: PatchContext) -> None:
    """Keep keys and values of a full pass, if the patch cache asks for it."""
    if context.cells is not None:
        assert context.level is not None
        slots.buffer.keep(keys_values, context.cells, context.level.index)


def _queries(query: Tensor, group: QueryGroup, active: ActiveSet, level: Level) -> Tensor:
    """Queries of the active cells [tokens, heads, width] -> [rows, heads, tokens, width], rows filled up."""
    area = active.tables.side(level.index) ** 2
    taken = query.view(-1, area, *query.shape[1:]).index_select(0, group.index)
    return taken.view(len(group.rows), -1, *query.shape[1:]).transpose(1, 2)


def _without_filling(attended: Tensor, group: QueryGroup, active: ActiveSet, level: Level) -> Tensor:
    """[rows, tokens, heads, width] -> tokens of the group's active cells [tokens, heads * width]."""
    area, width = active.tables.side(level.index) ** 2, attended.shape[2] * attended.shape[3]
    if group.valid is None:
        return attended.reshape(-1, width)
    return attended.reshape(-1, area, width).index_select(0, group.valid).view(-1, width)


def _kept_of(kept: Tensor, group: QueryGroup, active: ActiveSet, level: Level) -> Tensor:
    """Of kept keys and values [places, 2, heads, width] those of the group's rows: [rows, tokens, 2, heads, width]."""
    places = active.tables.slot_tokens(level.index).index_select(0, group.context).flatten()
    return kept.index_select(0, places).view(len(group.rows), -1, *kept.shape[1:])


def _normed(qkv: Tensor, norm_q: nn.Module | None, norm_k: nn.Module | None) -> Tensor:
    """Norms of queries and keys [..., 3, heads, width], where the model has them."""
    if norm_q is None and norm_k is None:
        return qkv
    query, key, value = qkv.unbind(-3)
    query = query if norm_q is None else norm_q(query)
    key = key if norm_k is None else norm_k(key)
    return torch.stack([query, key, value], -3)


def _check_unused(arguments: dict[str, object]) -> None:
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise ValueError(f"the patch engine does not support the attention arguments {', '.join(given)}")
