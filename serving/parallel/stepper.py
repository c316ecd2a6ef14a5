"""The denoise stage on several devices: every batch of one resolution in strips, otherwise as plain diffusers does."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ..core.denoise_batch import DenoiseBatch, join_conditioning
from ..core.denoiser import Conditions
from ..core.prepared import PreparedRequest
from ..core.stepper import Tuning
from ..core.timing import medians_us
from ..plain.batch import whole_batch
from ..plain.formats import PlainModels
from ..plain.stepper import PlainStepper
from ..samplers.batched import BatchedSampler
from ..samplers.single import PerRequestSampler, SamplerState
from .choice import Choice, choose
from .exchange import RowName
from .group import GroupError, RankError
from .latency_model import ParallelLatency
from .options import ParallelOptions
from .ranks import Ranks
from .recovery import RankGroup, persist
from .strip_model import flat


class ParallelStepper(PlainStepper):
    """Samplers, latents and text are rank 0's; the model runs on all ranks.

    A rank that goes is done without: what it was asked for starts again with those that are left. What fails on a rank
    fails the requests alone that it fails for.

    Args:
        group: the ranks.
        options: theirs.
        models: the unmodified model, for images that are drawn by one rank.
        conditions, sampler, alone: see `PlainStepper`.
    """

    name = "parallel"

    def __init__(
        self,
        group: RankGroup,
        options: ParallelOptions,
        models: PlainModels,
        conditions: Conditions,
        sampler: BatchedSampler | None,
        alone: PerRequestSampler,
    ) -> None:
        super().__init__(models, conditions, sampler, alone)
        self.group, self._options, self._keys = group, options, count()
        self._reason = "as asked for"

    def tune(self, target: Tuning) -> None:
        """See `PlainStepper.tune`, for images that are drawn by one rank; and choose whether calls are displaced."""
        if any(self.group.ranks.count_for(*size) == 1 for size in target.sizes):
            super().tune(target)
        if self._options.mode == "auto":
            choice = self._choose(target)
            self._reason, self._options = choice.reason, replace(self._options, mode=choice.mode)
            with self.group.end:
                self.group.use(self._options)

    @torch.inference_mode()
    def _choose(self, target: Tuning) -> Choice:
        """By the largest of the sizes."""
        device, ranks = self.models.device, self.group.ranks
        if self._options.is_virtual:
            return Choice("sync", "virtual ranks run one at a time")
        if device.type == "cpu":
            return Choice("sync", "ranks share the processors of one machine, so that communication hides nothing")
        example = max(target.examples(), key=lambda prepared: prepared.latents[0].numel())
        batch = super().batch_of([example], self.sampler or self.alone)
        alone_s = medians_us({"step": batch.step}, device)["step"] / 1e6
        with self.group.end:
            link = ranks.measure_link(device)
        height, width = example.latents.shape[2:]
        num_bytes = ranks.received_bytes(height, width, example.num_rows)
        return choose(ParallelLatency(0.0, alone_s, link), ranks.size, num_bytes)

    def check(self, state: SamplerState, size: tuple[int, int]) -> None:
        """Raise UsageError where an image is too low to be shared by all ranks."""
        self.group.ranks.count_for(*size)

    def prepare(self, prepared: PreparedRequest) -> None:
        """See `PlainStepper.prepare`."""
        super().prepare(prepared)
        prepared.key = next(self._keys)

    def step(self, active: Sequence[PreparedRequest]) -> dict[int, str]:
        """See `PlainStepper.step`."""
        with self.group.end, torch.inference_mode():
            rows = [row for prepared in active for row in rows_of(prepared)]
            # A group that stands again after a failure keeps nothing, and no request of now is to blame.
            with suppress(GroupError, RankError):
                persist(self.group, lambda ranks: ranks.keep(rows))
            return super().step(active)

    def groups_of(self, active: Sequence[PreparedRequest]) -> list[list[PreparedRequest]]:
        """See `PlainStepper`; what a displaced request reads must not depend on who shares its calls."""
        return [part for group in super().groups_of(active) for part in self._by_guidance(group) if part]

    def batch_of(self, group: Sequence[PreparedRequest], sampler: BatchedSampler | PerRequestSampler) -> DenoiseBatch:
        """See `PlainStepper.batch_of`."""
        if self.group.ranks.count_for(*group[0].latents.shape[2:]) == 1:
            return super().batch_of(group, sampler)
        rows = [row for prepared in group for row in rows_of(prepared)]
        conditions = flat(self.conditions(join_conditioning(group)))

        def predict(latents: Tensor, timesteps: Tensor) -> Tensor:
            ending = {
                row for each in group if each.state.num_steps - each.state.steps_done <= 1 for row in rows_of(each)
            }

            def ask(ranks: Ranks) -> Tensor:
                ranks.learn(rows, conditions)
                return ranks.predict(rows, latents, timesteps, ending)

            return persist(self.group, ask)

        return whole_batch(predict, group, sampler, self.models.dtype)

    def facts(self) -> dict[str, Any]:
        """What a summary says of the ranks."""
        ranks = self.group.ranks
        return {
            "ranks": self._options.ranks,
            "ranks_left": ranks.size,
            "mode": ranks.mode,
            "reason": self._reason,
            "gn": self._options.norms.mode,
            "losses": list(self.group.losses),
        }

    def close(self) -> None:
        """End the other ranks."""
        self.group.close()

    def _by_guidance(self, group: list[PreparedRequest]) -> list[list[PreparedRequest]]:
        """Requests whose calls have two rows, and those with one, if half of the ranks may take one row each."""
        ranks, size = self.group.ranks, group[0].latents.shape[2:]
        if self._options.mode != "displaced" or not ranks.splits_guidance(*size):
            return [group]
        return [[each for each in group if each.num_rows == num_rows] for num_rows in (2, 1)]


def rows_of(prepared: PreparedRequest) -> list[RowName]:
    """The rows that a request takes in a call."""
    return [(prepared.key, row) for row in range(prepared.num_rows)]
