"""Queries, keys and values of a batch: of each resolution, with all tokens computed or only some, or of all rows."""

from torch import Tensor
from torch.nn import functional as F

from ..cache.active import ActiveSet, QueryGroup
from ..cache.slots import TokenSlots
from ..core.attention import takes_sequences
from ..layout.packing import Group, Level
from ..layout.sequences import Sequences
from .context import PatchContext


def _before(text_bias: Tensor | None, rows: slice | Tensor, num_keys: int) -> Tensor | None:
    """Return the bias of some rows, padded with zeros for preceding keys: [rows, 1, 1, keys]."""
    if text_bias is None:
        return None
    own = text_bias if len(text_bias) == 1 else text_bias[rows]
    return F.pad(own, (num_keys - own.shape[1], 0))[:, None, None]


class Images:
    """The images of one resolution when all their tokens are computed.

    Attributes:
        text_rows: rows of these images among the rows of the computed text.
    """

    def __init__(self, group: Group, text_bias: Tensor | None) -> None:
        self._group, self._text_bias = group, text_bias
        self.text_rows = group.row_slice

    def queries(self, packed: Tensor) -> Tensor:
        """Select the tokens of these images from packed tokens [tokens, ...]: [rows, tokens of a row, ...]."""
        group = self._group
        return packed[group.start : group.end].view(group.rows, -1, *packed.shape[1:])

    def keys_values(self, kept: Tensor) -> Tensor:
        """Select the entries of these images from `attended_keys_values`: [rows, tokens of an image, ...]."""
        return self.queries(kept)

    def of_rows(self, values: Tensor) -> Tensor:
        """Select the rows of these images from values [rows, ...]."""
        return values[self._group.row_slice]

    def pack(self, attended: Tensor) -> Tensor:
        """[rows, tokens of a row, heads, width] -> packed tokens [tokens, heads * width]."""
        return attended.reshape(-1, attended.shape[2] * attended.shape[3])

    def bias(self, num_keys: int) -> Tensor | None:
        """Return the bias for the scores of `num_keys` keys, of which the last are text tokens; None for no bias."""
        return _before(self._text_bias, self._group.row_slice, num_keys)


class ActiveImages:
    """The images of one resolution when only some cells are computed; shorter rows are padded. As `Images`."""

    def __init__(self, group: QueryGroup, active: ActiveSet, level: Level, text_bias: Tensor | None) -> None:
        self._group, self._text_bias = group, text_bias
        self._area, self._places = active.tables.side(level.index) ** 2, active.tables.slot_tokens(level.index)
        self.text_rows = group.local

    def queries(self, packed: Tensor) -> Tensor:
        taken = packed.view(-1, self._area, *packed.shape[1:]).index_select(0, self._group.index)
        return taken.view(len(self._group.rows), -1, *packed.shape[1:])

    def keys_values(self, kept: Tensor) -> Tensor:
        places = self._places.index_select(0, self._group.context).flatten()
        return kept.index_select(0, places).view(len(self._group.rows), -1, *kept.shape[1:])

    def of_rows(self, values: Tensor) -> Tensor:
        return values.index_select(0, self._group.rows)

    def pack(self, attended: Tensor) -> Tensor:
        valid, width = self._group.valid, attended.shape[2] * attended.shape[3]
        if valid is None:
            return attended.reshape(-1, width)
        return attended.reshape(-1, self._area, width).index_select(0, valid).view(-1, width)

    def bias(self, num_keys: int) -> Tensor | None:
        return _before(self._text_bias, self._group.rows, num_keys)


def resolutions_of(context: PatchContext) -> list[Images] | list[ActiveImages]:
    """Return the images of every resolution that has tokens to compute."""
    active, level = context.active, context.level
    if active is not None:
        return [ActiveImages(group, active, level, context.text_bias) for group in active.queries]
    return [Images(group, context.text_bias) for group in level.groups]


def sequences_of(context: PatchContext, query: Tensor, length: int, bias: Tensor | None = None) -> Sequences | None:
    """Return the sequences in which attention runs over all rows at once; None if it runs by resolution.

    Args:
        context: context of the model.
        query: [tokens, heads, width], queries of images.
        length: number of text tokens of each row.
        bias: bias for the scores of text keys.
    """
    is_whole = context.active is None and context.rows is None
    if is_whole and context.level.starts is not None and takes_sequences(query, bias):
        return context.sequences(length)
    return None


def attended_keys_values(slots: TokenSlots, keys_values: Tensor, context: PatchContext) -> Tensor:
    """Keep keys and values [tokens, 2, heads, width] if the patch cache requests it.

    Returns:
        Keys and values of all tokens: the given ones or, if only some cells are active, those kept in slots.
    """
    if context.active is not None:
        return slots.write(keys_values, context.active, context.level.index)
    if context.cells is not None:
        slots.buffer.store(keys_values, context.cells, context.level.index)
    return keys_values
