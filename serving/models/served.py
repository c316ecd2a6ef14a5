"""The served model: one diffusers pipeline, split into what the three stages need.

`ServedModel` copies no model code: it calls the pipeline's own text encoders, scheduler and autoencoder as the
pipeline does, one request at a time (prepare, decode); a stepper denoises in between. Latents and images equal those of
the plain pipeline with the same prompt, size, steps, guidance scale and `torch.Generator("cpu").manual_seed(seed)`.
"""

import hashlib
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from diffusers.utils.torch_utils import randn_tensor
from numpy.typing import NDArray

from ...data.edits import EditSpec, TemplateSpec
from ...data.errors import RunError, UsageError
from ...data.requests import Request
from ...data.resolution import Resolution
from ...data.tables.block_facts import BlockFacts
from ...data.templates import Keep
from ..core.denoiser import denoiser_of
from ..core.prepared import PreparedRequest
from ..core.stepper import Stepper, Tuning
from ..core.timing import finish_stream
from ..editing.start import begin_edit, noised_steps
from ..editing.templates import TemplateKey, TemplateRecord, TemplateStore, facts_of, no_generation
from ..editing.trajectory import Trajectory, begin_on
from ..families import Decode, Family
from ..options import EngineOptions
from ..patched.cached_block import block_facts
from ..patched.stepper import PatchedStepper
from ..samplers.batched import choose_sampler
from ..samplers.single import NOISING, PerRequestSampler, SamplerState
from .defaults import ModelDefaults
from .identity import ModelIdentity
from .prompt_cache import PromptCache

if TYPE_CHECKING:
    from PIL.Image import Image


MAX_TIMES_PIXELS = 64
"""Largest request, relative to the largest resolution that a model is made for; beyond it, images are useless."""
MASKED_UP_TO = 0.6
"""Share of the cells of an image up to which a masked pass is worth it: above it is as slow as a whole one, or slower
(`tests/benchmarks/bench_edit.py`)."""
PASSES_TOGETHER = 4
"""Of a template, in a batch."""
_MOST_SCHEDULES = 4096
"""Of the schedules (steps and resolution) that are known to be fine."""


class ServedModel:
    """One loaded model, ready to be driven by the engine. `build_model` puts it together.

    `prepare`, `stepper.step` and `decode` use disjoint parts of the pipeline (text encoders, and for edits the
    autoencoder's encoder; the denoising model; the autoencoder's decoder), so three threads may call them at the same
    time, but no two threads the same one; `prepare` waits for its turn.

    Args:
        pipe: a diffusers pipeline of a supported class, already on its device and in its dtype.
        family: how it is served.
        stepper: denoises.
        name: the user's name for the model, for tables and reports.
        fingerprint: of the model's files; part of the key of cached measurements.
        defaults: steps, guidance scale and resolutions that suit the model.
        options: which engine denoises, and how.
        decode: does the autoencoder's part; None for the pipeline's own.

    Attributes:
        unbatched: why each request calls a scheduler of its own; None where one update serves all of them.
        templates: records that edits may read. Where there is no record for an edit, it is as it were without a
            template; without this store it is the twin of the one that reads, with the template's noise.
        masked_up_to: share of an image's cells up to which they do.
        trajectories: by id, of new images that shall leave a record for edits of them.
        prompts: conditioning of earlier prompts; None where every text is encoded anew.
    """

    masked_up_to = MASKED_UP_TO

    def __init__(
        self,
        pipe: Any,
        family: Family,
        stepper: Stepper,
        *,
        name: str,
        fingerprint: str,
        defaults: ModelDefaults,
        options: EngineOptions,
        decode: Decode | None = None,
    ) -> None:
        self.pipe, self.family, self.stepper = pipe, family, stepper
        self.name, self.fingerprint, self.defaults, self.options = name, fingerprint, defaults, options
        self.sampler = PerRequestSampler(pipe.scheduler, pass_step_kwargs=family.pass_step_kwargs)
        self.denoiser = denoiser_of(pipe)
        self.device: torch.device = self.denoiser.device
        self.dtype: torch.dtype = self.denoiser.dtype
        self._decode = decode or (lambda latents: pipe.vae.decode(latents, return_dict=False)[0])
        self.unbatched = choose_sampler(pipe.scheduler, pass_step_kwargs=family.pass_step_kwargs)[1]
        self.prompts = PromptCache(options.prompt_cache_mb << 20) if options.prompt_cache_mb else None
        self.templates: TemplateStore | None = None
        self.trajectories: dict[int, Trajectory] = {}
        self._known_schedules: set[tuple[int, int, Resolution]] = set()
        self._preparing = threading.Lock()

    @property
    def identity(self) -> ModelIdentity:
        """What decides its images."""
        dtype = str(self.dtype).removeprefix("torch.")
        return ModelIdentity(self.name, self.fingerprint, dtype, self.device.type, self.options)

    def check_resolution(self, resolution: Resolution) -> None:
        """Raise UsageError if the model cannot draw this resolution; the message names the allowed multiple."""
        self.family.geometry.check_size(resolution, self.name)
        largest = self.family.max_side
        if largest is not None and max(resolution) > largest:
            raise UsageError(
                f"resolution {resolution.width}x{resolution.height}: "
                f"width and height may be at most {largest} pixels for {self.name}"
            )
        usual = max(self.defaults.resolutions, key=lambda size: size.pixels)
        if resolution.pixels > MAX_TIMES_PIXELS * usual.pixels:
            raise UsageError(
                f"resolution {resolution}: it may have at most {MAX_TIMES_PIXELS} times the pixels of the largest that "
                f"{self.name} is made for ({usual})"
            )

    def check_request(self, request: Request) -> None:
        """Raise UsageError if the model cannot serve the request (its resolution, number of steps, or edit)."""
        self.check_resolution(request.resolution)
        self.family.geometry.check_edit(request)
        if request.edit is not None and not any(hasattr(self.pipe.scheduler, name) for name in NOISING):
            raise UsageError(f"scheduler {type(self.pipe.scheduler).__name__} cannot noise images, as edits need it")
        schedule = (request.num_inference_steps, self.family.geometry.first_step(request), request.resolution)
        if schedule in self._known_schedules:
            return
        try:
            state = self._start_schedule(request, generator=None)
            self.stepper.check(state, self.family.geometry.latent_size(request.resolution))
        except UsageError:
            raise
        except (ValueError, IndexError, RuntimeError) as error:
            scheduler = type(self.pipe.scheduler).__name__
            raise UsageError(f"{scheduler} cannot take {request.num_inference_steps} steps: {error}") from error
        if len(self._known_schedules) >= _MOST_SCHEDULES:
            self._known_schedules.clear()
        self._known_schedules.add(schedule)

    def _start_schedule(self, request: Request, generator: torch.Generator | None) -> SamplerState:
        return self.sampler.start(
            request.num_inference_steps,
            device=self.device,
            generator=generator,
            schedule_kwargs=self.family.schedule_kwargs(request),
            first_step=self.family.geometry.first_step(request),
        )

    def tune(self, resolutions: Iterable[Resolution], folder: Path) -> None:
        """Let the engine choose by measurement what is faster for these resolutions; `folder` keeps the result.

        Raises:
            UsageError: if the engine's options do not fit the resolutions.
            RunError: if a file in the folder is damaged.
        """
        distinct = list(dict.fromkeys(resolutions))
        self.stepper.tune(self.tuning(distinct, folder))
        if self.options.compile:
            # A graph for batches of one resolution, of two, and so on: requests that come later would wait for it.
            for count in range(1, len(distinct) + 1):
                failures = self.stepper.step(self.examples(distinct[:count]))
                if failures:
                    raise RunError(f"--compile: {next(iter(failures.values()))}")

    def block_facts(self, patch_size: int | None) -> BlockFacts:
        """What a block profile of this model holds for, and a cache predictor must have been trained for; with None for
        the default patch size."""
        return block_facts(self.pipe, self.name, self.fingerprint, patch_size)

    def tuning(self, resolutions: Sequence[Resolution], folder: Path) -> Tuning:
        """What a stepper of this model needs to know to be fast for these resolutions."""
        sizes = [self.family.geometry.latent_size(resolution) for resolution in resolutions]
        return Tuning(sizes, folder, self.fingerprint, lambda: self.examples(resolutions))

    def examples(self, resolutions: Iterable[Resolution]) -> list[PreparedRequest]:
        """Prepare a request of each resolution, with the model's own settings, to measure with."""
        steps, scale = self.defaults.num_inference_steps, self.defaults.guidance_scale
        return [self.prepare(Request(0, "", resolution, steps, scale)) for resolution in resolutions]

    @torch.inference_mode()
    def prepare(self, request: Request) -> PreparedRequest:
        """Encode the text, set the schedule and draw the first latents from the request's own generator; of an edit,
        encode its image.

        The latents are drawn on the CPU whatever the device, so that a seed means the same image everywhere.
        """
        with self._preparing:
            return self._prepare(request)

    def _prepare(self, request: Request) -> PreparedRequest:
        edit, record = request.edit, self._record_for(request)
        template = None if edit is None or record is not None else edit.template
        if edit is not None and template is not None:
            # A twin has no records at all, and begins as an edit that reads one.
            edit = edit if self.templates is None and template.kind == "noised" else replace(edit, template=None)
        is_guided = self.family.uses_guidance(request.guidance_scale)
        encode, prompts = self.family.condition, self.prompts
        conditioning = encode(request, is_guided) if prompts is None else prompts.get(request, is_guided, encode)
        generator = torch.Generator("cpu").manual_seed(request.seed)
        state = self._start_schedule(request, generator)
        dtype, known = self.family.noise_dtype or conditioning["text"].dtype, None
        if edit is None:
            shape = (1, self.family.latent_channels, *self.family.geometry.latent_size(request.resolution))
            latents = randn_tensor(shape, generator=generator, device=self.device, dtype=dtype)
            if self.family.scales_noise:
                latents = latents * state.scheduler.init_noise_sigma
        elif record is not None and edit.template is not None and edit.template.kind == "trajectory":
            latents, known = begin_on(
                record.latents(state.first),
                edit,
                state,
                generator,
                factor=self.family.geometry.latent_factor,
                scales_noise=self.family.scales_noise,
                dtype=dtype,
            )
        else:
            latents, known = begin_edit(
                edit,
                self.family.encode,
                state,
                generator,
                factor=self.family.geometry.latent_factor,
                scales_noise=self.family.scales_noise,
                device=self.device,
                dtype=dtype,
            )
        prepared = PreparedRequest(
            request,
            latents,
            conditioning,
            state,
            is_guided,
            known=known,
            template=record,
            guided_norm=self.family.guided_norm,
            neutral_scale=self.family.neutral_scale,
        )
        if (trajectory := self.trajectories.get(request.request_id)) is not None:
            prepared.on_pass = trajectory.note
        self.stepper.prepare(prepared)
        # The denoise loop works on another stream.
        finish_stream(self.device)
        return prepared

    @torch.inference_mode()
    def decode(self, latents: torch.Tensor) -> "Image":
        """Turn the final latents of one request into its image."""
        return self.family.decode(latents.to(self.dtype), self._decode)[0]

    def _record_for(self, request: Request) -> TemplateRecord | None:
        """The record that an edit is to read. One that cannot be read is warned of, and as good as none."""
        edit = request.edit
        if self.templates is None or edit is None or edit.template is None or not self.is_worth_masking(edit):
            return None
        key = self.template_key(request)
        try:
            return None if key is None else self.templates.find(key, self.device)
        except RunError as error:
            warnings.warn(str(error), stacklevel=3)
            return None

    def is_worth_masking(self, edit: EditSpec) -> bool:
        """Whether computing the masked part of an image by itself is faster than all of it."""
        return self.family.geometry.active_share(edit) <= self.masked_up_to

    def template_key(self, request: Request) -> TemplateKey | None:
        """Which record an edit can read; None: none, as it has no template, its size has parts of cells, or it starts
        at the first step from an image that is noised only in part, which records do not have; or as a scheduler of its
        own counts its steps, which cannot be taken in any order.
        """
        edit, geometry = request.edit, self.family.geometry
        if edit is None or edit.template is None or not isinstance(self.stepper, PatchedStepper):
            return None
        if self.unbatched is not None:
            return None
        if any(side % geometry.cell for side in geometry.latent_size(request.resolution)):
            return None
        if edit.strength < 1 and geometry.first_step(request) == 0:
            return None
        scheduler, facts = self.pipe.scheduler, facts_of(request, self.stepper.masked.keep)
        if self.family.is_distilled:
            facts["guidance"] = request.guidance_scale
        return TemplateKey({
            "model": self.fingerprint,
            "dtype": str(self.dtype).removeprefix("torch."),
            # Its numbers may be infinite, which JSON does not know.
            "scheduler": [type(scheduler).__name__, hashlib.sha256(scheduler.to_json_string().encode()).hexdigest()],
            "rows": 2 if self.family.uses_guidance(request.guidance_scale) else 1,
            **facts,
        })  # fmt: skip

    def use_keep(self, keep: Keep) -> None:
        """Say what records hold that are made and read from now on, see `data.templates`.

        Raises UsageError: the model's blocks are not known so well.
        """
        if isinstance(self.stepper, PatchedStepper):
            self.stepper.use_keep(keep)

    def use_template(self, request: Request, folder: Path, on_step: Callable[[int], None]) -> bool:
        """Let edits of a template read its record in this folder, which is made if it is not there.

        Args:
            request: an edit of the template.
            folder: of records.
            on_step: called with how many steps of it are recorded more.

        Returns:
            Whether it was recorded now.

        Raises:
            UsageError: records do not suit the engine, or the size of the image; or there is none of its generation.
            RunError: as `TemplateStore.add`. Where a record cannot be written, there is a warning, and it is used as
                long as it is in memory.
        """
        self._require_batched()
        self.templates = self.templates or TemplateStore(folder)
        edit = request.edit
        if edit is not None and edit.strength < 1 and self.family.geometry.first_step(request) == 0:
            raise UsageError(
                f"strength is {edit.strength:g}, which leaves out none of {request.num_inference_steps} steps: to "
                "reuse what an image's template has shown, it must be 1 or less than that"
            )
        key = self.template_key(request)
        if key is None:
            cell = self.family.geometry.cell * self.family.geometry.latent_factor
            raise UsageError(
                f"resolution {request.resolution}: to reuse what an image's template has shown, width and height must "
                f"be multiples of {cell} pixels for {self.name}, on the patch engine"
            )
        if self.templates.find(key, self.device) is not None:
            return False
        if edit is not None and edit.template is not None and edit.template.kind == "trajectory":
            raise no_generation(request, key.about["keep"])
        try:
            self.templates.add(key, self.recorded(request, on_step), self.device)
        except OSError as error:
            warnings.warn(f"the record of the template cannot be written to {folder}: {error}", stacklevel=2)
        return True

    def start_trajectory(self, request: Request, folder: Path) -> None:
        """Have the passes of a new image recorded; an empty folder holds them until `end_trajectory`.

        Raises UsageError: records do not suit the sampler, or the size of the image.
        """
        self._require_batched()
        self.family.geometry.check_cells(request.resolution, self.name)
        self.trajectories[request.request_id] = Trajectory(folder)

    def end_trajectory(
        self, request: Request, pixels: NDArray[np.uint8], latents: torch.Tensor, store: TemplateStore
    ) -> TemplateKey:
        """Take over the record of an image that was drawn; returns its key.

        Args:
            request: what was drawn.
            pixels: (height, width, 3), what came of it.
            latents: (1, channels, h, w), what was decoded.
            store: of the workspace.

        Raises:
            RunError, OSError: as `TemplateStore.add`.
        """
        everywhere = np.ones(pixels.shape[:2], dtype=bool)
        edit = EditSpec(pixels, everywhere, template=TemplateSpec(kind="trajectory"))
        key = self.template_key(replace(request, edit=edit))
        assert key is not None, "start_trajectory has refused what has none"
        store.add(key, self.trajectories.pop(request.request_id).steps(latents), self.device)
        return key

    def _require_batched(self) -> None:
        if self.unbatched is not None:
            raise UsageError(
                f"what an image's template has shown is reused with batched samplers only: {self.unbatched}"
            )

    def recorded(
        self, request: Request, on_step: Callable[[int], None] = lambda count: None
    ) -> Iterator[list[dict[str, torch.Tensor]]]:
        """Run a template's passes: of each step and row what operators have seen, by name, on the model's device.
        Nothing else may run on the model meanwhile.

        Args:
            request: that has a `template_key`.
            on_step: called with how many steps are done more.
        """
        passes = self.template_passes(request)
        for start in range(0, len(passes), PASSES_TOGETHER):
            found = self.record(passes[start : start + PASSES_TOGETHER])
            on_step(len(found))
            yield from found

    def record(self, passes: Sequence[PreparedRequest]) -> list[list[dict[str, torch.Tensor]]]:
        """Run passes of a template in one batch: for each, of each of its rows, what operators have seen, by name, on
        the model's device. To be called where the stepper is.
        """
        assert isinstance(self.stepper, PatchedStepper)
        found = self.stepper.record(passes)
        finish_stream(self.device)
        return found

    def template_passes(self, request: Request) -> list[PreparedRequest]:
        """The whole passes over the image of an edit that its masked ones will read (InstGenIE section 3.1): at each
        step over the image as it is noised there, with the template's prompt. They are independent of each other.
        """
        edit = request.edit
        assert edit is not None
        assert edit.template is not None
        whole = replace(
            request,
            prompt=edit.template.prompt,
            negative_prompt=None,
            edit=replace(edit, mask=np.ones_like(edit.mask), strength=1.0, template=None),
            seed=edit.template.seed,
        )
        passes = noised_steps(self.prepare(whole))
        finish_stream(self.device)
        return passes

    def close(self) -> None:
        """Let go of what outlives calls, such as the processes of other ranks."""
        self.stepper.close()
