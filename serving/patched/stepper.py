"""The denoise stage of the patch engine: all active requests in one batch, whatever their resolutions and progress.

The latents of the active requests lie in one packed tensor and are advanced there from step to step. They are packed
anew only when a request joins or leaves (PatchedServe section 4.1: the layout changes with the active set, not with the
step).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from ..cache.patch_batch import CachedRequest
from ..core.denoiser import Conditions
from ..core.prepared import PreparedRequest, describe
from ..core.stepper import Tuning
from ..core.timing import finish_stream
from ..layout.packing import Packing, WholeImages
from ..layout.patch_layout import by_size
from ..plain.formats import PlainModels
from ..samplers.batched import BatchedSampler, SamplerBatch
from ..samplers.single import SamplerState
from .captured import RecordingError
from .patched_model import PatchedModel
from .tuning import circumstances_of, strategy_table


@dataclass(slots=True)
class BatchFailures:
    """How often a step of a whole batch has failed, and why the first time."""

    count: int = 0
    first: str | None = None

    def note(self, reason: str) -> None:
        """Count one more."""
        self.count += 1
        self.first = self.first or reason


class PatchedStepper:
    """Advances all active requests by one denoising step, on a patched model or the unmodified one (`plain`).

    Attributes:
        batch: the requests of the last step, unless one has finished or failed.
        batch_failures: steps of whole batches that failed, even if all requests then took them in smaller ones.
    """

    name = "patched"

    def __init__(
        self, model: PatchedModel, plain: PlainModels, conditions: Conditions, sampler: BatchedSampler
    ) -> None:
        self.model, self.plain, self.conditions, self.sampler = model, plain, conditions, sampler
        self.batch: PackedBatch | None = None
        self._cache_keys = count()
        self.batch_failures = BatchFailures()

    def tune(self, target: Tuning) -> None:
        """Measure the strategies of convolutions, and the memory format for batches of one resolution.

        Where a strategy is given, nothing is measured: then images do not depend on timings.
        """
        model, sizes, fingerprint = self.model, target.sizes, target.fingerprint
        if model.cache is not None:
            model.cache.check_sizes(sizes)
        model.pack(sorted(sizes, key=by_size))  # refuses a patch size that does not fit
        if model.is_tuned:
            model.use_table(strategy_table(model, sizes, target.folder, fingerprint=fingerprint))
            if not model.always_packs:
                self.plain.tune(target, self.conditions, circumstances_of(model, sizes, fingerprint))

    def check(self, state: SamplerState, size: tuple[int, int]) -> None:
        """Raise UsageError if the schedule has a step without finite coefficients, or patches cannot cut the size."""
        self.sampler.table(state)
        self.model.check_size(size)
        if self.model.cache is not None:
            self.model.cache.check_sizes([size])

    def prepare(self, prepared: PreparedRequest) -> None:
        """Work out a request's coefficients beside the denoise loop."""
        self.sampler.table(prepared.state)
        prepared.latents = prepared.latents.float()
        prepared.cache_key = next(self._cache_keys)

    @torch.inference_mode()
    def step(self, active: Sequence[PreparedRequest]) -> dict[int, str]:
        """Take one step of every active request.

        Returns:
            The requests that failed, by id, with the reason. A failing batch is repeated in halves, and these in
            halves, so that only the requests which fail alone are named; the others have taken their step.

        Raises:
            RecordingError: a CUDA graph could not be recorded.
        """
        return self._step_or_halves(active, may_be_plain=True) if active else {}

    def _step_or_halves(self, active: Sequence[PreparedRequest], *, may_be_plain: bool) -> dict[int, str]:
        try:
            return self._step_together(active, may_be_plain=may_be_plain)
        except RecordingError:
            raise
        except Exception as error:  # noqa: BLE001  one failing request must not take down the others
            reason = describe("denoising", error)
        self._let_go(has_failed=True)
        if len(active) == 1:
            return {active[0].request.request_id: reason}
        self.batch_failures.note(reason)
        failures: dict[int, str] = {}
        for half in (active[: len(active) // 2], active[len(active) // 2 :]):
            # Not by the plain model: that would hide what fails for every batch with patches.
            failures |= self._step_or_halves(half, may_be_plain=False)
            self._let_go(has_failed=True)
        return failures

    def _step_together(self, active: Sequence[PreparedRequest], *, may_be_plain: bool) -> dict[int, str]:
        batch = self.batch
        if batch is None or not batch.holds(active):
            self._let_go()
            batch = self.batch = PackedBatch(self, active, may_be_plain=may_be_plain)
        batch.step()
        not_finite = batch.not_finite()
        if not_finite or any(prepared.state.is_finished for prepared in active):
            self._let_go()
        return dict.fromkeys(not_finite, "denoising: latents are not finite (NaN or infinity)")

    def _let_go(self, *, has_failed: bool = False) -> None:
        """Hand the latents of the current batch back to its requests."""
        if has_failed and self.model.cache is not None:
            # A step that failed half way has left some blocks at this step and the others at the last one.
            self.model.cache.forget()
        if self.batch is not None:
            self.batch.unpack()
            self.batch = None
            # Who has finished goes to the decoder, which works on another stream.
            finish_stream(self.model.device)


class PackedBatch:
    """The active requests between two changes of the active set.

    Each request takes one row in the packing of latents, and one or, with guidance, two rows (unconditional,
    conditional) in the packing that the model sees.

    Attributes:
        is_plain: whether the unmodified model takes the batch, as it is of one resolution.
    """

    def __init__(self, stepper: PatchedStepper, active: Sequence[PreparedRequest], *, may_be_plain: bool) -> None:
        self._given = tuple(active)
        model = stepper.model
        batch = sorted(active, key=lambda prepared: by_size(_latent_size(prepared)))
        self._batch = batch
        self._model, self._plain = model, stepper.plain
        sizes = [_latent_size(prepared) for prepared in batch]
        rows = [row for index, prepared in enumerate(batch) for row in [index] * prepared.num_rows]
        self._row_request = torch.tensor(rows, device=model.device)

        conditioning = {
            key: torch.cat([prepared.conditioning[key] for prepared in batch]) for key in batch[0].conditioning
        }
        repeats = 1
        if not model.is_unet:
            conditioning["text"], repeats = _without_repeats(conditioning["text"])
        self._conditions: dict[str, Any] = stepper.conditions(conditioning)
        # A batch of one resolution needs no patches: plain diffusers is as fast, unless equal text tokens are left out.
        self.is_plain = may_be_plain and len(set(sizes)) == 1 and repeats == 1 and not model.always_packs
        if self.is_plain:
            self._packing = WholeImages(len(batch), model.device)
            row_packing = WholeImages(len(rows), model.device)
        else:
            self._packing = model.pack(sizes)
            row_packing = model.pack([sizes[index] for index in rows])
            known = [
                CachedRequest(each.cache_key, each.num_rows, each.state.num_steps, each.request.resolution.pixels)
                for each in batch
            ]
            model.begin(row_packing, repeats=repeats, requests=known)
        self._guide = _Guidance(batch, self._packing, row_packing, model.device)

        history = None
        if stepper.sampler.needs_history and any(prepared.previous_x0 is not None for prepared in batch):
            history = self._packing.pack(
                [(prepared.latents if prepared.previous_x0 is None else prepared.previous_x0)[0] for prepared in batch]
            )
        latents = self._packing.pack([prepared.latents[0] for prepared in batch])
        states = [prepared.state for prepared in batch]
        self._sampler = SamplerBatch(stepper.sampler, states, latents, self._packing.row_index, history)

    def holds(self, active: Sequence[PreparedRequest]) -> bool:
        """Whether these are the requests of this batch, in the order in which they were given."""
        return len(active) == len(self._given) and all(a is b for a, b in zip(active, self._given, strict=True))

    def step(self) -> None:
        sampler, model = self._sampler, self._model
        patches = self._guide.repeat(sampler.model_input()).to(model.dtype)
        timesteps = sampler.timesteps().index_select(0, self._row_request)
        if self.is_plain:
            prediction = self._plain.predict(patches, timesteps, self._conditions)
        else:
            done = [prepared.state.steps_done for prepared in self._batch]
            prediction = model(patches, timesteps, steps_done=done, **self._conditions)
        sampler.step(self._guide.combine(prediction.float()), self._draw_noise)

    def _draw_noise(self) -> Tensor:
        """What diffusers draws in the step: from each request's own generator, in the dtype of the model's output."""
        model, drawn = self._model, []
        for prepared in self._batch:
            generator = prepared.state.step_kwargs.get("generator")
            drawn.append(randn_tensor(prepared.latents.shape, generator, model.device, model.dtype)[0])
        return self._packing.pack(drawn)

    def not_finite(self) -> list[int]:
        """Ids of the requests whose latents hold NaN or infinity. The only wait for the device in a step."""
        is_finite = self._sampler.latents.isfinite()
        if bool(is_finite.all()):
            return []
        bad = set(self._packing.row_index[~is_finite.flatten(1).all(1)].tolist())
        return [self._batch[index].request.request_id for index in bad]

    def unpack(self) -> None:
        """Give every request its latents, and what its next step reads of this one."""
        for index, prepared in enumerate(self._batch):
            prepared.latents = self._packing.unpack(self._sampler.latents, index)[None]
            if self._sampler.previous_x0 is not None:
                prepared.previous_x0 = self._packing.unpack(self._sampler.previous_x0, index)[None]


class _Guidance:
    """Classifier-free guidance on patches: from requests to rows and back."""

    def __init__(
        self,
        batch: list[PreparedRequest],
        packing: Packing | WholeImages,
        row_packing: Packing | WholeImages,
        device: torch.device,
    ) -> None:
        starts, row_starts = packing.starts, row_packing.starts
        sources, unconditional, conditional, row = [], [], [], 0
        for index, prepared in enumerate(batch):
            own = torch.arange(starts[index], starts[index + 1])
            shift = row_starts[row] - starts[index]
            sources += [own] * prepared.num_rows
            unconditional.append(own + shift)
            conditional.append(own + shift + (prepared.num_rows - 1) * len(own))
            row += prepared.num_rows
        self._sources = torch.cat(sources).to(device) if row > len(batch) else None
        self._unconditional = torch.cat(unconditional).to(device)
        self._conditional = torch.cat(conditional).to(device)
        scales = torch.tensor([prepared.request.guidance_scale for prepared in batch], device=device)
        self._scale = scales[packing.row_index][:, None, None, None]

    def repeat(self, patches: Tensor) -> Tensor:
        """Patches of requests -> patches of rows."""
        return patches if self._sources is None else patches.index_select(0, self._sources)

    def combine(self, prediction: Tensor) -> Tensor:
        """Predictions of rows -> guided predictions of requests."""
        if self._sources is None:
            return prediction
        # Requests without guidance have one row, which is both; their scale then does nothing.
        base = prediction.index_select(0, self._unconditional)
        return torch.addcmul(base, prediction.index_select(0, self._conditional).sub_(base), self._scale)


def _latent_size(prepared: PreparedRequest) -> tuple[int, int]:
    return prepared.latents.shape[2], prepared.latents.shape[3]


def _without_repeats(text: Tensor) -> tuple[Tensor, int]:
    """Text [rows, length, width] without the equal tokens at the end of all rows but the first, and how many it is.

    SD3 feeds as many zero tokens as its third text encoder would have given where there is none.
    """
    is_same = (text[:, 1:] == text[:, :-1]).all(-1)
    # Counted from the end until the first difference.
    run = is_same.flip(1).long().cumprod(1).sum(1)
    repeated = int(run.min()) if text.shape[1] > 1 else 0
    return text[:, : text.shape[1] - repeated].contiguous(), repeated + 1
