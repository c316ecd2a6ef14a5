"""State shared by the leaves of a patched model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..cache.active import ActiveRows, ActiveSet
from ..cache.cells import CellTables
from ..core.adapters import Entries, RowAdapters
from ..core.attention import Rotary
from ..core.captured import Pause, Results
from ..core.controls import NetRows
from ..layout.device_tables import Tables
from ..layout.packing import Level, Packing
from ..layout.sequences import Sequences

Strategy = Literal["stitch", "regroup"]
Fused = Literal["activation", "stitching"]
"""Work of the leaves after a norm that the norm's own kernel may do."""
Choose = Callable[[Any, Level, Level], Strategy]
"""Chooses the strategy of a convolution from one level to another."""


@dataclass(slots=True, eq=False)
class BatchValues:
    """Values that all passes of a batch read while it has the same rows; the first pass computes what is missing.

    Attributes:
        repeats: number of times that the last text token of every row counts.
        adapters: adapters of the rows; None if no row has any.
        controls: rows of each ControlNet that the batch needs.
        text: embedded text [rows, length, width], of models that embed it once for a batch.
        text_mask: (rows, length), above 0 for valid tokens; None if all are.
        text_bias: see `PatchContext`.
        text_turns: rotary angles of the text tokens of all rows, where text has positions of its own.
        keys_values: keys and values of the text [rows, length, heads, width], for each cross attention.
        positions: learnt positions [tokens, width] of all image tokens.
        turns: rotary angles of all tokens of a stream, by the number of text tokens of each row ahead of the images.
        pad_bias: (rows, 1), bias for the scores of the pad of each image (`padded`).
        is_reference: (P,), 1 for patches of references and 0 for those of images, of models that modulate them apart.
    """

    repeats: int = 1
    adapters: RowAdapters | None = None
    controls: dict[str, NetRows] = field(default_factory=dict)
    text: Tensor | None = None
    text_mask: Tensor | None = None
    text_bias: Tensor | None = None
    text_turns: Rotary | None = None
    keys_values: tuple[tuple[Tensor, Tensor], ...] = ()
    positions: Tensor | None = None
    turns: dict[int, Rotary] = field(default_factory=dict)
    pad_bias: Tensor | None = None
    is_reference: Tensor | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """What passes depend on beside the shapes of these values."""
        return self.repeats, () if self.adapters is None else tuple(self.adapters.scales), tuple(self.controls)

    def of_rows(self, rows: Tensor) -> "BatchValues":
        """Return the values of some rows, without those that depend on the packing of these rows."""
        assert not self.controls, "a cache that selects rows excludes ControlNets"

        def chosen(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.index_select(0, rows)

        pairs = tuple((key.index_select(0, rows), value.index_select(0, rows)) for key, value in self.keys_values)
        bias = self.text_bias
        if bias is not None and len(bias) > 1:  # one row is for all
            bias = bias.index_select(0, rows)
        text, mask = chosen(self.text), chosen(self.text_mask)
        adapters = None if self.adapters is None else self.adapters.of_rows(rows)
        return BatchValues(self.repeats, adapters, text=text, text_mask=mask, text_bias=bias, keys_values=pairs)


class BatchLeaf(nn.Module, ABC):
    """A leaf that computes values of the batch, before its first pass or in it."""

    @abstractmethod
    def fill(self, text: Tensor) -> object:
        """Compute its values unless they are known, for text [rows, length, width] as the model receives it."""


@dataclass(slots=True, eq=False)
class PatchContext:
    """State shared by the leaves of one patched model during a pass. For one thread at a time.

    Attributes:
        choose: chooses the strategy of a convolution.
        kernels: one of `kernels.launch.KERNELS`.
        timesteps: (rows,) timestep of every row, for this forward pass.
        batch_values: values of the batch.
        text_bias: bias for the scores of text keys, [rows or 1, keys] for the last keys; None for no bias.
        biased_text: (rows, length), 1 for text tokens as queries whose scores have this bias, else 0; None if all have
            it.
        cells: set while a block runs in full and its operators keep their inputs, for the patch cache.
        stream_rows: (tokens,) row of each token of single-stream blocks.
        active: set while a block runs on only some cells; all tensors then hold the tokens of these, cell by cell.
        masked: the cells that passes over the batch compute, in a part of the pass or in all of it; None for all cells.
        rows: set while a block runs on only some rows, as a batch of their own.
        pause: interrupts the recording of a pass; None while passes run eagerly.
    """

    choose: Choose
    kernels: str = "auto"
    timesteps: Tensor | None = None
    batch_values: BatchValues = field(default_factory=BatchValues)
    text_bias: Tensor | None = None
    biased_text: Tensor | None = None
    stream_rows: Tensor | None = None
    cells: CellTables | None = None
    active: ActiveSet | None = None
    masked: ActiveSet | None = None
    rows: ActiveRows | None = None
    pause: Pause | None = None
    _packing: Packing | None = None
    _level: Level | None = None
    _fused: set[Fused] = field(default_factory=set)
    _sequences: dict[tuple[int, int], Sequences] = field(default_factory=dict)

    @property
    def packing(self) -> Packing:
        """Packing of the rows that are computed."""
        assert self._packing is not None, "a patched model runs inside PatchedModel only"
        return self._packing

    @property
    def batch(self) -> Packing:
        """Packing of all rows of the batch, even while only some of them are computed."""
        return self.packing if self.rows is None else self.rows.tables.packing

    @property
    def level(self) -> Level:
        """The level of the leaf that ran last. Only convolutions and up-sampling change it.

        It cannot be derived from shapes: once every image is a single position, all deeper levels look the same.
        """
        return self.packing.levels[0] if self._level is None else self._level

    @level.setter
    def level(self, level: Level) -> None:
        self._level = level

    @property
    def num_tokens(self) -> int:
        """Number of image tokens that are computed at the present level."""
        return self.level.num_tokens if self.active is None else len(self.active.tokens(self.level.index))

    @property
    def num_padding(self) -> int:
        """Number of padding tokens among them, at the end."""
        if self.active is None:
            return self.level.num_padding
        return self.active.num_padding * self.active.tables.side(self.level.index) ** 2

    @property
    def row_of_patch(self) -> Tensor:
        """(P,) the row of each patch that is computed."""
        if self.active is not None:
            return self.active.row_index(self.level.index, self.packing.order == "image")
        return self.level.row_index

    @property
    def row_of_token(self) -> Tensor:
        """(tokens,) the row of each image token that is computed."""
        if self.active is not None:
            return self.active.row_index(self.level.index, True)
        return self.level.row_index.repeat_interleave(self.level.grain**2)

    @property
    def text(self) -> Tensor:
        """[rows, length, width], the embedded text of the rows that are computed."""
        text = self.batch_values.text
        assert text is not None, "a patched model runs inside PatchedModel only"
        return text if self.rows is None else text.index_select(0, self.rows.rows)

    @property
    def text_mask(self) -> Tensor:
        """(rows, length), the mask of the text of all rows of the batch."""
        mask = self.batch_values.text_mask
        assert mask is not None, "a patched model runs inside PatchedModel only"
        return mask

    def sequences(self, length: int) -> Sequences:
        """Return the sequences of a padded batch at this level, each with `length` text tokens; made once in a pass."""
        place = self.level.index, length
        if place not in self._sequences:
            self._sequences[place] = Sequences(self.level, length)
        return self._sequences[place]

    def turns(self, length: int, compute: Callable[[], Rotary]) -> Rotary:
        """Return the rotary angles of the computed tokens of a stream with `length` text tokens of each row.

        `compute` returns those of all tokens of the batch, and is called once for a batch.
        """
        known = self.batch_values.turns
        if length not in known:
            known[length] = compute()
        cosines, sines = known[length]
        some = self.rows or self.active
        if some is None:
            return cosines, sines
        places = some.stream(length).places
        return cosines.index_select(0, places), sines.index_select(0, places)

    def begin_stream(self, length: int) -> None:
        """Set the row of each token of a stream: first text, `length` tokens for each row, then images."""
        if self.rows is not None:
            self.stream_rows = self.rows.stream(length).rows
            return
        image = self.row_of_token
        own = torch.arange(self.packing.num_rows, device=image.device).repeat_interleave(length)
        self.stream_rows = torch.cat([own, image])

    def begin(self, packing: Packing, *, repeats: int = 1) -> None:
        """Start a batch with new values."""
        self._packing, self.batch_values = packing, BatchValues(repeats)

    def begin_pass(
        self, timesteps: Tensor | None = None, pause: Pause | None = None, *, level: Level | None = None
    ) -> None:
        """Start a forward pass at a level, by default that of the latents, and reset the state of a failed pass."""
        self.timesteps, self.pause, self._level = timesteps, pause, level
        self._fused.clear()
        self._sequences.clear()

    @contextmanager
    def reading(self, batch_values: BatchValues, tables: Tables | None) -> Iterator[None]:
        """Read the values of the batch and the tables of its packing from other memory until the context ends.

        None: the tables stay where they are.
        """
        before = self._packing, self.batch_values
        self._packing = self.packing if tables is None else self.packing.reading(tables)
        self.batch_values = batch_values
        try:
            yield
        finally:
            self._packing, self.batch_values = before
            self.pause = None

    def eagerly(self, run: Callable[..., Results], *inputs: Tensor) -> Results:
        """Run work that depends on the sizes in the batch. It runs again, with the sizes of that batch, in each replay.

        Args:
            run: computes from the inputs and from the packing, level, active cells and text bias of this context.
            inputs: tensors of the pass.
        """
        if self.pause is None:
            return run(*inputs)
        level, biases, num_inputs = self.level.index, (self.text_bias, self.biased_text), len(inputs)
        is_masked = self.active is not None
        given = [bias for bias in biases if bias is not None]

        def replayed(*tensors: Tensor) -> Results:
            before = self._level, self.active, self.text_bias, self.biased_text
            own = iter(tensors[num_inputs:])
            self._level, self.active = self.packing.levels[level], self.masked if is_masked else None
            self.text_bias, self.biased_text = (None if bias is None else next(own) for bias in biases)
            try:
                return run(*tensors[:num_inputs])
            finally:
                self._level, self.active, self.text_bias, self.biased_text = before

        return _interrupt(self.pause, replayed, (*inputs, *given))

    @contextmanager
    def restricted_to(self, rows: ActiveRows) -> Iterator[None]:
        """Restrict the leaves to some rows of the batch, as a batch of their own, until the context ends."""
        packing, level, text_bias, biased_text = self.packing, self.level.index, self.text_bias, self.biased_text
        own = rows.own.packing
        if text_bias is not None and len(text_bias) > 1:
            self.text_bias = text_bias.index_select(0, rows.rows)
        if biased_text is not None:
            self.biased_text = biased_text.index_select(0, rows.rows)
        self.rows, self._packing, self._level = rows, own, own.levels[level]
        try:
            yield
            level = self.level.index
        finally:
            self.rows, self._packing, self._level = None, packing, packing.levels[level]
            self.text_bias, self.biased_text = text_bias, biased_text

    @contextmanager
    def switch_batch(
        self, packing: Packing, batch_values: BatchValues, masked: ActiveSet | None = None
    ) -> Iterator[None]:
        """Switch to another batch, its values and the cells that its passes compute, until the context ends."""
        before = self._packing, self.batch_values, self.masked, self.text_bias, self.biased_text
        self._packing, self.batch_values, self.masked = packing, batch_values, masked
        self.text_bias = self.biased_text = None
        try:
            yield
        finally:
            self._packing, self.batch_values, self.masked, self.text_bias, self.biased_text = before

    def at(self, x: Tensor) -> Level:
        """Return the level of a leaf's input."""
        level = self.level
        assert x.shape[2] == level.side
        assert self.active is not None or x.shape[0] == level.num_patches
        return level

    def entries_of(self, x: Tensor) -> Entries:
        """Return the rows of the entries in the input of a layer, for adapters, which work on whole batches.

        The input is [rows, ...], patches or tokens of images at the present level, or tokens of a stream. If two of
        these have the same shape, there is one entry for each row, in order.

        Raises ValueError: the input has none of these shapes.
        """
        level, rows, shape = self.level, self.packing.num_rows, x.shape[:-1]
        assert self.active is None
        assert self.rows is None
        if shape[0] == rows:
            return Entries("rows", lambda: torch.arange(rows, device=x.device), are_tokens=False)
        if shape in ((level.num_tokens,), (1, level.num_tokens), (level.num_patches, level.grain**2)):
            return Entries(("tokens", level.index), lambda: self.row_of_token, are_tokens=True)
        stream = self.stream_rows
        if stream is not None and shape in ((len(stream),), (1, len(stream)), (len(stream), 1)):
            return Entries(("stream", len(stream)), lambda: stream, are_tokens=True)
        raise ValueError(f"an adapter's layer is given {tuple(x.shape)}, which is neither rows nor tokens of the batch")

    def record_fused(self, *work: Fused) -> None:
        """Record which work of the leaves after it a norm has done."""
        self._fused = set(work)

    def consume_fused(self, work: Fused) -> bool:
        """Return whether the norm before this leaf has done its work already, and clear this record."""
        is_done = work in self._fused
        self._fused.discard(work)
        return is_done


@torch.compiler.disable()
def _interrupt(pause: Pause, run: Callable[..., Results], inputs: tuple[Tensor, ...]) -> Results:
    """Interrupt a recording. Compiled blocks are cut in two here, as a graph of the compiler cannot be interrupted."""
    return pause(run, inputs)
