"""Passes over a part of an image, with the rest read from a record: InstGenIE's masked editing (section 3.1).

A whole pass over a template is recorded: for each cell, the input of every operator with context (inputs of 3 x 3
convolutions, sums for GroupNorm, keys and values of attention to the image). A masked pass then computes only some
cells of other requests for the same image, and reads the rest from the record of the same step; no operator runs on all
tokens. Smaller records leave more to compute, and passes may begin with all tokens if loads are slow: see `spans`.

With `--cuda-graphs` a masked pass is recorded and replayed as whole passes are. It depends on a bucket: the numbers of
patches, rows and active cells are padded, the tables of cells and the tensors of records are data in buffers that stay
where they are, and attention runs by resolution between the segments. So it serves any edits in the bucket.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...data.templates import Keep, unit_of
from ..cache.active import ActiveSet
from ..cache.cells import CellTables
from ..cache.rules import Booleans
from ..cache.slots import NormSlots, TokenSlots
from ..core.captured import CapturedPasses, PassBatch, Pause, Stacked
from ..core.prepared import RecordedRow
from ..layout.bucket import Bucket, rounded_up
from ..layout.device_tables import Tables
from ..layout.packing import Packing, pack_rows
from .context import BatchValues
from .leaves import PatchedConv, PatchedGroupNorm
from .patched_model import PatchedModel
from .spans import spans_of
from .text import Shorten
from .unet_layers import place_of

PassInputs = tuple[Tensor, Tensor, dict[str, Any]]
"""Tokens, timesteps and conditions, see `MaskedPasses.record`."""


class MaskedPasses:
    """Records passes of a patched model, and runs masked ones.

    Args:
        model: the patched model, used by one thread at a time.
        keep: which tensors are recorded and read. With any choice, a masked pass over the recorded input gives the
            result of the whole pass.

    Attributes:
        keep: see above.
        freezes_norms: whether GroupNorm uses the statistics of the recorded pass, as in SIGE (Li et al. 2022); applies
            to batches that begin later.
        units: units of records (`data.templates.unit_of`), in the order in which passes read them.
        parts: units of each part of a pass, in order. A plan decides for each part whether it reads its units or
            computes all tokens. Without `Span`s the whole pass is one part.
        returns: whether a part may compute all tokens after one that has not; otherwise its input is not recorded.
        cell: side of a cell in latent pixels: the smallest that keeps its shape on all levels.
        starts: first blocks of `parts`; empty if the whole pass is one part.
        shorten, dtype, device: attributes of the model.
    """

    def __init__(self, model: PatchedModel, keep: Keep = "all") -> None:
        self._model = model
        self.keep: Keep = keep
        self.freezes_norms = False
        self.shorten: Shorten = model.shorten
        self.dtype, self.device = model.dtype, model.device
        self.cell = model.unit << (model.num_levels - 1)
        found = {name: (module, getattr(module, "slots", None)) for name, module in model.model.named_modules()}
        read = {
            name: (module, slots.buffer)
            for name, (module, slots) in found.items()
            if isinstance(slots, TokenSlots | NormSlots) and not getattr(module, "is_pointwise", False)
        }
        self._spans = spans_of(model, keep, sorted(read, key=place_of))
        stored = {
            name: buffer
            for name, (module, buffer) in read.items()
            if keep == "all" or (keep == "kv" and not isinstance(module, PatchedConv | PatchedGroupNorm))
        }
        self._record_buffers = stored | {span.name: span.outputs for span in self._spans if not span.is_open}
        """Buffers that a record stores, by operator name."""
        self.units = tuple(dict.fromkeys(map(unit_of, sorted(self._record_buffers, key=place_of))))
        self.parts = tuple(span.units for span in self._spans) or (self.units,)
        self.starts = [span.first for span in self._spans]
        self.returns = not all(span.is_open for span in self._spans)
        self._buffers = [buffer for _, buffer in read.values()] + [span.outputs for span in self._spans]
        self._captured: CapturedPasses | None = None
        self._names: tuple[str, ...] = ()
        """Recorded tensors that a pass reads; known after the first one."""

    @property
    def captured(self) -> CapturedPasses | None:
        """Passes that are recorded and replayed, if those of the model are."""
        models = self._model.captured
        if models is None:
            return None
        if self._captured is None or self._captured.recorder is not models.recorder:
            self._captured = models.for_others()
        return self._captured

    def pack(self, sizes: list[tuple[int, int]], *, is_recorded: bool = False, is_padded: bool = False) -> Packing:
        """Return the packing of rows with these latent sizes, sorted by resolution.

        Args:
            sizes: (height, width) of each row, multiples of `cell`.
            is_recorded: whether passes over it are recorded and replayed; then in `patch` order, otherwise in `image`
                order. A patch is a cell, or as large as possible if parts of a pass compute all tokens.
            is_padded: whether to pad it to its bucket.
        """
        model = self._model
        return pack_rows(
            sizes,
            order="patch" if is_recorded else "image",
            patch_size=model.common_patch_size(sizes) if self.returns else self.cell,
            num_levels=model.num_levels,
            unit=model.unit,
            device=model.device,
            kernels=model.context.kernels,
            is_padded=is_padded,
            bucket_of=Bucket.with_spare if self.returns else Bucket.of_memory,
            largest=self._model.largest_served,
        )

    def batch(
        self,
        packing: Packing,
        *,
        repeats: int,
        active: Sequence[Booleans] | None = None,
        reuses: Sequence[bool] | None = None,
    ) -> "MaskedRows":
        """Return the rows of a batch, which take steps together.

        Args:
            packing: result of `pack`.
            repeats: number of times that the last text token counts, as in `PatchedModel.begin`.
            active: for each row, which of its cells are computed, line by line; None to record whole passes.
            reuses: for each of `parts`, whether it reads its units; None if all do, as they must in a padded packing.
        """
        num_cells = packing.levels[0].num_tokens // (self.cell // self._model.unit) ** 2
        tables = CellTables(packing, self.cell, self._model.unit, np.arange(num_cells) + 1, range(packing.num_rows))
        chosen, is_padded = None, packing.bucket is not None
        if active is not None:
            cells = np.flatnonzero(np.concatenate(active))
            padding = rounded_up(len(cells)) - len(cells) if is_padded else 0
            chosen = ActiveSet(tables, cells, freezes_norms=self.freezes_norms, num_padding=padding)
        assert not is_padded or reuses is None, "recorded passes follow no plan"
        reuses = [True] * len(self.parts) if reuses is None else reuses
        assert self.returns or list(reuses) == sorted(reuses), "what computing all tokens again needs is not recorded"
        units = tuple(unit for part, is_reused in zip(self.parts, reuses, strict=True) if is_reused for unit in part)
        return MaskedRows(tables, chosen, tuple(reuses), units, BatchValues(repeats), PassBatch())

    def record(
        self, rows: "MaskedRows", tokens: Tensor, timesteps: Tensor, conditions: dict[str, Any]
    ) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """Run a whole pass; return the prediction and the recorded tensors of each row, on the model's device.

        Args:
            rows: rows without active cells.
            tokens: [P, channels, unit, unit], in the model's dtype.
            timesteps: (rows,).
            conditions: conditions of `PatchedModel`.
        """
        context, tables = self._model.context, rows.tables
        try:
            with ExitStack() as meanwhile:
                meanwhile.enter_context(context.switch_batch(tables.packing, rows.batch_values))
                for span in self._spans:
                    if not span.is_open:
                        meanwhile.enter_context(span.recorded())
                context.cells = tables
                predicted = self._model.forward(tokens, timesteps, conditions, rows.batch_values)
            recorded = {
                name: values
                for name, buffer in self._record_buffers.items()
                if (values := buffer.take_values()) is not None
            }
        finally:
            context.cells = None
            self._clear()
        starts = tables.row_start.tolist()
        of_rows = [
            {name: values[start:end].clone() for name, values in recorded.items()} for start, end in pairwise(starts)
        ]
        return predicted, of_rows

    def run(
        self,
        rows: "MaskedRows",
        recorded: Sequence[RecordedRow],
        tokens: Tensor,
        timesteps: Tensor,
        conditions: dict[str, Any],
    ) -> Tensor:
        """Predict for the active cells; other cells of the result are 0. Parts that do not reuse compute all tokens.

        Args:
            rows: rows with active cells in each.
            recorded: recorded tensors of each row at its step, on the model's device; accessed when they are needed.
            tokens, timesteps, conditions: arguments of `record`.
        """
        active, packing, context = rows.active, rows.tables.packing, self._model.context
        assert active is not None, "rows without active cells are only recorded"
        inputs: dict[str, Any] = {"tokens": tokens, "timesteps": timesteps, "conditions": conditions}
        num_slots = rows.tables.num_cells + 1

        def stacked(name: str) -> Stacked:
            return Stacked([each[name] for each in recorded], 1, num_slots)

        with context.switch_batch(packing, rows.batch_values, active):
            captured = self.captured
            if captured is None or packing.bucket is None or not self._names:
                predicted = self._run(
                    rows, active, lambda name: stacked(name).tensor(), **inputs, batch_values=rows.batch_values
                )
                if packing.bucket is not None:
                    self._names = tuple(recorded[0])
                return predicted
            if not rows.passes.is_complete:
                self._model.compute_values(conditions)
                rows.passes.is_complete = True

            def forward(given: dict[str, Any], values: tuple[BatchValues, Any], pause: Pause | None) -> Tensor:
                batch_values, tensors = values
                others = {name: each for name, each in given.items() if name != "recorded"}
                read = partial(_tensor_of, given["recorded"])
                return self._run(rows, active.reading(tensors), read, **others, batch_values=batch_values, pause=pause)

            key = packing.bucket, packing.layout.patch_size, len(active), active.freezes_norms, rows.batch_values.key
            inputs["recorded"] = {name: stacked(name) for name in self._names}
            inputs["tables"] = packing.tables
            return captured.run(rows.passes, key, (rows.batch_values, active.tensors), forward, inputs)

    def _run(
        self,
        rows: "MaskedRows",
        active: ActiveSet,
        read: Callable[[str], Tensor],
        tokens: Tensor,
        timesteps: Tensor,
        conditions: dict[str, Any],
        batch_values: BatchValues,
        tables: Tables | None = None,
        pause: Pause | None = None,
    ) -> Tensor:
        """Run a pass in the state of the context; `read` returns recorded tensors as `SlotBuffer.put` requires."""
        context, model = self._model.context, self._model
        for name, buffer in self._record_buffers.items():
            buffer.put(partial(read, name))
        places, (_, channels, side, _) = active.tokens(0), tokens.shape
        try:
            with ExitStack() as meanwhile:
                entered = [span for span, is_reused in zip(self._spans, rows.reuses, strict=False) if is_reused]
                if rows.reuses[0] and not self.returns:
                    context.active = active
                    own = model.to_tokens(tokens).index_select(0, places)
                    tokens = model.from_tokens(own, torch.Size((-1, channels, side, side)))
                else:
                    for span in entered if self.returns else entered[:1]:
                        meanwhile.enter_context(span.masked(active))
                predicted = model.forward(tokens, timesteps, conditions, batch_values, tables=tables, pause=pause)
                own = model.to_tokens(predicted)
                if context.active is None:
                    own = own.index_select(0, places)
        finally:
            context.active = None
            self._clear()
        everything = own.new_zeros(rows.tables.packing.levels[0].num_tokens, own.shape[1]).index_copy_(0, places, own)
        return model.from_tokens(everything, torch.Size((-1, predicted.shape[1], side, side)))

    def _clear(self) -> None:
        for buffer in self._buffers:
            buffer.clear()


def _tensor_of(recorded: dict[str, Tensor | Stacked], name: str) -> Tensor:
    found = recorded[name]
    return found.tensor() if isinstance(found, Stacked) else found


@dataclass(frozen=True, slots=True, eq=False)
class MaskedRows:
    """Rows of a batch between two changes of it.

    Attributes:
        tables: tables of their cells.
        active: the cells that are computed; None for all.
        reuses: for each part of a pass, whether it reads its units.
        units: units of records that are read.
        batch_values: values of the batch.
        passes: their passes, for recorded ones.
    """

    tables: CellTables
    active: ActiveSet | None
    reuses: tuple[bool, ...]
    units: tuple[str, ...]
    batch_values: BatchValues
    passes: PassBatch
