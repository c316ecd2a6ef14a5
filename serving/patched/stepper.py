"""The denoise stage of the patch engine: all active requests in one batch, whatever their resolutions and progress.

The latents of the active requests stay in one packed tensor from step to step. They are packed anew only when a request
joins or leaves (PatchedServe section 4.1: the layout changes with the active set, not with the step). Edits that read a
template's record form a separate batch, because they need different passes; so do generations that are recorded.
"""

import time
from collections.abc import Callable, Sequence
from copy import copy
from itertools import count

import torch
from torch import Tensor

from ...data.templates import Keep
from ..cache.patch_batch import CachedRequest
from ..core.adapters import RowAdapters, adapters_of_rows
from ..core.denoise_batch import DenoiseBatch
from ..core.denoiser import Conditions
from ..core.failures import Failures, MemoryBound
from ..core.prepared import PreparedRequest, describe, work_of
from ..core.stepper import Tuning
from ..core.timing import finish_stream
from ..layout.bucket import batches_by_bucket
from ..layout.patch_layout import by_size
from ..plain.batch import plain_batch
from ..plain.formats import PlainModels
from ..samplers.batched import BatchedSampler
from ..samplers.single import PerRequestSampler, SamplerState
from .masked import MaskedPasses
from .masked_batch import MaskedBatch, PassPlan, PassPlanner, RecordedBatch, record
from .part_times import MeasuredPass, Stage, part_times
from .patched_model import PatchedModel
from .text import TEXT_MULTIPLE, conditions_of, count_tokens
from .tuning import strategy_table

_START_S = 30.0
"""Longest time that recording passes may take at the start; buckets that are left are recorded when they recur."""


class PatchedStepper:
    """Advances all active requests by one denoising step, on a patched model or the unmodified one (`plain`).

    Attributes:
        masked: passes of edits that read records.
        planner: decides which parts of these passes read records; None if all do.
        batch: batch of the last step, unless a request has finished or failed; without recorded requests and edits that
            read records.
        batch_failures: steps of whole batches that failed, even if all requests then took them in smaller batches.
        forecast: ids of the requests that took the last step without the model, by forecast.
    """

    name = "patched"

    def __init__(
        self,
        model: PatchedModel,
        plain: PlainModels,
        conditions: Conditions,
        sampler: BatchedSampler | PerRequestSampler,
    ) -> None:
        self.model, self.plain, self.conditions, self.sampler = model, plain, conditions, sampler
        self.masked = MaskedPasses(model)
        self.planner: PassPlanner | None = None
        self._keys = count()
        self.batch_failures = Failures()
        self.forecast: set[int] = set()
        self._whole = _Lane(self, lambda active, may_be_plain: PackedBatch(self, active, may_be_plain=may_be_plain))
        self._recorded = _Lane(
            self, lambda active, _: RecordedBatch(self.masked, self.conditions, self._batched, active)
        )
        self._edits = _Lane(
            self, lambda active, _: MaskedBatch(self.masked, self.conditions, self._batched, active, self.planner)
        )
        self._stepped: list[DenoiseBatch] = []

    @property
    def _batched(self) -> BatchedSampler:
        assert isinstance(self.sampler, BatchedSampler), "records are read and made by batched samplers only"
        return self.sampler

    @property
    def recording_failure(self) -> str | None:
        """Reason why passes are not recorded although this is enabled, see `CapturedPasses`; None otherwise."""
        found = (self.model.captured, self.masked.captured)
        return next((each.failure for each in found if each is not None and each.failure is not None), None)

    def use_keep(self, keep: Keep) -> None:
        """Set which tensors records hold from now on, for recording and reading. Raises UsageError: as `spans_of`."""
        self.masked, self.planner = MaskedPasses(self.model, keep), None

    def part_times(self, target: Tuning, stage: Stage) -> list[MeasuredPass]:
        """Return the measured times of the parts of masked passes, see `part_times`."""
        return part_times(self.masked, self.conditions, self._batched, target, stage)

    @property
    def plan(self) -> PassPlan | None:
        """Plan of the edits of the last step; None without a planner, or if an edit has finished or failed."""
        batch = self._edits.batch
        return batch.plan if isinstance(batch, MaskedBatch) else None

    @property
    def batch(self) -> "PackedBatch | None":
        batch = self._whole.batch
        assert batch is None or isinstance(batch, PackedBatch)
        return batch

    def tune(self, target: Tuning) -> None:
        """Measure the strategies of convolutions, and the memory format for batches of one resolution.

        With a fixed strategy nothing is measured, so that images do not depend on timings.
        """
        model, sizes = self.model, target.sizes
        if model.cache is not None:
            model.cache.check_sizes(sizes)
        model.use_sizes(sizes)
        model.pack(sorted(sizes, key=by_size))  # refuses a patch size that does not fit
        if model.is_tuned:
            model.use_table(strategy_table(model, target))
            if not model.always_packs:
                self.plain.tune(target, self.conditions)
        if target.max_batch_size and model.is_padded:
            self._record_passes(target)

    @torch.inference_mode()
    def _record_passes(self, target: Tuning) -> None:
        """Record a pass for each bucket of batches of the target's sizes, the largest first, while memory is left."""
        model, captured, start_s = self.model, self.model.captured, time.perf_counter()
        assert captured is not None
        examples = sorted(target.examples(), key=lambda prepared: by_size(prepared.size))
        layout = model.pack([prepared.size for prepared in examples]).layout
        patches = [height * width // layout.patch_size**2 for height, width in layout.resolutions]
        buckets = batches_by_bucket(patches, examples[0].num_rows, target.max_batch_size)
        for number, counts in enumerate(buckets.values()):
            target.on_progress("recording", number, len(buckets))
            if captured.failure or captured.is_full or time.perf_counter() - start_s > _START_S:
                break
            batch = [copy(example) for example, count in zip(examples, counts, strict=True) for _ in range(count)]
            for prepared in batch:
                prepared.key = next(self._keys)
            with captured.at_once():
                PackedBatch(self, batch, may_be_plain=False).predict()
        if model.cache is not None:
            model.cache.clear()

    def check(self, state: SamplerState, size: tuple[int, int]) -> None:
        """Raise UsageError if a batched schedule has a step without finite coefficients, or the size does not fit.

        A size fits if it can be cut into patches and into cells of the cache.
        """
        if isinstance(self.sampler, BatchedSampler):
            self.sampler.table(state)
        self.model.check_size(size)
        if self.model.cache is not None:
            self.model.cache.check_sizes([size])

    def prepare(self, prepared: PreparedRequest) -> None:
        """Compute a request's coefficients outside the denoise loop."""
        if isinstance(self.sampler, BatchedSampler):
            self.sampler.table(prepared.state)
        prepared.latents = prepared.latents.float()
        count_tokens(prepared, self.model.shorten)
        prepared.key = next(self._keys)

    @torch.inference_mode()
    def record(self, steps: Sequence[PreparedRequest]) -> list[list[dict[str, Tensor]]]:
        """Run whole passes over requests of one size; return the recorded tensors of each row of each request."""
        return record(self.masked, self.conditions, self._batched, steps)

    @torch.inference_mode()
    def step(self, active: Sequence[PreparedRequest]) -> dict[int, str]:
        """Take one step of every active request.

        Returns:
            The requests that failed, by id, with the reason. A failing batch is repeated in halves, and these in
            halves, so that only requests which fail alone are returned; the others have taken their step.
        """
        self.forecast.clear()
        self._stepped.clear()
        failures: dict[int, str] = {}
        lanes = [self._lane_of(prepared) for prepared in active]
        # An edit may move from the first lane to the last, never back.
        for lane in (self._whole, self._recorded, self._edits):
            own = [prepared for prepared, its in zip(active, lanes, strict=True) if its is lane]
            if own:
                failures |= lane.step(own)
            else:
                lane.dissolve()
        return failures

    def _lane_of(self, prepared: PreparedRequest) -> "_Lane":
        if prepared.is_masked:
            return self._edits
        return self._whole if prepared.on_pass is None else self._recorded

    def note_step(self, batch: "AnyBatch") -> None:
        """Record that a batch has taken its step."""
        self.forecast |= batch.forecast
        for prepared in batch.reusing:
            prepared.steps_reused += 1
        self._stepped.append(batch.denoise_batch)

    def close(self) -> None:
        """Do nothing: there are no resources to release."""

    @torch.inference_mode()
    def peek(self, prepared: PreparedRequest) -> Tensor | None:
        """Return the clean latents predicted by the last step of a request in its batch; None for other requests."""
        batch = next((batch for batch in self._stepped if batch.has(prepared)), None)
        return None if batch is None else batch.x0_of(prepared)


class _Lane:
    """Requests of one kind, which take their steps in one batch.

    Attributes:
        batch: batch of the last step; None if one of its requests has finished or failed.
    """

    def __init__(
        self,
        stepper: PatchedStepper,
        make: "Callable[[Sequence[PreparedRequest], bool], AnyBatch]",
    ) -> None:
        self._stepper, self._make, self._memory = stepper, make, MemoryBound()
        self.batch: AnyBatch | None = None

    def step(self, active: Sequence[PreparedRequest], *, may_be_plain: bool = True) -> dict[int, str]:
        """Take one step of these requests, in halves if the batch fails or does not fit into memory; return failures as
        `PatchedStepper.step`.
        """
        failures: dict[int, str] = {}
        halves = active[: len(active) // 2], active[len(active) // 2 :]
        if len(active) > 1 and self._memory.excludes(work_of(active)):
            for half in halves:
                failures |= self.step(half, may_be_plain=may_be_plain)
            return failures
        try:
            return self._step_together(active, may_be_plain)
        except Exception as error:  # noqa: BLE001  one failing request must not take down the others
            reason = describe("denoising", error)
            self._memory.note(error, work_of(active))
        self.dissolve(has_failed=True)
        if len(active) == 1:
            return {active[0].request.request_id: reason}
        self._stepper.batch_failures.note(reason)
        for half in halves:
            # Not with the plain model, which would hide failures of every batch with patches.
            failures |= self.step(half, may_be_plain=False)
            self.dissolve(has_failed=True)
        return failures

    def _step_together(self, active: Sequence[PreparedRequest], may_be_plain: bool) -> dict[int, str]:
        batch = self.batch
        if batch is None or not batch.denoise_batch.holds(active):
            self.dissolve()
            batch = self.batch = self._make(active, may_be_plain)
        batch.denoise_batch.step()
        self._stepper.note_step(batch)
        failures = batch.denoise_batch.failures()
        if failures or any(prepared.state.is_finished for prepared in active):
            self.dissolve()
            # Finished requests go to the decoder, which works on another stream.
            finish_stream(self._stepper.model.device)
        return failures

    def dissolve(self, *, has_failed: bool = False) -> None:
        """Dissolve the current batch, and return the latents to its requests."""
        model = self._stepper.model
        if has_failed and model.cache is not None:
            # A step that failed halfway has left some blocks at this step and the others at the last one.
            model.cache.clear()
        if self.batch is not None:
            self.batch.denoise_batch.unpack()
            self.batch = None


class PackedBatch:
    """The active requests between two changes of the active set, for the patched model or the unmodified one.

    Attributes:
        is_plain: whether the unmodified model takes the batch, because it has one shape.
        denoise_batch: the batch of latents.
    """

    def __init__(self, stepper: PatchedStepper, active: Sequence[PreparedRequest], *, may_be_plain: bool) -> None:
        self._model = model = stepper.model
        self._batch = batch = sorted(active, key=lambda prepared: by_size(*prepared.shape))
        sizes = [prepared.size for prepared in batch]
        multiple = TEXT_MULTIPLE if model.is_padded else 1
        self._conditions, repeats = conditions_of(batch, stepper.conditions, shorten=model.shorten, multiple=multiple)
        # A batch of one shape needs no patches: plain diffusers is as fast, unless equal text tokens are merged.
        shapes = {prepared.shape for prepared in batch}
        self.is_plain = may_be_plain and len(shapes) == 1 and repeats == 1 and not model.always_packs
        if self.is_plain:
            self.denoise_batch = plain_batch(stepper.plain, self._conditions, batch, stepper.sampler)
            return
        rows, references = zip(*(prepared.shape for prepared in batch for _ in range(prepared.num_rows)), strict=True)
        # With the cache, the computed rows of each step are padded.
        row_packing = model.pack(rows, references, is_padded=model.cache is None)
        self._conditions = model.pad_conditions(self._conditions, row_packing)
        known = [
            CachedRequest(
                each.key,
                each.num_rows,
                each.state.num_steps,
                each.request.resolution.pixels,
                is_exact=not each.request.cache,
            )
            for each in batch
        ]
        model.begin(row_packing, repeats=repeats, requests=known)
        # Recorded passes do the same work whichever row has an adapter or a control.
        options = {"for_all": model.captured is not None}
        adapters = RowAdapters.of(adapters_of_rows(batch), model.device, model.context.entries_of, **options)
        if adapters is not None:
            model.context.batch_values.adapters = adapters.of_rows(row_packing.value_rows)
        model.context.batch_values.controls = model.nets.rows_of(batch, row_packing, self._conditions, **options)
        self.denoise_batch = DenoiseBatch(
            batch,
            model.pack(sizes, patch_size=row_packing.layout.patch_size),
            row_packing,
            stepper.sampler,
            self._predict,
            dtype=model.dtype,
        )

    @property
    def forecast(self) -> set[int]:
        """Ids of the requests that took the last step without the model."""
        reused = None if self.is_plain else self._model.reused
        return set() if reused is None else {self._batch[index].request.request_id for index in reused.nonzero()[0]}

    @property
    def reusing(self) -> list[PreparedRequest]:
        """The requests for which the last step has reused anything."""
        return [] if self.is_plain else [self._batch[index] for index in self._model.reusing_requests]

    def predict(self) -> Tensor:
        """Run the pass of the next step, without taking the step."""
        return self._predict(*self.denoise_batch.inputs())

    def _predict(self, patches: Tensor, timesteps: Tensor) -> Tensor:
        done = [prepared.state.steps_done for prepared in self._batch]
        return self._model(patches, timesteps, steps_done=done, **self._conditions)


AnyBatch = PackedBatch | MaskedBatch | RecordedBatch
