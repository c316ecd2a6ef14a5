"""The denoise stage on several devices: images in strips on all ranks, or each whole on one rank."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ..core.adapters import adapters_of_rows
from ..core.denoise_batch import DenoiseBatch, join_conditioning
from ..core.denoiser import Conditions
from ..core.kept import load_or_measure
from ..core.prepared import PreparedRequest
from ..core.stepper import Tuning
from ..core.timing import medians_us
from ..layout.packing import Packing, pack_rows
from ..layout.patch_layout import by_size
from ..plain.batch import whole_batch
from ..plain.formats import PlainModels
from ..plain.stepper import PlainStepper
from ..samplers.batched import BatchedSampler
from ..samplers.single import PerRequestSampler, SamplerState
from .choice import ModeChoice, choose
from .exchange import RowName
from .group import GroupError, RankError
from .latency_model import ParallelLatency
from .options import ParallelOptions
from .plan import CallTimes, CallTimeTable, in_strips
from .ranks import Ranks
from .recovery import RankGroup, call_with_recovery
from .strip_model import flat


class ParallelStepper(PlainStepper):
    """Runs the model on all ranks; samplers, latents and text stay on rank 0.

    In a step, images that are drawn whole come first, all resolutions together; then each resolution that is drawn in
    strips.

    When a rank is lost, its work is repeated on the remaining ranks. An error on a rank fails only the requests that
    it occurs for.

    Args:
        group: group of ranks.
        options: options of the ranks.
        models: unmodified model, with which rank 0 draws when it is alone.
        conditions, sampler, alone: as in `PlainStepper`.
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
        self._times: CallTimeTable | None = None
        self._whole: set[int] = set()

    @property
    def recording_failure(self) -> str | None:
        """As in `PlainStepper`, also of strips."""
        return self.group.ranks.recording_failure or super().recording_failure

    def tune(self, target: Tuning) -> None:
        """Tune as `PlainStepper` for images that one rank draws. In `auto` mode, also choose whether calls are
        displaced; with `--parallel-from auto`, measure how long images take whole and in strips.
        """
        ranks = self.group.ranks
        if any(not ranks.draws_whole(*size) and ranks.count_for(*size) == 1 for size in target.sizes):
            super().tune(target)
        if self._options.divides_by_time:
            folder, circumstances = target.folder, target.circumstances(self.models) | self._options.identity()
            self._times = CallTimeTable(
                load_or_measure(folder, "strips", circumstances, CallTimes, lambda: self._measure(target))
            )
            self._use(ModeChoice("sync", "--parallel-from auto"))
        elif self._options.mode == "auto":
            self._use(self._choose(target))

    def _use(self, choice: ModeChoice) -> None:
        self._reason, self._options = choice.reason, replace(self._options, mode=choice.mode)
        with self.group.end:
            self.group.use(self._options)

    @torch.inference_mode()
    def _measure(self, target: Tuning) -> list[CallTimes]:
        """Measure the first step of a request of each size, on one rank and on all ranks in strips."""
        found = {}
        for prepared in target.examples():
            size = prepared.size
            ranks, rows = self.group.ranks, rows_of(prepared)
            latents = prepared.latents.to(self.models.dtype).expand(len(rows), -1, -1, -1)
            timesteps = prepared.state.timesteps[:1].expand(len(rows))
            with self.group.end:
                ranks.learn(rows, flat(self.conditions(prepared.conditioning)))
                runs: dict[str, Callable[[], object]] = {
                    "whole": partial(ranks.draw_alone, rows, list(latents), timesteps)
                }
                if ranks.count_for(*size) > 1:
                    runs["strips"] = partial(ranks.predict, rows, latents, timesteps)
                taken = medians_us(runs, self.models.device)
                ranks.retain(())
            found[size] = CallTimes(*size, len(rows), taken["whole"], taken.get("strips"))
        return list(found.values())

    @torch.inference_mode()
    def _choose(self, target: Tuning) -> ModeChoice:
        """Choose the mode from the largest of the sizes."""
        device, ranks = self.models.device, self.group.ranks
        if self._options.is_virtual:
            return ModeChoice("sync", "virtual ranks run one at a time")
        if device.type == "cpu":
            return ModeChoice("sync", "ranks share the processors of one machine, so that communication hides nothing")
        example = max(target.examples(), key=lambda prepared: prepared.latents[0].numel())
        batch = super().batch_of([example], self.sampler or self.alone)
        alone_s = medians_us({"step": batch.step}, device)["step"] / 1e6
        with self.group.end:
            link = ranks.measure_link(device)
        height, width = example.size
        num_bytes = ranks.received_bytes(height, width, example.num_rows)
        return choose(ParallelLatency(0.0, alone_s, link), ranks.size, num_bytes)

    def check(self, state: SamplerState, size: tuple[int, int]) -> None:
        """Raise UsageError if an image is drawn in strips but is too low to be shared by all ranks."""
        if not self._options.divides_by_time and not self.group.ranks.draws_whole(*size):
            self.group.ranks.count_for(*size)

    def prepare(self, prepared: PreparedRequest) -> None:
        """Prepare a request as `PlainStepper` does, and give it a key that names its rows."""
        super().prepare(prepared)
        prepared.key = next(self._keys)

    def step(self, active: Sequence[PreparedRequest]) -> dict[int, str]:
        """Take a step as `PlainStepper` does, after the ranks have discarded requests that are no longer active."""
        with self.group.end, torch.inference_mode():
            rows = [row for prepared in active for row in rows_of(prepared)]
            # A group that has recovered from a failure keeps nothing, and no active request is the cause.
            with suppress(GroupError, RankError):
                call_with_recovery(self.group, lambda ranks: ranks.retain(rows))
            return super().step(active)

    def groups_of(self, active: Sequence[PreparedRequest]) -> list[list[PreparedRequest]]:
        """Group requests into batches: those drawn whole, then those in strips as `PlainStepper` groups them.

        What a displaced request reads must not depend on the requests that share its calls.
        """
        whole, before = self._whole_of(active), self._whole
        self._whole = {prepared.key for prepared in whole}
        # A request that changes between whole and strips needs another batch.
        moved = before ^ self._whole
        self._dissolve([batch for batch in self._batches if any(each.key in moved for each in batch.requests)])
        shared = [prepared for prepared in active if prepared.key not in self._whole]
        groups = [
            [each for each in whole if each.state.coefficients is not None],
            [each for each in whole if each.state.coefficients is None],
            *(part for group in super().groups_of(shared) for part in self._by_guidance(group)),
        ]
        return [group for group in groups if group]

    def _whole_of(self, active: Sequence[PreparedRequest]) -> list[PreparedRequest]:
        """Return the requests that are each drawn whole by one rank in this step; none if there is only one rank."""
        ranks = self.group.ranks
        if ranks.size == 1:
            return []
        sizes = [prepared.size for prepared in active]
        if self._times is None:
            return [prepared for prepared, size in zip(active, sizes, strict=True) if ranks.draws_whole(*size)]
        works = [self._times.work(*size, each.num_rows) for each, size in zip(active, sizes, strict=True)]
        shared = in_strips(works, ranks.speeds)
        return [prepared for prepared, is_shared in zip(active, shared, strict=True) if not is_shared]

    def batch_of(self, group: Sequence[PreparedRequest], sampler: BatchedSampler | PerRequestSampler) -> DenoiseBatch:
        """Create the batch of a group of requests, whose model calls run on the ranks."""
        if all(prepared.key in self._whole for prepared in group):
            return self._whole_batch(group, sampler)
        if self.group.ranks.count_for(*group[0].size) == 1:
            return super().batch_of(group, sampler)
        rows, adapters = [row for prepared in group for row in rows_of(prepared)], adapters_of_rows(group)
        conditions = flat(self.conditions(join_conditioning(group)))

        def predict(latents: Tensor, timesteps: Tensor) -> Tensor:
            ending = {
                row for each in group if each.state.num_steps - each.state.steps_done <= 1 for row in rows_of(each)
            }

            def call(ranks: Ranks) -> Tensor:
                ranks.learn(rows, conditions, adapters)
                return ranks.predict(rows, latents, timesteps, ending)

            return call_with_recovery(self.group, call)

        return whole_batch(predict, group, sampler, self.models.dtype)

    def _whole_batch(
        self, group: Sequence[PreparedRequest], sampler: BatchedSampler | PerRequestSampler
    ) -> DenoiseBatch:
        """Create the batch of requests of any resolution, each row of which one rank draws whole."""
        batch = sorted(group, key=lambda prepared: by_size(prepared.size))
        rows, adapters = [row for prepared in batch for row in rows_of(prepared)], adapters_of_rows(batch)
        conditions = flat(self.conditions(join_conditioning(batch)))
        counts = [prepared.num_rows for prepared in batch]
        packing, row_packing = _packing(batch, [1] * len(batch)), _packing(batch, counts)

        def predict(patches: Tensor, timesteps: Tensor) -> Tensor:
            images = [row_packing.unpack(patches, row) for row in range(len(rows))]

            def call(ranks: Ranks) -> list[Tensor]:
                ranks.learn(rows, conditions, adapters)
                return ranks.draw(rows, images, timesteps)

            return row_packing.pack(call_with_recovery(self.group, call))

        return DenoiseBatch(batch, packing, row_packing, sampler, predict, dtype=self.models.dtype)

    def facts(self) -> dict[str, Any]:
        """Return the facts about the ranks for a summary."""
        ranks = self.group.ranks
        return {
            "ranks": self._options.ranks,
            "ranks_left": ranks.size,
            "mode": ranks.mode,
            "reason": self._reason,
            "gn": self._options.norms.mode,
            "from": self._options.from_pixels,
            "losses": list(self.group.losses),
            **({} if self._times is None else {"gains": self._times.gains(ranks.latent_factor)}),
        }

    def close(self) -> None:
        """End the other ranks."""
        self.group.close()

    def _by_guidance(self, group: list[PreparedRequest]) -> list[list[PreparedRequest]]:
        """Separate requests with two rows in a call from those with one, if each half of the ranks may take one row."""
        ranks, size = self.group.ranks, group[0].size
        if self._options.mode != "displaced" or not ranks.splits_guidance(*size):
            return [group]
        return [[each for each in group if each.num_rows == num_rows] for num_rows in (2, 1)]


def rows_of(prepared: PreparedRequest) -> list[RowName]:
    """Return the names of a request's rows in a call."""
    return [(prepared.key, row) for row in range(prepared.num_rows)]


def _packing(batch: Sequence[PreparedRequest], counts: Sequence[int]) -> Packing:
    """Return the packing for these numbers of rows of each request."""
    sizes = [prepared.size for prepared, count in zip(batch, counts, strict=True) for _ in range(count)]
    device = batch[0].latents.device
    return pack_rows(sizes, order="image", patch_size=None, num_levels=1, unit=1, device=device)
