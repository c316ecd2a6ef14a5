"""Sequences of tokens in a padded batch, whose ends are data, so that attention may be part of a recorded pass."""

from functools import cached_property

import torch
from torch import Tensor

from .packing import Level


class Sequences:
    """The sequences of a level, one per row: its text, `length` tokens, followed by its image.

    The last row is a dummy and owns the padding. It has no keys, so that attending from it costs nothing.
    Offsets are (rows + 1,), int32: where each sequence begins, and the end of the last.

    Attributes:
        length: number of text tokens of each row.
        longest: bound for the number of tokens of a sequence.
    """

    def __init__(self, level: Level, length: int) -> None:
        assert level.starts is not None, "batches that are not padded attend by resolution"
        self._level, self.length, self.longest = level, length, level.longest + length
        self._image = level.starts * level.grain**2
        self._text = torch.arange(len(level.starts), device=level.starts.device) * length

    @cached_property
    def image_offsets(self) -> Tensor:
        """Offsets of the images alone."""
        return self._image.int()

    @cached_property
    def text_offsets(self) -> Tensor:
        """Offsets of the texts alone, as keys: the last row has none."""
        return self._text.clamp(max=self.length * (self._level.num_rows - 1)).int()

    @cached_property
    def offsets(self) -> Tensor:
        """Offsets of the sequences, as queries."""
        return (self._image + self._text).int()

    @cached_property
    def key_offsets(self) -> Tensor:
        """Offsets of the sequences, as keys: the last row has none."""
        return torch.minimum(self.offsets, self.offsets[-2])

    @cached_property
    def _image_places(self) -> Tensor:
        """(tokens,) place of each image token among the tokens of all sequences."""
        level = self._level
        rows = level.row_index.repeat_interleave(level.grain**2)
        return torch.arange(level.num_tokens, device=rows.device) + (rows + 1) * self.length

    @cached_property
    def _text_places(self) -> Tensor:
        """(rows * length,) the same of the text tokens."""
        begins = (self._image + self._text)[:-1, None]
        return (begins + torch.arange(self.length, device=begins.device)).flatten()

    def together(self, image: Tensor, text: Tensor) -> Tensor:
        """Image [tokens, ...] in packed order and text [rows, length, ...] -> all sequences [tokens, ...]."""
        if self.length == 0:
            return image
        found = image.new_empty(len(image) + len(text) * self.length, *image.shape[1:])
        found.index_copy_(0, self._image_places, image)
        return found.index_copy_(0, self._text_places, text.flatten(0, 1))

    def parted(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of `together`."""
        num_rows = self._level.num_rows
        if self.length == 0:
            return tokens, tokens.new_empty(num_rows, 0, *tokens.shape[1:])
        text = tokens.index_select(0, self._text_places).unflatten(0, (num_rows, self.length))
        return tokens.index_select(0, self._image_places), text
