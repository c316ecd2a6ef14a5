"""Batches of edits that read records of templates, and batches of requests whose passes are recorded."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ...data.edits import active_cells
from ...data.work import Work
from ..cache.rules import Booleans
from ..core.denoise_batch import DenoiseBatch
from ..core.denoiser import Conditions, of_rows
from ..core.prepared import PreparedRequest, Template
from ..layout.packing import Packing
from ..layout.patch_layout import by_size
from ..samplers.batched import BatchedSampler
from .masked import MaskedPasses, MaskedRows, PassInputs
from .text import TEXT_MULTIPLE, conditions_of


class PassPlan(Protocol):
    """Plan of the passes over a batch.

    Attributes:
        reuses: for each of `MaskedPasses.parts`, whether it reads its units.
        latency_s: expected latency of each of consecutive passes.
    """

    @property
    def reuses(self) -> Sequence[bool]: ...

    @property
    def latency_s(self) -> float: ...


class PassPlanner(Protocol):
    """Decides which parts of the passes over a batch read records."""

    def plan(self, rows: Sequence[Work], num_cells: int) -> PassPlan:
        """Return the plan of a batch.

        Args:
            rows: computed work of each row.
            num_cells: number of loaded cells; rows that read the same cells count once.
        """
        ...


class _SeparatePasses(ABC):
    """Requests that take passes of their own kind, sorted by size.

    Attributes:
        denoise_batch: the batch of latents.
        forecast: always empty; see `stepper.PackedBatch`.
        reusing: the requests for which a step reads a part instead of computing it.
        is_recorded: whether its passes are recorded and replayed.
    """

    forecast: frozenset[int] = frozenset()
    reusing: Sequence[PreparedRequest] = ()
    is_recorded = False

    def __init__(
        self,
        passes: MaskedPasses,
        conditions: Conditions,
        sampler: BatchedSampler,
        active: Sequence[PreparedRequest],
    ) -> None:
        self._passes = passes
        self._batch = sorted(active, key=lambda prepared: by_size(prepared.size))
        rows = [each.size for each in self._batch for _ in range(each.num_rows)]
        self._packing = passes.pack([each.size for each in self._batch], is_recorded=self.is_recorded)
        row_packing = passes.pack(rows, is_recorded=self.is_recorded, is_padded=self.is_recorded)
        multiple = TEXT_MULTIPLE if self.is_recorded else 1
        named, repeats = conditions_of(self._batch, conditions, shorten=passes.shorten, multiple=multiple)
        self._conditions = of_rows(named, row_packing.value_rows) if self.is_recorded else named
        self._rows = self._begin(row_packing, repeats)
        self.denoise_batch = DenoiseBatch(
            self._batch, self._packing, row_packing, sampler, self._predict, dtype=passes.dtype
        )

    @abstractmethod
    def _begin(self, row_packing: Packing, repeats: int) -> MaskedRows:
        """Return the rows of the batch."""

    @abstractmethod
    def _predict(self, tokens: Tensor, timesteps: Tensor) -> Tensor:
        """Predict for the rows of the batch, as `DenoiseBatch` requires."""


class MaskedBatch(_SeparatePasses):
    """Edits of any templates, masks, sizes and steps.

    Args:
        passes: passes of the model.
        conditions: maps conditioning tensors to arguments of the model's forward.
        sampler: updates the requests together.
        active: the edits.
        planner: decides which parts of passes read records; None if all do.

    Attributes:
        plan: plan of the batch; None without a planner.
    """

    def __init__(
        self,
        passes: MaskedPasses,
        conditions: Conditions,
        sampler: BatchedSampler,
        active: Sequence[PreparedRequest],
        planner: PassPlanner | None,
    ) -> None:
        self._planner = planner
        # The parts that a plan reads differ from batch to batch.
        self.is_recorded = planner is None and passes.captured is not None
        self.plan: PassPlan | None = None
        super().__init__(passes, conditions, sampler, active)
        self.reusing = self._batch

    def _begin(self, row_packing: Packing, repeats: int) -> MaskedRows:
        cells = [cells_of(each, self._passes.cell) for each in self._batch]
        rows = [(own, each) for own, each in zip(cells, self._batch, strict=True) for _ in range(each.num_rows)]
        if self._planner is not None:
            works = [Work(*each.request.resolution, float(own.mean())) for own, each in rows]
            loaded = {
                place: len(own) * each.num_rows
                for place, own, each in zip(self._places(), cells, self._batch, strict=True)
            }
            self.plan = self._planner.plan(works, sum(loaded.values()))
        reuses = None if self.plan is None else self.plan.reuses
        active = [own for own, _ in rows]
        return self._passes.batch(row_packing, repeats=repeats, active=active, reuses=reuses)

    def _predict(self, tokens: Tensor, timesteps: Tensor) -> Tensor:
        units, places = self._rows.units, self._places()
        # Edits of one image at the same step read the same tensors.
        rows = {(template, step): template.read_rows(step, units) for template, step in dict.fromkeys(places)}
        for template, step in rows:
            template.expect(step + 1, units)
        seen = [row for place in places for row in rows[place]]
        return self._passes.run(self._rows, seen, tokens, timesteps, self._conditions)

    def _places(self) -> list[tuple[Template, int]]:
        """Return the record of each edit, and the step of the record that comes next."""
        places = []
        for each in self._batch:
            assert each.template is not None, "only edits have templates"
            places.append((each.template, each.state.first + each.state.steps_done))
        return places


class RecordedBatch(_SeparatePasses):
    """Generations of any sizes and steps whose passes are all recorded, see `core.prepared.OnPass`."""

    def _begin(self, row_packing: Packing, repeats: int) -> MaskedRows:
        return self._passes.batch(row_packing, repeats=repeats)

    def _predict(self, tokens: Tensor, timesteps: Tensor) -> Tensor:
        predicted, rows = self._passes.record(self._rows, tokens, timesteps, self._conditions)
        seen, latents = iter(rows), self.denoise_batch.latents
        for index, each in enumerate(self._batch):
            assert each.on_pass is not None
            own = [next(seen) for _ in range(each.num_rows)]
            each.on_pass(each.state.steps_done, self._packing.unpack(latents, index)[None], own)
        return predicted


def cells_of(prepared: PreparedRequest, cell: int) -> Booleans:
    """Return which cells of an edit's image are computed, (cells,)."""
    edit, known = prepared.request.edit, prepared.known_area
    assert edit is not None, "only edits have templates"
    assert known is not None, "as above"
    return active_cells(known.is_touched, cell, edit.dilate).reshape(-1)


def record(
    passes: MaskedPasses, conditions: Conditions, sampler: BatchedSampler, steps: Sequence[PreparedRequest]
) -> list[list[dict[str, Tensor]]]:
    """Run whole passes over the latents of requests of one size, each at its own step.

    Returns:
        The recorded tensors of each row of each request, by operator name.
    """
    row_packing, repeats, inputs = inputs_of(passes, conditions, sampler, steps)
    seen = iter(passes.record(passes.batch(row_packing, repeats=repeats), *inputs)[1])
    return [[next(seen) for _ in range(each.num_rows)] for each in steps]


def inputs_of(
    passes: MaskedPasses, conditions: Conditions, sampler: BatchedSampler, steps: Sequence[PreparedRequest]
) -> tuple[Packing, int, PassInputs]:
    """Return the inputs of passes over requests of one size.

    Returns:
        The packing of their rows, the number of times that the last text token counts, and the inputs.
    """
    packing = passes.pack([each.size for each in steps])
    row_packing = passes.pack([size for each in steps for size in [each.size] * each.num_rows])
    named, repeats = conditions_of(steps, conditions, shorten=passes.shorten)
    denoise_batch = DenoiseBatch(steps, packing, row_packing, sampler, _never, dtype=passes.dtype)
    return row_packing, repeats, (*denoise_batch.inputs(), named)


def _never(tokens: Tensor, timesteps: Tensor) -> Tensor:
    raise AssertionError("nothing is predicted where passes are recorded")
