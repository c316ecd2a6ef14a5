"""Leaves of Z-Image, whose forward pads image and text to a multiple of tokens with pads that take part in attention.

The model is called with the image tokens of a batch as one image, and with no text. Its blocks run on a row for each
token, [tokens, 1, channels], as Lumina 2's do (see `one_row`). The pads of an image are equal at first and attend to
the same tokens, so they stay equal: each row has a single pad, in front of its text, with the weight of all pads of its
image. The pads of a text differ by their positions, and are treated as ordinary tokens.
"""

from typing import Any

import torch
from diffusers.models.transformers.transformer_z_image import SEQ_MULTI_OF
from torch import Tensor, nn

from ..cache.active import ActiveRows, ActiveSet
from ..core.swap import Swap
from ..families.transformer import PAD, Transformer
from .attention import LEFT_OUT, PatchedStreamAttention
from .context import BatchLeaf, PatchContext
from .one_row import SwappedAxes, places_of
from .streams import BlocksWithBoundaries, CachedText, rows_to_stream
from .tokens import repeated


def no_angles(ids: Tensor) -> Tensor:
    """Return zeros in place of the angles of positions in one image, which `StreamRotaryAttention` computes."""
    return ids.new_zeros(len(ids), 1, dtype=torch.float32)


class PaddedText(CachedText):
    """The text of each row with its pads, refined once for a batch because it does not depend on the step."""

    def __init__(self, embedder: Any, model: Any, context: PatchContext) -> None:
        super().__init__(embedder, context)
        self.refiner, self.rotary, self.pad = model.context_refiner, model.rope_embedder, model.cap_pad_token

    def embed(self, text: Tensor, mask: Tensor | None) -> Tensor:
        """Embed and refine text, as `CachedText.embed`."""
        assert mask is not None, "pads are marked"
        text = torch.where((mask == PAD)[:, :, None], self.pad, self.embedder(text))
        turns = self.rotary(_text_places(text.shape[1], text.device)[1:])[None]
        for block in self.refiner:
            text = block(text, mask > 0, turns)
        return text

    def forward(self, text: Tensor) -> Tensor:
        """Embed the text that the model receives, which is empty."""
        return self.embedder(text)


class StreamRotaryAttention(nn.Module):
    """Attention of the blocks of a stream, with the angles computed at the beginning of the stream."""

    def __init__(self, attention: Any, stream: "PaddedStream") -> None:
        super().__init__()
        self.leaf, self.stream = PatchedStreamAttention(attention, stream.context), stream

    def forward(self, hidden_states: Tensor, attention_mask: None, freqs_cis: object) -> Tensor:
        assert attention_mask is None
        return self.leaf(hidden_states, image_rotary_emb=self.stream.angles())


class PaddedStream:
    """State shared by the leaves of a model's two streams: that of images and their pads, and that of all tokens.

    Attributes:
        pads: [rows, 1, width], the pads of images, passed from the first stream to the second.
    """

    def __init__(self, model: Any, context: PatchContext) -> None:
        self.context, self.rotary, self.pad = context, model.rope_embedder, model.x_pad_token
        self.pads: Tensor | None = None
        self._length = 0
        # Cache of the last angles, because the blocks of a pass mostly compute the same tokens.
        self._last: tuple[ActiveSet | ActiveRows, int, tuple[Tensor, ...]] | None = None

    def begin(self, text: Tensor, image: Tensor) -> Tensor:
        """Begin a stream, and return its tokens [tokens, 1, width].

        Args:
            text: [rows, length, width], the pad of each row, followed in the second stream by its text.
            image: image tokens [tokens, width].
        """
        context, values, length = self.context, self.context.batch_values, text.shape[1]
        self.fill(length, text)
        context.begin_stream(length)
        self._length, bias = length, values.pad_bias
        assert bias is not None
        if length > 1:
            assert values.text_bias is not None, "text has a mask"
            bias = torch.cat([bias, values.text_bias], 1)
        context.text_bias = bias if context.rows is None else bias.index_select(0, context.rows.rows)
        return torch.cat([text.flatten(0, 1), image])[:, None]

    def fill(self, length: int, like: Tensor) -> None:
        """Compute the angles of a stream with `length` tokens of each row before images, and the bias of pads."""
        values = self.context.batch_values
        if length not in values.turns:
            values.turns[length] = self._compute_angles(length, like.device)
        if values.pad_bias is None:
            values.pad_bias = self._bias(like)

    def angles(self) -> tuple[Tensor, ...]:
        """Return cosines and sines of the tokens of the present stream that are computed."""
        context, length = self.context, self._length
        both, some = context.batch_values.turns[length], context.rows or context.active
        if some is None:
            return both
        if self._last is None or self._last[0] is not some or self._last[1] != length:
            places = some.stream(length).places
            self._last = some, length, tuple(part.index_select(0, places) for part in both)
        return self._last[2]

    def _bias(self, like: Tensor) -> Tensor:
        """Return the bias that weights the pad of each row by the row's number of pads, (rows, 1)."""
        counts = -self.context.batch.levels[0].row_tokens % SEQ_MULTI_OF
        return torch.where(counts > 0, counts.log(), LEFT_OUT).to(like.dtype)

    def _compute_angles(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of all tokens of the batch.

        The position of a text token is its number; that of an image token is the length of its text, row and column.
        """
        context = self.context
        level, mask = context.batch.levels[0], context.text_mask
        image = repeated(level, lambda *size: places_of(size, device), context.kernels).long()
        behind = (1 + (mask > 0).sum(1)).index_select(0, level.row_index.repeat_interleave(level.grain**2))
        image = torch.cat([behind[:, None], image], 1)
        turns = self.rotary(torch.cat([_text_places(length - 1, device).repeat(len(mask), 1), image]))
        return turns.real.repeat_interleave(2, 1), turns.imag.repeat_interleave(2, 1)


def _text_places(length: int, device: torch.device) -> Tensor:
    """Return the position ids of an image's pad and of a text, (1 + length, 3)."""
    numbers = torch.arange(1 + length, device=device)[:, None]
    return torch.cat([numbers, numbers.new_zeros(1 + length, 2)], 1)


class _StreamBoundary(nn.Module):
    """Module that is called as a block before or after the blocks of a stream."""

    def __init__(self, stream: PaddedStream) -> None:
        super().__init__()
        self.stream = stream


class ImageStreamStart(_StreamBoundary, BatchLeaf):
    """First entry of the list of blocks that compute the images alone."""

    def fill(self, text: Tensor) -> None:
        """Compute the values of both streams; see `BatchLeaf`."""
        for length in (1, 1 + self.stream.context.text_mask.shape[1]):
            self.stream.fill(length, text)

    def forward(self, x: Tensor, *unused: object) -> Tensor:
        """[1, tokens with the pads that the forward has added, width] -> [rows and tokens, 1, width]."""
        context, pad = self.stream.context, self.stream.pad
        return self.stream.begin(pad.expand(context.packing.num_rows, 1, -1), x[0, : context.num_tokens])


class ImageStreamEnd(_StreamBoundary):
    """Final entry of this list, which passes the pads to the stream of all tokens."""

    def forward(self, x: Tensor, *unused: object) -> Tensor:
        """[rows and tokens, 1, width] -> [1, tokens, width]."""
        num_tokens = self.stream.context.num_tokens
        self.stream.pads = x[:-num_tokens]
        return x[-num_tokens:].transpose(0, 1)


class JointStreamStart(_StreamBoundary):
    """First entry of the list of blocks that compute image and text."""

    def forward(self, x: Tensor, *unused: object) -> Tensor:
        """[1, tokens, width] -> all tokens [tokens, 1, width]."""
        pads = self.stream.pads
        assert pads is not None, "images come first"
        return self.stream.begin(torch.cat([pads, self.stream.context.text], 1), x[0])


class JointStreamEnd(_StreamBoundary):
    """Final entry of this list, which keeps the image tokens [tokens, 1, width]."""

    def forward(self, x: Tensor, *unused: object) -> Tensor:
        context = self.stream.context
        context.stream_rows = context.row_of_token
        return x[-context.num_tokens :]


def insert_padded(swap: Swap, model: Any, transformer: Transformer, context: PatchContext) -> None:
    """Insert the leaves into a model."""
    stream, image, both = PaddedStream(model, context), transformer.joint, transformer.single
    assert both is not None, "text that is refined joins a stream"
    for block in (*getattr(model, image.name), *getattr(model, both.name)):
        swap.wrap(block, image.modulation, rows_to_stream, context)
        swap.wrap(block, "attention", StreamRotaryAttention, stream)
    for final in model.all_final_layer.values():
        swap.wrap(final, "adaLN_modulation.1", rows_to_stream, context)
        swap.wrap(final, "linear", SwappedAxes)
    swap.wrap(model, "cap_embedder", PaddedText, model, context)
    swap.put(model, "context_refiner", nn.ModuleList())
    swap.put(model, "rope_embedder", no_angles)
    ends = {image.name: (ImageStreamStart, ImageStreamEnd), both.name: (JointStreamStart, JointStreamEnd)}
    for name, (start, end) in ends.items():
        blocks = BlocksWithBoundaries(getattr(model, name), before=[start(stream)], behind=[end(stream)])
        swap.put(model, name, blocks)
