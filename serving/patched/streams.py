"""Leaves of transformers with rotary positions, and with blocks that take image and text as one stream.

In joint blocks the image has an entry for each patch, and the text has one for each row. In the single-stream blocks
after them every token is an entry of its own: [tokens, 1, channels], with the text tokens of all rows first. This lets
diffusers' own block run with an empty text, and nothing is concatenated or split between two such blocks.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..core.attention import Rotary
from ..families.transformer import JointAngles, Transformer
from .context import BatchLeaf, PatchContext
from .tokens import joined, repeated


class RotaryPositions(BatchLeaf):
    """The rotary angles of each image token at its place in its own image, or in its reference.

    Args:
        embed: the model's own module, which computes angles from position ids.
        transformer: description of the model, with `image_ids`.
    """

    def __init__(self, embed: Any, transformer: Transformer, context: PatchContext) -> None:
        super().__init__()
        self.embed, self.context = embed, context
        self.text_ids, self._transformer = transformer.text_ids, transformer

    def forward(self, ids: Tensor) -> Rotary:
        """Return cosines and sines [image tokens, width], in packed order; only dtype and device of `ids` are used.

        If `ids` is empty, return those of the text tokens of all rows: a model that requests them separately receives
        no text.
        """
        if self.text_ids is not None and not len(ids):
            return self._of_texts(self.text_ids, ids)
        return self.context.turns(0, lambda: self._of_images(ids))

    def fill(self, text: Tensor) -> None:
        """Compute the angles of image tokens, and of text tokens if they have positions; see `BatchLeaf`."""
        self.context.turns(0, lambda: self._of_images(text))
        if self.text_ids is not None:
            self._of_texts(self.text_ids, text)

    def _of_images(self, like: Tensor) -> Rotary:
        level, transformer = self.context.batch.levels[0], self._transformer

        @cache
        def angles(number: int | None, height: int, width: int) -> tuple[Tensor, Tensor]:
            """Return the angles of an image, or of a reference of this number."""
            if number is None:
                assert transformer.image_ids is not None
                return self.embed(transformer.image_ids(height, width, like))
            assert transformer.reference_ids is not None, "this family takes no references"
            return self.embed(transformer.reference_ids(number, height, width, like))

        def of_part(part: int) -> Tensor:
            return repeated(
                level,
                lambda *size: angles(None, *size)[part],
                self.context.kernels,
                of_references=lambda number: lambda *size: angles(number, *size)[part],
            )

        return of_part(0), of_part(1)

    def _of_texts(self, text_ids: Callable[[int, Tensor], Tensor], like: Tensor) -> Rotary:
        context, values, (rows, length, _) = self.context, self.context.batch_values, self.context.text.shape
        if values.text_turns is None:
            cosines, sines = self.embed(text_ids(length, like))
            num_rows = context.batch.num_rows
            values.text_turns = cosines.repeat(num_rows, 1), sines.repeat(num_rows, 1)
        cosines, sines = values.text_turns  # they are the same for all rows
        return cosines[: rows * length], sines[: rows * length]


class JointRotary(BatchLeaf):
    """The rotary angles of all tokens, for models in which those of a text depend on the sizes of its images.

    Args:
        embed: the model's own module.
        joint_angles: see `Transformer`.
    """

    def __init__(self, embed: Any, joint_angles: JointAngles, context: PatchContext) -> None:
        super().__init__()
        self.embed, self.joint_angles, self.context = embed, joint_angles, context

    def forward(self, ids: Any, max_txt_seq_len: int | None = None, device: torch.device | None = None) -> Rotary:
        """Return cosines and sines [tokens, width], with the text tokens of all rows first.

        `ids` is ignored, unless the model gives it alone: the position ids of a text and of a patch.
        """
        if max_txt_seq_len is not None and device is not None:
            return self._turns(max_txt_seq_len, device)
        return self._turns(len(ids) - self.context.batch.levels[0].grain ** 2, ids.device)

    def fill(self, text: Tensor) -> None:
        """Compute the angles of all tokens; see `BatchLeaf`."""
        self._turns(text.shape[1], text.device)

    def _turns(self, length: int, device: torch.device) -> Rotary:
        return self.context.turns(length, lambda: self._angles(length, device))

    def _angles(self, length: int, device: torch.device) -> Rotary:
        """Return the angles of the text tokens of all rows, then of image tokens in packed order."""
        context, level = self.context, self.context.batch.levels[0]
        # Those of a token depend on its place, the number of its reference and its size, those of a text on all sizes.
        images: dict[tuple[int, int, int], Tensor] = {}
        texts = []
        for group in level.groups:
            sizes = ((group.height, group.width), *group.references)
            of_images, of_text = self.joint_angles(self.embed, sizes, length, device)
            images |= {(number, *size): each for number, (size, each) in enumerate(zip(sizes, of_images, strict=True))}
            texts.append(turns_of(of_text).repeat(group.rows, 1, 1))
        text = joined(texts, context.batch.num_dummies * length)

        def table(number: int) -> Callable[[int, int], Tensor]:
            return lambda *size: turns_of(images[number, *size]).flatten(1)

        image = repeated(level, table(0), self.context.kernels, of_references=lambda number: table(1 + number))
        cosines, sines = torch.cat([text, image.unflatten(1, (2, -1))]).unbind(1)
        return cosines, sines


def turns_of(angles: Tensor) -> Tensor:
    """Complex [tokens, half the width] -> cosines and sines [tokens, 2, width]."""
    return torch.view_as_real(angles).float().movedim(2, 1).repeat_interleave(2, 2)


class CachedText(nn.Module):
    """A text embedding that `PatchedModel` runs once for a batch; its own input is ignored."""

    def __init__(self, embedder: Any, context: PatchContext) -> None:
        super().__init__()
        self.embedder, self.context = embedder, context

    def embed(self, text: Tensor, mask: Tensor | None) -> Tensor:
        """Embed the text of a batch, with its mask: [rows, length, channels] -> [rows, length, width]."""
        return self.embedder(text)

    def forward(self, text: Tensor) -> Tensor:
        return self.context.text


class JoinStreams(nn.Module):
    """Final entry of the list of joint blocks, which joins image and text to one stream."""

    def __init__(self, context: PatchContext) -> None:
        super().__init__()
        self.context = context

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, **unused: object) -> tuple[Tensor, Tensor]:
        """Image [P, tokens, channels] and text [rows, length, channels] -> empty text, and all tokens."""
        self.context.begin_stream(encoder_hidden_states.shape[1])
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
        context = self.context
        context.begin_stream(context.text.shape[1])
        assert context.stream_rows is not None
        return self.linear(x).index_select(0, context.stream_rows)


def rows_to_stream(module: nn.Module, context: PatchContext) -> nn.Module:
    """Return the leaf for a linear layer or a norm that modulates the tokens of a stream."""
    return (RowsToStream if isinstance(module, nn.Linear) else EmbToStream)(module, context)  # type: ignore[arg-type]
