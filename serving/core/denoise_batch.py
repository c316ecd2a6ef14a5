"""The active requests between two changes of the active set, for any packing: latents, guidance, sampler."""

from collections.abc import Callable, Sequence

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from ..families.text import join_texts
from ..layout.device_tables import all_to_device
from ..layout.packing import Packing, WholeImages
from ..samplers.batched import BatchedSampler, SamplerBatch
from ..samplers.single import PerRequestBatch, PerRequestSampler
from .known_area import KnownAreas
from .prepared import PreparedRequest, describe

Predict = Callable[[Tensor, Tensor], Tensor]
"""(inputs of the model for all rows, in its dtype; timesteps (rows,)) -> its prediction for every row."""


def join_conditioning(requests: Sequence[PreparedRequest]) -> dict[str, Tensor]:
    """Concatenate the conditioning tensors of all rows of the requests; masked text is padded to the longest."""
    parts = {key: [each.conditioning[key] for each in requests] for key in requests[0].conditioning}
    if "mask" not in parts:
        return {key: torch.cat(each) for key, each in parts.items()}
    text, mask = join_texts(parts.pop("text"), parts.pop("mask"))
    return {key: torch.cat(each) for key, each in parts.items()} | {"text": text, "mask": mask}


class DenoiseBatch:
    """Advances requests together, each at its own timestep, with latents in float32 whatever the model's dtype.

    Each request takes one row in the packing of latents, and one or, with guidance, two rows (unconditional,
    conditional) in the packing that the model sees.

    Args:
        requests: requests in the order of the packing.
        packing, row_packing: packing of the requests, and packing of the rows that the model sees, which may have
            dummies.
        sampler: updates all of them at once, or calls each request's own scheduler.
        predict: calls the model with the text of the batch.
        dtype: data type of the model.
    """

    def __init__(
        self,
        requests: Sequence[PreparedRequest],
        packing: Packing | WholeImages,
        row_packing: Packing | WholeImages,
        sampler: BatchedSampler | PerRequestSampler,
        predict: Predict,
        *,
        dtype: torch.dtype,
    ) -> None:
        self.requests = requests
        self._ids = set(map(id, requests))
        self._packing, self._predict, self._dtype = packing, predict, dtype
        device = requests[0].latents.device
        self._guide = _Guidance(requests, packing, row_packing, device)
        is_edit = any(prepared.known_area is not None for prepared in requests)
        self._known_areas = KnownAreas(requests, packing) if is_edit else None
        latents = packing.pack([prepared.latents[0] for prepared in requests])
        states = [prepared.state for prepared in requests]
        self._sampler: SamplerBatch | PerRequestBatch
        if isinstance(sampler, PerRequestSampler):
            self._sampler = PerRequestBatch(sampler, states, latents, packing, dtype)
            return
        history = None
        if any(prepared.history is not None for prepared in requests):
            shape = (1, len(sampler.history_terms), 1, 1)
            history = packing.pack(
                [(each.latents.repeat(shape) if each.history is None else each.history)[0] for each in requests]
            )
        self._sampler = SamplerBatch(sampler, states, latents, packing.row_index, history)

    @property
    def latents(self) -> Tensor:
        """Latents after the last step, in patches of the packing."""
        return self._sampler.latents

    def holds(self, active: Sequence[PreparedRequest]) -> bool:
        """Return whether these are the requests of this batch, in any order."""
        return set(map(id, active)) == self._ids

    def has(self, prepared: PreparedRequest) -> bool:
        """Return whether this is a request of the batch."""
        return id(prepared) in self._ids

    def step(self) -> None:
        """Take one denoising step of every request. If the model fails, no request has taken it."""
        sampler = self._sampler
        prediction = self._predict(*self.inputs())
        sampler.step(self._guide.combine(prediction.float()), self._draw_noise)
        if self._known_areas is not None:
            sampler.latents = self._known_areas.restored(sampler.latents)

    def inputs(self) -> tuple[Tensor, Tensor]:
        """Return the model's inputs for the next step, in the row packing and its dtype, and the timesteps (rows,)."""
        rows = self._guide.repeat(self._sampler.model_input()).to(self._dtype)
        return rows, self._sampler.timesteps().index_select(0, self._guide.row_request)

    def failures(self) -> dict[int, str]:
        """Return the reasons by id of the requests whose last step failed. Waits for the device."""
        errors = self._sampler.errors if isinstance(self._sampler, PerRequestBatch) else {}
        found = {
            self.requests[index].request.request_id: describe("denoising", error) for index, error in errors.items()
        }
        is_finite = self.latents.isfinite()
        if not bool(is_finite.all()):
            for index in set(self._packing.row_index[~is_finite.flatten(1).all(1)].tolist()):
                name = self.requests[index].request.request_id
                found.setdefault(name, "denoising: latents are not finite (NaN or infinity)")
        return found

    def x0_of(self, prepared: PreparedRequest) -> Tensor | None:
        """Return the clean latents (1, channels, height, width) that the last step predicts for one of these requests.

        None before the first step, or if requests call their own schedulers, which do not provide them.
        """
        sampler = self._sampler
        if isinstance(sampler, PerRequestBatch) or sampler.last is None:
            return None
        index = next(index for index, each in enumerate(self.requests) if each is prepared)
        latents, output = (self._packing.unpack(each, index)[None] for each in sampler.last)
        of_latents, of_output = sampler.sampler.x0_factors(prepared.state)
        clean, known = latents * of_latents + output * of_output, prepared.known_area
        return clean if known is None else torch.lerp(known.clean, clean, known.weights)

    def outputs(self) -> list[Tensor]:
        """Return the guided prediction of the last step for each request: (channels, height, width)."""
        assert isinstance(self._sampler, SamplerBatch), "requests that call their own schedulers keep no outputs"
        assert self._sampler.last is not None, "nothing was said yet"
        return [self._packing.unpack(self._sampler.last[1], index) for index in range(len(self.requests))]

    def unpack(self) -> None:
        """Store in every request its latents, and the history that its next step reads."""
        for index, prepared in enumerate(self.requests):
            prepared.latents = self._packing.unpack(self._sampler.latents, index)[None]
            if self._sampler.history is not None:
                prepared.history = self._packing.unpack(self._sampler.history, index)[None]

    def _draw_noise(self) -> Tensor:
        """Draw the noise of the step as diffusers does: from each request's own generator, in the model's dtype."""
        drawn = []
        for prepared in self.requests:
            generator = prepared.state.step_kwargs.get("generator")
            drawn.append(randn_tensor(prepared.latents.shape, generator, prepared.latents.device, self._dtype)[0])
        return self._packing.pack(drawn)


class _Guidance:
    """Classifier-free guidance on patches: from requests to rows and back.

    Attributes:
        row_request: (rows,) index of the request of each row.
    """

    def __init__(
        self,
        batch: Sequence[PreparedRequest],
        packing: Packing | WholeImages,
        row_packing: Packing | WholeImages,
        device: torch.device,
    ) -> None:
        starts, row_starts = packing.starts, row_packing.starts
        sources, unconditional, conditional, rows = [], [], [], []
        references, num_known = [], packing.num_patches
        for index, prepared in enumerate(batch):
            own = torch.arange(starts[index], starts[index + 1])
            first, length = row_starts[len(rows)], row_starts[len(rows) + 1] - row_starts[len(rows)]
            drawn = torch.arange(first, first + len(own))
            unconditional.append(drawn)
            conditional.append(drawn + (prepared.num_rows - 1) * length)
            if length > len(own):
                references.append(row_packing.pack([each[0].float() for each in prepared.references]))
                own = torch.cat([own, torch.arange(num_known, num_known + len(references[-1]))])
                num_known += len(references[-1])
            sources += [own] * prepared.num_rows
            rows += [index] * prepared.num_rows
        # Dummies have the timestep of the first request, and padding is a copy of the first patch.
        num_rows, num_padding = len(rows), row_packing.num_patches - row_starts[-1]
        rows += [0] * (row_packing.num_rows - num_rows)
        sources.append(torch.zeros(num_padding, dtype=torch.long))
        tables, self._sources = [torch.tensor(rows)], None
        self._references = torch.cat(references) if references else None
        if num_rows > len(batch) or num_padding or references:
            tables += map(torch.cat, (sources, unconditional, conditional))
        scales = torch.tensor([each.request.guidance_scale + 1 - each.neutral_scale for each in batch])
        self.row_request, scale, *places = all_to_device([tables[0], scales, *tables[1:]], device)
        if places:
            self._sources, self._unconditional, self._conditional = places
            self._scale = scale[packing.row_index][:, None, None, None]
        self._packing, self._norms = packing, [each.guided_norm if each.is_guided else None for each in batch]

    def repeat(self, patches: Tensor) -> Tensor:
        """Patches of requests -> patches of rows, with those of their references behind their own."""
        if self._references is not None:
            patches = torch.cat([patches, self._references])
        return patches if self._sources is None else patches.index_select(0, self._sources)

    def combine(self, prediction: Tensor) -> Tensor:
        """Predictions of rows -> guided predictions of requests."""
        if self._sources is None:
            return prediction
        # A request without guidance has one row, which serves as both; its scale then has no effect.
        base = prediction.index_select(0, self._unconditional)
        guided = torch.addcmul(base, prediction.index_select(0, self._conditional).sub_(base), self._scale)
        if not any(self._norms):
            return guided
        return self._rescaled(guided, prediction.index_select(0, self._conditional))

    def _rescaled(self, guided: Tensor, conditional: Tensor) -> Tensor:
        """Rescale parts of an image to their norm in the conditional prediction, for families that do so.

        A part with a norm of 0 becomes 0.
        """
        images = []
        for index, norm in enumerate(self._norms):
            image = self._packing.unpack(guided, index)
            if norm is not None:
                image *= (norm(self._packing.unpack(conditional, index)) / norm(image)).nan_to_num_()
            images.append(image)
        return self._packing.pack(images)
