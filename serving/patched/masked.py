"""Passes over a part of an image, with the rest read from a record: InstGenIE's masked editing (section 3.1).

A whole pass over a template is recorded: for each cell, the input of every operator with context (inputs of 3 x 3
convolutions, sums for GroupNorm, keys and values of attention to the image). A masked pass then computes only some
cells of other requests for the same image, and reads the rest from the record of the same step; no operator runs on all
tokens. Smaller records leave more to compute, and passes may begin with all tokens if loads are slow: see `spans`.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from ...data.templates import Keep, unit_of
from ..cache.active import ActiveSet
from ..cache.cells import CellTables
from ..cache.rules import Booleans
from ..cache.slots import NormSlots, TokenSlots
from ..core.captured import CapturedPasses, PassBatch, Recorder
from ..core.prepared import RecordedRow
from ..layout.packing import Packing, pack_rows
from .context import BatchValues
from .leaves import PatchedConv, PatchedGroupNorm
from .patched_model import PatchedModel
from .spans import spans_of
from .text import Shorten
from .unet_layers import place_of

PassInputs = tuple[Tensor, Tensor, dict[str, Any]]
"""Tokens, timesteps and conditions, see `MaskedPasses.record`."""
_PATIENCE = 1
"""Eager passes of a batch before one is recorded, not counting the first: batches of edits last long."""


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
        failure: reason why passes are not captured for replay although this is enabled, see `CapturedPasses`.
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
        self.failure: str | None = None

    def pack(self, sizes: list[tuple[int, int]]) -> Packing:
        """Return the packing of rows with these latent sizes, sorted by resolution, always in `image` order."""
        model = self._model
        return pack_rows(
            sizes,
            order="image",
            patch_size=None,
            num_levels=model.num_levels,
            unit=model.unit,
            device=model.device,
            kernels=model.context.kernels,
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
            reuses: for each of `parts`, whether it reads its units; None if all do.
        """
        slots = np.arange(1, 1 + sum(height * width // self.cell**2 for height, width in packing.sizes))
        tables = CellTables(packing, self.cell, self._model.unit, slots, range(packing.num_rows))
        chosen = None
        if active is not None:
            chosen = ActiveSet(tables, np.flatnonzero(np.concatenate(active)), freezes_norms=self.freezes_norms)
        reuses = [True] * len(self.parts) if reuses is None else reuses
        assert self.returns or list(reuses) == sorted(reuses), "what computing all tokens again needs is not recorded"
        units = tuple(unit for part, is_reused in zip(self.parts, reuses, strict=True) if is_reused for unit in part)
        graphs = None if chosen is None or self.failure is not None else self._model.captured
        playback = None if graphs is None else _PassPlayback(graphs.recorder)
        return MaskedRows(tables, chosen, tuple(reuses), units, BatchValues(repeats), playback)

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
        inputs = tokens, timesteps, conditions
        if rows.playback is None:
            return self._run(rows, recorded, inputs, rows.batch_values)
        predicted = rows.playback.run(partial(self._run, rows), recorded, inputs, rows.batch_values)
        self.failure = self.failure or rows.playback.captured.failure
        return predicted

    def _run(
        self, rows: "MaskedRows", recorded: Sequence[RecordedRow], inputs: PassInputs, batch_values: BatchValues
    ) -> Tensor:
        tokens, timesteps, conditions = inputs
        context, active = self._model.context, rows.active
        assert active is not None, "rows without active cells are only recorded"
        for name, buffer in self._record_buffers.items():
            buffer.put(lambda name=name: [each[name] for each in recorded])
        places = active.tokens(0)
        try:
            with ExitStack() as meanwhile:
                meanwhile.enter_context(context.switch_batch(rows.tables.packing, batch_values))
                entered = [span for span, is_reused in zip(self._spans, rows.reuses, strict=False) if is_reused]
                if rows.reuses[0] and not self.returns:
                    context.active = active
                    tokens = tokens.index_select(0, places)
                else:
                    for span in entered if self.returns else entered[:1]:
                        meanwhile.enter_context(span.masked(active))
                predicted = self._model.forward(tokens, timesteps, conditions, batch_values)
                own = predicted if context.active is not None else predicted.index_select(0, places)
        finally:
            context.active = None
            self._clear()
        return own.new_zeros(rows.tables.packing.levels[0].num_tokens, *own.shape[1:]).index_copy_(0, places, own)

    def _clear(self) -> None:
        for buffer in self._buffers:
            buffer.clear()


class _PassPlayback:
    """Passes over one batch: the first ones run eagerly, then one is captured and replayed.

    Attributes:
        captured: the captured passes. They hold tensors read from records, and live as long as the batch, whose tables
            they read.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.captured = CapturedPasses(recorder, _PATIENCE)
        self._batch = PassBatch()
        self._names: tuple[str, ...] | None = None

    def run(
        self,
        run: Callable[[Sequence[RecordedRow], PassInputs, BatchValues], Tensor],
        recorded: Sequence[RecordedRow],
        inputs: PassInputs,
        batch_values: BatchValues,
    ) -> Tensor:
        """Run a pass eagerly or by replay; `run` takes recorded tensors, inputs and the batch's values."""
        # Edits of one image at the same step read the same tensors, now and in later steps.
        distinct = list({id(each): each for each in recorded}.values())
        places = tuple(next(place for place, own in enumerate(distinct) if own is each) for each in recorded)
        if self._names is not None:
            distinct = [{name: each[name] for name in self._names} for each in distinct]
        predicted = self.captured.run(
            self._batch,
            places,
            batch_values,
            lambda given, values, _: run([given["recorded"][place] for place in places], given["inputs"], values),
            {"recorded": tuple(distinct), "inputs": inputs},
        )
        # All passes read the tensors that the first one has read.
        self._names = self._names or tuple(recorded[0])
        return predicted


@dataclass(frozen=True, slots=True, eq=False)
class MaskedRows:
    """Rows of a batch between two changes of it.

    Attributes:
        tables: tables of their cells.
        active: the cells that are computed; None for all.
        reuses: for each part of a pass, whether it reads its units.
        units: units of records that are read.
        batch_values: values of the batch.
        playback: captures and replays its passes; None if all run eagerly.
    """

    tables: CellTables
    active: ActiveSet | None
    reuses: tuple[bool, ...]
    units: tuple[str, ...]
    batch_values: BatchValues
    playback: _PassPlayback | None
