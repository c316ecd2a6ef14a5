"""Leaves of transformers with rotary positions, and with blocks that take image and text as one stream.

In joint blocks the image has an entry for each patch, and the text has one for each row. In the single-stream blocks
after them every token is an entry of its own: [tokens, 1, channels], with the text tokens of all rows first. This lets
diffusers' own block run with an empty text, and nothing is concatenated or split between two such blocks.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .context import PatchContext, embedded_text, joined, repeated


class RotaryPositions(nn.Module):
    """The rotary angles of each image token at its place in its own image.

    Args:
        embed: the model's own module, which computes angles from position ids.
        image_ids, text_ids: see `Transformer`.
    """

    def __init__(
        self,
        embed: Any,
        image_ids: Callable[[int, int, Tensor], Tensor],
        text_ids: Callable[[int, Tensor], Tensor] | None,
        context: PatchContext,
    ) -> None:
        super().__init__()
        self.embed, self.image_ids, self.text_ids, self.context = embed, image_ids, text_ids, context

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [image tokens, width], in packed order; only dtype and device of `ids` are used.

        If `ids` is empty, return those of the text tokens of all rows: a model that requests them separately receives
        no text.
        """
        context = self.context
        if self.text_ids is not None and not len(ids):
            return self._of_texts(self.text_ids, ids)
        if "positions" not in context.batch_values:
            angles = {
                (group.height, group.width): self.embed(self.image_ids(group.height, group.width, ids))
                for group in context.batch.levels[0].groups
            }
            context.batch_values["positions"] = tuple(
                repeated(context.batch.levels[0], lambda *size, part=part: angles[size][part], context.kernels)
                for part in (0, 1)
            )
        cosines, sines = context.batch_values["positions"]
        some = context.rows or context.active
        if some is None:
            return cosines, sines
        own = some.tokens(0)
        return cosines.index_select(0, own), sines.index_select(0, own)

    def _of_texts(self, text_ids: Callable[[int, Tensor], Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
        batch_values, (rows, length, _) = self.context.batch_values, embedded_text(self.context).shape
        if "text positions" not in batch_values:
            batch_values["text positions"] = tuple(part.repeat(rows, 1) for part in self.embed(text_ids(length, like)))
        some = self.context.rows
        num_tokens = length * (rows if some is None else len(some.rows))  # they are the same for all rows
        cosines, sines = batch_values["text positions"]
        return cosines[:num_tokens], sines[:num_tokens]


class JointRotary(nn.Module):
    """The rotary angles of all tokens, for models in which those of a text depend on the size of its image.

    Args:
        embed: the model's own module.
        joint_angles: see `Transformer`.
    """

    def __init__(self, embed: Any, joint_angles: Callable[..., tuple[Tensor, Tensor]], context: PatchContext) -> None:
        super().__init__()
        self.embed, self.joint_angles, self.context = embed, joint_angles, context

    def forward(self, sizes: object, max_txt_seq_len: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return cosines and sines [tokens, width], with the text tokens of all rows first; `sizes` is ignored."""
        context = self.context
        if "positions" not in context.batch_values:
            context.batch_values["positions"] = self._angles(max_txt_seq_len, device)
        both, some = context.batch_values["positions"], context.rows or context.active
        if some is not None:
            both = both.index_select(0, some.stream(max_txt_seq_len).places)
        return both[:, 0], both[:, 1]

    def _angles(self, length: int, device: torch.device) -> Tensor:
        """Return [tokens, 2, width]: angles of the text tokens of all rows, then of image tokens in packed order."""
        level = self.context.batch.levels[0]
        sizes = {(group.height, group.width) for group in level.groups}
        made = {size: tuple(map(_parts_of, self.joint_angles(self.embed, *size, length, device))) for size in sizes}
        texts = [made[group.height, group.width][1].repeat(group.rows, 1, 1) for group in level.groups]
        text = joined(texts, level.num_rows * length - sum(map(len, texts)))
        image = repeated(level, lambda *size: made[size][0].flatten(1), self.context.kernels)
        return torch.cat([text, image.unflatten(1, (2, -1))])


def _parts_of(angles: Tensor) -> Tensor:
    """Complex [tokens, half the width] -> cosines and sines [tokens, 2, width]."""
    return torch.view_as_real(angles).float().movedim(2, 1).repeat_interleave(2, 2)


def begin_stream(context: PatchContext, rows: int, length: int) -> Tensor:
    """Set and return the row of each token of a stream: first text, `length` tokens for each of `rows`, then images."""
    if context.rows is not None:
        found = context.rows.stream(length).rows
    else:
        key = "rows of the stream", length
        if key not in context.batch_values:
            image = context.row_of_token
            own = torch.arange(rows, device=image.device).repeat_interleave(length)
            context.batch_values[key] = torch.cat([own, image])
        found = context.batch_values[key]
    context.stream_rows = found
    return found


def text_of_rows(context: PatchContext) -> Tensor:
    """Return the embedded text of the rows that are computed, [rows, length, width]."""
    text, rows = embedded_text(context), context.rows
    return text if rows is None else text.index_select(0, rows.rows)


class CachedText(nn.Module):
    """A text embedding that `PatchedModel` runs once for a batch; its own input is ignored."""

    def __init__(self, embed: nn.Module, context: PatchContext) -> None:
        super().__init__()
        self.embed, self.context = embed, context

    def forward(self, text: Tensor) -> Tensor:
        return text_of_rows(self.context)


class JoinStreams(nn.Module):
    """Final entry of the list of joint blocks, which joins image and text to one stream."""

    def __init__(self, context: PatchContext) -> None:
        super().__init__()
        self.context = context

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, **unused: object) -> tuple[Tensor, Tensor]:
        """Image [P, tokens, channels] and text [rows, length, channels] -> empty text, and all tokens."""
        begin_stream(self.context, *encoder_hidden_states.shape[:2])
        tokens = torch.cat([encoder_hidden_states.flatten(0, 1), hidden_states.flatten(0, 1)])[:, None]
        return tokens[:, :0], tokens


class SplitStreams(nn.Module):
    """Final entry of the list of single-stream blocks, which keeps only the image's tokens."""

    def __init__(self, context: PatchContext) -> None:
        super().__init__()
        self.context = context

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, **unused: object
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Empty text, and all tokens [tokens, 1, channels] -> empty text, and the image [P, tokens, channels].

        The text is left out for models whose single-stream blocks do not take it as a separate argument.
        """
        context = self.context
        image = hidden_states[hidden_states.shape[0] - context.num_tokens :]
        image = image.view(-1, context.level.grain**2, image.shape[2])
        return image if encoder_hidden_states is None else (encoder_hidden_states, image)


class EmbToStream(nn.Module):
    """A norm whose scale and shift, one per row (`emb`), are applied to all tokens of the row in a stream."""

    def __init__(self, norm: nn.Module, context: PatchContext) -> None:
        super().__init__()
        self.norm, self.context = norm, context

    def forward(self, x: Tensor, emb: Tensor) -> Any:
        assert self.context.stream_rows is not None, "a stream begins with `JoinStreams`"
        return self.norm(x, emb=emb.index_select(0, self.context.stream_rows))


class BlocksWithBoundaries(nn.ModuleList):
    """List of blocks with modules before and after them that are called as blocks.

    `len` does not count these modules, because models number their blocks by it.
    """

    _num_ends = 0

    def __init__(
        self, blocks: Iterable[nn.Module], *, before: Sequence[nn.Module] = (), behind: Sequence[nn.Module] = ()
    ) -> None:
        super().__init__([*before, *blocks, *behind])
        self._num_ends = len(before) + len(behind)

    def __len__(self) -> int:
        return len(self._modules) - self._num_ends


class RowsToStream(nn.Module):
    """A linear layer on values with one entry per row; repeats its output for all tokens of the row's stream."""

    def __init__(self, linear: nn.Linear, context: PatchContext) -> None:
        super().__init__()
        self.linear, self.context = linear, context

    def forward(self, x: Tensor) -> Tensor:
        assert self.context.stream_rows is not None, "a stream begins with `JoinStreams`"
        return self.linear(x).index_select(0, self.context.stream_rows)


class RowsToUpcomingStream(nn.Module):
    """The same for a layer that runs once for all blocks, before the stream begins."""

    def __init__(self, linear: nn.Linear, context: PatchContext) -> None:
        super().__init__()
        self.linear, self.context = linear, context

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = embedded_text(self.context).shape
        return self.linear(x).index_select(0, begin_stream(self.context, rows, length))
