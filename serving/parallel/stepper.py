"""The denoise stage on several devices: every batch of one resolution in strips, otherwise as plain diffusers does."""

from collections.abc import Sequence
from itertools import count

import torch
from torch import Tensor

from ..core.denoise_batch import DenoiseBatch, join_conditioning
from ..core.denoiser import Conditions
from ..core.prepared import PreparedRequest
from ..core.stepper import Tuning
from ..plain.batch import whole_batch
from ..plain.formats import PlainModels
from ..plain.stepper import PlainStepper
from ..samplers.batched import BatchedSampler
from ..samplers.single import PerRequestSampler, SamplerState
from .exchange import RowName
from .strip_model import flat
from .virtual import VirtualRanks


class ParallelStepper(PlainStepper):
    """Samplers, latents and text are rank 0's; the model runs on all ranks. Exact: every rank waits for the others.

    Args:
        virtual: the ranks.
        models: the unmodified model.
        conditions, sampler, alone: see `PlainStepper`.
    """

    name = "parallel"

    def __init__(
        self,
        virtual: VirtualRanks,
        models: PlainModels,
        conditions: Conditions,
        sampler: BatchedSampler | None,
        alone: PerRequestSampler,
    ) -> None:
        super().__init__(models, conditions, sampler, alone)
        self._virtual, self._keys = virtual, count()

    def tune(self, target: Tuning) -> None:
        """There is one memory format."""

    def check(self, state: SamplerState, size: tuple[int, int]) -> None:
        """Raise UsageError where an image is too low to be shared by all ranks."""
        self._virtual.ranks.check(size[0])

    def prepare(self, prepared: PreparedRequest) -> None:
        """See `PlainStepper.prepare`."""
        super().prepare(prepared)
        prepared.key = next(self._keys)

    def step(self, active: Sequence[PreparedRequest]) -> dict[int, str]:
        """See `PlainStepper.step`."""
        with self._virtual.end, torch.inference_mode():
            self._virtual.ranks.keep([row for prepared in active for row in rows_of(prepared)])
            return super().step(active)

    def batch_of(self, group: Sequence[PreparedRequest], sampler: BatchedSampler | PerRequestSampler) -> DenoiseBatch:
        """See `PlainStepper.batch_of`."""
        ranks, rows = self._virtual.ranks, [row for prepared in group for row in rows_of(prepared)]
        ranks.learn(rows, flat(self.conditions(join_conditioning(group))))

        def predict(latents: Tensor, timesteps: Tensor) -> Tensor:
            is_last = [each.state.num_steps - each.state.steps_done <= 1 for each in group for _ in rows_of(each)]
            return ranks.predict(rows, latents, timesteps, is_last)

        return whole_batch(predict, group, sampler, self.models.dtype)

    def close(self) -> None:
        """End the other ranks."""
        self._virtual.close()


def rows_of(prepared: PreparedRequest) -> list[RowName]:
    """The rows that a request takes in a call."""
    return [(prepared.key, row) for row in range(prepared.num_rows)]
