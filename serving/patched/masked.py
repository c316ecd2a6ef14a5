"""Passes over a part of an image, the rest of which was seen before: InstGenIE's masked editing (section 3.1).

A whole pass over a template is recorded: what every operator with context has read of each cell (inputs of 3 x 3
convolutions, sums for GroupNorm, keys and values of attention to the image). A masked pass then computes only some
cells of other requests for the same image, and reads the rest from the record of the same step: no operator runs on all
tokens. Records that hold less leave more to compute, and where loads are slow passes may begin with all tokens: see
`spans`.
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
from ..core.prepared import Seen
from ..layout.packing import Packing, pack_rows
from .leaves import PatchedConv, PatchedGroupNorm
from .patched_model import PatchedModel
from .spans import spans_of
from .text import Shorten
from .unet_layers import place_of

PassInputs = tuple[Tensor, Tensor, dict[str, Any]]
"""Tokens, timesteps and conditions, see `MaskedPasses.record`."""
_PATIENCE = 1
"""Passes of a batch that run eagerly before one is recorded, behind the first: batches of edits stay for long."""


class MaskedPasses:
    """Records passes of a patched model, and runs masked ones.

    Args:
        model: is only used in one thread at a time.
        keep: what is recorded and read. Whatever it is, a masked pass over the recorded input is the whole pass.

    Attributes:
        keep: see above.
        freezes_norms: GroupNorm has the statistics of the recorded pass, as in SIGE (Li et al. 2022), in batches that
            begin from now on.
        units: of records (`data.templates.unit_of`), in the order in which passes read them.
        parts: of a pass, in their order, each of which reads these units or computes all tokens, as a plan has it.
            Without `Span`s there is one part, the whole pass.
        returns: whether a part may compute all tokens after one that has not; else what it would need is not recorded.
        cell: side of a cell in latent pixels: the smallest that keeps its shape on all levels.
        starts: the blocks that `parts` begin with; none where that is the pass itself.
        shorten, dtype, device: of the model.
        failure: why passes are not recorded and played back, though that is asked for, see `CapturedPasses`.
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
        kept = {
            name: buffer
            for name, (module, buffer) in read.items()
            if keep == "all" or (keep == "kv" and not isinstance(module, PatchedConv | PatchedGroupNorm))
        }
        self._kept = kept | {span.name: span.outputs for span in self._spans if not span.is_open}
        """Of what records hold, by name."""
        self.units = tuple(dict.fromkeys(map(unit_of, sorted(self._kept, key=place_of))))
        self.parts = tuple(span.units for span in self._spans) or (self.units,)
        self.starts = [span.first for span in self._spans]
        self.returns = not all(span.is_open for span in self._spans)
        self._buffers = [buffer for _, buffer in read.values()] + [span.outputs for span in self._spans]
        self.failure: str | None = None

    def pack(self, sizes: list[tuple[int, int]]) -> Packing:
        """Where rows with these latent sizes, sorted by resolution, lie: token by token, whatever the model's order."""
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
        """Rows that take steps together.

        Args:
            packing: from `pack`.
            repeats: as of `PatchedModel.begin`.
            active: for each row which of its cells are computed, line by line; None to record whole passes.
            reuses: of each of `parts`, whether it reads its units; None: all do.
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
        played = None if graphs is None else _Playback(graphs.recorder)
        return MaskedRows(tables, chosen, tuple(reuses), units, {"repeats": repeats}, played)

    def record(
        self, rows: "MaskedRows", tokens: Tensor, timesteps: Tensor, conditions: dict[str, Any]
    ) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """Run whole, and return the prediction, and what operators have seen of each row, on the model's device.

        Args:
            rows: without active cells.
            tokens: [P, channels, unit, unit], in the model's dtype.
            timesteps: (rows,).
            conditions: as of `PatchedModel`.
        """
        context, tables = self._model.context, rows.tables
        try:
            with ExitStack() as meanwhile:
                meanwhile.enter_context(context.elsewhere(tables.packing, rows.kept))
                for span in self._spans:
                    if not span.is_open:
                        meanwhile.enter_context(span.recorded())
                context.cells = tables
                predicted = self._model.forward(tokens, timesteps, conditions, rows.kept)
            kept = {name: seen for name, buffer in self._kept.items() if (seen := buffer.taken()) is not None}
        finally:
            context.cells = None
            self._clear()
        starts = tables.row_start.tolist()
        of_rows = [{name: seen[start:end].clone() for name, seen in kept.items()} for start, end in pairwise(starts)]
        return predicted, of_rows

    def run(
        self,
        rows: "MaskedRows",
        seen: Sequence[Seen],
        tokens: Tensor,
        timesteps: Tensor,
        conditions: dict[str, Any],
    ) -> Tensor:
        """Predict for the active cells; elsewhere the result is 0. Parts of the pass that do not reuse compute all.

        Args:
            rows: with active cells in each.
            seen: of each row, what was recorded of its step, on the model's device; asked for when it is needed.
            tokens, timesteps, conditions: as of `record`.
        """
        inputs = tokens, timesteps, conditions
        if rows.played is None:
            return self._run(rows, seen, inputs, rows.kept)
        predicted = rows.played.run(partial(self._run, rows), seen, inputs, rows.kept)
        self.failure = self.failure or rows.played.captured.failure
        return predicted

    def _run(self, rows: "MaskedRows", seen: Sequence[Seen], inputs: PassInputs, kept: dict[Any, Any]) -> Tensor:
        tokens, timesteps, conditions = inputs
        context, active = self._model.context, rows.active
        assert active is not None, "rows without active cells are only recorded"
        for name, buffer in self._kept.items():
            buffer.put(lambda name=name: [each[name] for each in seen])
        places = active.tokens(0)
        try:
            with ExitStack() as meanwhile:
                meanwhile.enter_context(context.elsewhere(rows.tables.packing, kept))
                entered = [span for span, is_reused in zip(self._spans, rows.reuses, strict=False) if is_reused]
                if rows.reuses[0] and not self.returns:
                    context.active = active
                    tokens = tokens.index_select(0, places)
                else:
                    for span in entered if self.returns else entered[:1]:
                        meanwhile.enter_context(span.masked(active))
                predicted = self._model.forward(tokens, timesteps, conditions, kept)
                own = predicted if context.active is not None else predicted.index_select(0, places)
        finally:
            context.active = None
            self._clear()
        return own.new_zeros(rows.tables.packing.levels[0].num_tokens, *own.shape[1:]).index_copy_(0, places, own)

    def _clear(self) -> None:
        for buffer in self._buffers:
            buffer.clear()


class _Playback:
    """Passes over one batch, the first of which run eagerly; then one is recorded, and played back.

    Attributes:
        captured: the recorded passes. They hold what is read of records, and go with the batch, whose tables they read.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.captured = CapturedPasses(recorder, _PATIENCE)
        self._batch = PassBatch()
        self._names: tuple[str, ...] | None = None

    def run(
        self,
        run: Callable[[Sequence[Seen], PassInputs, dict[Any, Any]], Tensor],
        seen: Sequence[Seen],
        inputs: PassInputs,
        kept: dict[Any, Any],
    ) -> Tensor:
        """Do a pass; `run` does one, given what it reads, its inputs and what the batch keeps."""
        # Edits of one image at one step read the same, and go on doing so.
        distinct = list({id(each): each for each in seen}.values())
        places = tuple(next(place for place, own in enumerate(distinct) if own is each) for each in seen)
        if self._names is not None:
            distinct = [{name: each[name] for name in self._names} for each in distinct]
        predicted = self.captured.run(
            self._batch,
            places,
            kept,
            lambda given, kept: run([given["seen"][place] for place in places], given["inputs"], kept),
            {"seen": tuple(distinct), "inputs": inputs},
        )
        # What the first pass has asked for is what all of them read.
        self._names = self._names or tuple(seen[0])
        return predicted


@dataclass(frozen=True, slots=True, eq=False)
class MaskedRows:
    """Rows of a batch between two changes of it.

    Attributes:
        tables: of their cells.
        active: the cells that are computed; None for all.
        reuses: see `MaskedPasses.batch`.
        units: of records that are read.
        kept: what stays the same while the batch does.
        played: records its passes and plays them back; None: all run eagerly.
    """

    tables: CellTables
    active: ActiveSet | None
    reuses: tuple[bool, ...]
    units: tuple[str, ...]
    kept: dict[Any, Any]
    played: _Playback | None
