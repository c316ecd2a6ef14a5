"""Edits that read the records of templates, between two changes of their set; and the making of records."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from ...data.edits import active_cells, latent_mask
from ..cache.rules import Booleans
from ..core.denoise_batch import DenoiseBatch
from ..core.denoiser import Conditions
from ..core.prepared import PreparedRequest
from ..layout.patch_layout import by_size
from ..samplers.batched import BatchedSampler
from .masked import MaskedPasses, Seen
from .text import conditions_of


class _OwnPasses(ABC):
    """Requests that take passes of their own kind, by size.

    Attributes:
        together: the batch itself.
        forecast: nothing; see `stepper.PackedBatch`.
    """

    forecast: frozenset[int] = frozenset()

    def __init__(
        self,
        passes: MaskedPasses,
        conditions: Conditions,
        sampler: BatchedSampler,
        active: Sequence[PreparedRequest],
    ) -> None:
        self._passes, self._batch = passes, sorted(active, key=lambda prepared: by_size(prepared.size))
        self._packing = passes.pack([prepared.size for prepared in self._batch])
        row_packing = passes.pack([size for each in self._batch for size in [each.size] * each.num_rows])
        self._conditions, repeats = conditions_of(self._batch, conditions, shorten=passes.shorten)
        self._rows = passes.batch(row_packing, repeats=repeats, active=self._active())
        self.together = DenoiseBatch(
            self._batch, self._packing, row_packing, sampler, self._predict, dtype=passes.dtype
        )

    def _active(self) -> list[Booleans] | None:
        """Of each row, which cells are computed; None: all."""
        return None

    @abstractmethod
    def _predict(self, tokens: Tensor, timesteps: Tensor) -> Tensor:
        """See `DenoiseBatch`."""


class MaskedBatch(_OwnPasses):
    """Edits of any templates, masks, sizes and steps."""

    def _active(self) -> list[Booleans]:
        cells = [cells_of(each, self._passes.cell) for each in self._batch]
        return [own for own, each in zip(cells, self._batch, strict=True) for _ in range(each.num_rows)]

    def _predict(self, tokens: Tensor, timesteps: Tensor) -> Tensor:
        seen: list[Seen] = []
        # Edits of one image at one step read the same.
        known: dict[tuple[int, int], Sequence[Seen]] = {}
        for each in self._batch:
            assert each.template is not None
            step = each.state.first + each.state.steps_done
            place = id(each.template), step
            if place not in known:
                known[place] = each.template.seen(step)
            seen += known[place]
        return self._passes.run(self._rows, seen, tokens, timesteps, self._conditions)


class RecordedBatch(_OwnPasses):
    """Generations of any sizes and steps each pass of which is recorded, see `core.prepared.OnPass`."""

    def _predict(self, tokens: Tensor, timesteps: Tensor) -> Tensor:
        predicted, rows = self._passes.record(self._rows, tokens, timesteps, self._conditions)
        seen, latents = iter(rows), self.together.latents
        for index, each in enumerate(self._batch):
            assert each.on_pass is not None
            own = [next(seen) for _ in range(each.num_rows)]
            each.on_pass(each.state.steps_done, self._packing.unpack(latents, index)[None], own)
        return predicted


def cells_of(prepared: PreparedRequest, cell: int) -> Booleans:
    """(cells,) of the image of an edit, those that are computed."""
    edit, (height, _) = prepared.request.edit, prepared.size
    assert edit is not None, "only edits have templates"
    return active_cells(latent_mask(edit.mask, len(edit.mask) // height), cell, edit.dilate).reshape(-1)


def record(
    passes: MaskedPasses, conditions: Conditions, sampler: BatchedSampler, steps: Sequence[PreparedRequest]
) -> list[list[dict[str, Tensor]]]:
    """Run whole passes over the latents of requests of one size, each at its own step, and return of each, and of each
    of its rows, what operators have seen.
    """
    packing = passes.pack([each.size for each in steps])
    row_packing = passes.pack([size for each in steps for size in [each.size] * each.num_rows])
    named, repeats = conditions_of(steps, conditions, shorten=passes.shorten)
    rows = passes.batch(row_packing, repeats=repeats)
    together = DenoiseBatch(steps, packing, row_packing, sampler, _never, dtype=passes.dtype)
    seen = iter(passes.record(rows, *together.inputs(), named)[1])
    return [[next(seen) for _ in range(each.num_rows)] for each in steps]


def _never(tokens: Tensor, timesteps: Tensor) -> Tensor:
    raise AssertionError("nothing is predicted where passes are recorded")
