"""The denoise stage without patches: one forward pass of plain diffusers for each shape of requests."""

from collections.abc import Sequence

import torch

from ...data.errors import UsageError
from ..core.denoise_batch import DenoiseBatch, join_conditioning
from ..core.denoiser import Conditions
from ..core.failures import Failures, MemoryBound
from ..core.prepared import PreparedRequest, describe, work_of
from ..core.stepper import Tuning
from ..core.timing import finish_stream
from ..samplers.batched import BatchedSampler
from ..samplers.single import PerRequestSampler, SamplerState
from .batch import plain_batch
from .formats import PlainModels


class PlainStepper:
    """The exact, strong baseline: same-resolution batches of plain diffusers, with any of its schedulers.

    Args:
        models: the unmodified model in its memory formats.
        conditions: maps conditioning tensors to arguments of the model's forward.
        sampler: updates the requests of a batch together; None for a scheduler that `BatchedSampler` does not cover,
            which is then called for each request separately.
        alone: calls a request's own scheduler.

    Attributes:
        batch_failures: see `Stepper`.
    """

    name = "plain"
    forecast: tuple[()] = ()

    def __init__(
        self,
        models: PlainModels,
        conditions: Conditions,
        sampler: BatchedSampler | None,
        alone: PerRequestSampler,
    ) -> None:
        self.models = models
        self.conditions, self.sampler, self.alone = conditions, sampler, alone
        self.batch_failures, self._memory = Failures(), MemoryBound()
        self._batches: list[DenoiseBatch] = []
        self._stepped: list[DenoiseBatch] = []

    @property
    def recording_failure(self) -> str | None:
        """Reason why passes are not recorded although this is enabled, see `CapturedPasses`; None otherwise."""
        return None if self.models.captured is None else self.models.captured.failure

    def tune(self, target: Tuning) -> None:
        """Measure the memory formats, or read earlier measurements."""
        self.models.tune(target, self.conditions)

    def check(self, state: SamplerState, size: tuple[int, int]) -> None:
        """Accept every schedule of diffusers, at any size."""

    def prepare(self, prepared: PreparedRequest) -> None:
        """Compute a request's coefficients outside the denoise loop."""
        prepared.latents = prepared.latents.float()
        if self.sampler is not None:
            try:
                self.sampler.table(prepared.state)
            except UsageError:
                if prepared.state.plan is not None:
                    raise
                # A schedule without finite coefficients is left to its own scheduler.
                assert prepared.state.coefficients is None

    @torch.inference_mode()
    def step(self, active: Sequence[PreparedRequest]) -> dict[int, str]:
        """Take one denoising step of every active request: one forward pass per shape.

        Returns:
            The requests that failed, by id, with the reason. A failing forward pass is repeated in halves, so that
            only requests which fail alone are returned; the others have taken their step.
        """
        groups = self.groups_of(active)
        self._dissolve([batch for batch in self._batches if not any(map(batch.holds, groups))])
        failures: dict[int, str] = {}
        for group in groups:
            self._step_or_halves(group, failures)
        # The only waits for the device in an iteration, after all of its work was launched. They make measured step
        # times honest, and after them no kernel of this step still reads tensors that other threads are about to use.
        left, self._stepped = [], self._batches.copy()
        for batch in self._batches:
            failed = batch.failures()
            if failed or any(prepared.state.is_finished for prepared in batch.requests):
                left.append(batch)
            failures |= failed
        self._dissolve(left)
        if left:
            # Finished requests go to the decoder, which works on another stream.
            finish_stream(left[0].latents.device)
        return failures

    def close(self) -> None:
        """Do nothing: there are no resources to release."""

    @torch.inference_mode()
    def peek(self, prepared: PreparedRequest) -> torch.Tensor | None:
        """Return the clean latents predicted by the last step of a request in its batch; None for other requests."""
        batch = next((batch for batch in self._stepped if batch.has(prepared)), None)
        return None if batch is None else batch.x0_of(prepared)

    def _step_or_halves(self, group: Sequence[PreparedRequest], failures: dict[int, str]) -> None:
        """Step a group of one shape together; if this fails, or does not fit into memory, step it in halves."""
        halves = group[: len(group) // 2], group[len(group) // 2 :]
        if len(group) > 1 and self._memory.excludes(work_of(group)):
            for half in halves:
                self._step_or_halves(half, failures)
            return
        batch = next((batch for batch in self._batches if batch.holds(group)), None)
        try:
            if batch is None:
                batch = self.batch_of(group, self._sampler_of(group))
                self._batches.append(batch)
            batch.step()
            return
        except Exception as error:  # noqa: BLE001  one failing request must not take down the others
            reason = describe("denoising", error)
            self._memory.note(error, work_of(group))
        if batch is not None:
            self._dissolve([batch])
        if len(group) == 1:
            failures[group[0].request.request_id] = reason
            return
        self.batch_failures.note(reason)
        for half in halves:
            self._step_or_halves(half, failures)

    def groups_of(self, active: Sequence[PreparedRequest]) -> list[list[PreparedRequest]]:
        """Return groups of requests that take their steps together."""
        return [group for each in group_by_shape(active) for group in _by_sampler(each)]

    def batch_of(self, group: Sequence[PreparedRequest], sampler: BatchedSampler | PerRequestSampler) -> DenoiseBatch:
        """Batch requests of one shape, to be stepped until one of them leaves or another joins."""
        return plain_batch(self.models, self.conditions(join_conditioning(group)), group, sampler)

    def _sampler_of(self, group: Sequence[PreparedRequest]) -> BatchedSampler | PerRequestSampler:
        known = None if group[0].state.coefficients is None else self.sampler
        return known or self.alone

    def _dissolve(self, batches: Sequence[DenoiseBatch]) -> None:
        """Dissolve these batches, and return the latents to their requests."""
        for batch in batches:
            batch.unpack()
            self._batches.remove(batch)


def _by_sampler(group: list[PreparedRequest]) -> list[list[PreparedRequest]]:
    """Split requests into those with coefficients and those without, whose schedulers count their own steps."""
    parts = [[each for each in group if (each.state.coefficients is None) == is_alone] for is_alone in (False, True)]
    return [part for part in parts if part]


def group_by_shape(active: Sequence[PreparedRequest]) -> list[list[PreparedRequest]]:
    """Group requests by the sizes of their images and references, both in order of first appearance."""
    groups: dict[object, list[PreparedRequest]] = {}
    for prepared in active:
        groups.setdefault(prepared.shape, []).append(prepared)
    return list(groups.values())
