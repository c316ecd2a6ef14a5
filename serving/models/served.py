"""The served model: one diffusers pipeline, split into what the three stages need.

`ServedModel` copies no model code: it calls the pipeline's own text encoders, scheduler and autoencoder as the
pipeline does, one request at a time (prepare, decode); a stepper denoises in between. Latents and images equal those of
the plain pipeline with the same prompt, size, steps, guidance scale and `torch.Generator("cpu").manual_seed(seed)`.
"""

import threading
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers.utils.torch_utils import randn_tensor

from ...data.adapters import require_adapters
from ...data.errors import RunError, UsageError
from ...data.requests import Request
from ...data.resolution import Resolution
from ...data.tables.block_facts import WHOLE_MODEL, BlockFacts
from ...training.cache.schedule import CacheSchedule
from ..cache.patch_cache import PatchCache
from ..cache.stats import CacheStats
from ..core.denoiser import denoiser_of
from ..core.prepared import PreparedRequest
from ..core.stepper import Stepper, Tuning
from ..core.timing import finish_stream
from ..editing.start import begin_edit
from ..editing.trajectory import begin_on
from ..families import Decode, Family
from ..families.decoder import FiniteDecoder
from ..options import EngineOptions
from ..patched.cached_block import block_facts
from ..patched.stepper import PatchedStepper
from ..samplers.choice import choose_sampler
from ..samplers.single import NOISING, PerRequestSampler, SamplerState
from .adapters import ModelAdapters
from .defaults import ModelDefaults
from .identity import ModelIdentity
from .offload import TextOffload
from .prompt_cache import PromptCache
from .reuse import TemplateReuse
from .stage_process import StageProcesses

if TYPE_CHECKING:
    from PIL.Image import Image


MAX_TIMES_PIXELS = 64
"""Largest request, relative to the largest resolution that a model is made for; beyond it, images are useless."""
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
        adapters: that requests may name; None for none.
        stages: the processes that the family's functions ask; None where they compute themselves.
        schedule: which steps are computed of requests that let the cache be used; None for all.

    Attributes:
        unbatched: why each request calls a scheduler of its own; None where one update serves all of them.
        reuse: records of templates that edits may read.
        prompts: conditioning of earlier prompts; None where every text is encoded anew.
        offload: what keeps the text encoders off the device; None where they stay there.
    """

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
        adapters: ModelAdapters | None = None,
        stages: StageProcesses | None = None,
        schedule: CacheSchedule | None = None,
    ) -> None:
        self.schedule, self._skipped = schedule, None if schedule is None else CacheStats()
        self.pipe, self.family, self.stepper = pipe, family, stepper
        self.name, self.fingerprint, self.defaults, self.options = name, fingerprint, defaults, options
        self.sampler = PerRequestSampler(pipe.scheduler, pass_step_kwargs=family.pass_step_kwargs)
        self.denoiser = denoiser_of(pipe)
        self.device: torch.device = self.denoiser.device
        self.dtype: torch.dtype = self.denoiser.dtype
        self._decode: Decode = FiniteDecoder(pipe.vae, decode)
        self.unbatched = choose_sampler(pipe.scheduler, pass_step_kwargs=family.pass_step_kwargs)[1]
        self.prompts = PromptCache(options.prompt_cache_mb << 20) if options.prompt_cache_mb else None
        self.reuse = TemplateReuse(
            family, stepper, pipe.scheduler, self.identity, self.device, self.unbatched, self.prepare
        )
        self.adapters, self.stages = adapters, stages
        self.offload: TextOffload | None = None
        self._known_schedules: set[tuple[int, int, Resolution]] = set()
        self._preparing = threading.Lock()

    @property
    def cache_stats(self) -> CacheStats | None:
        """What its cache has left out; None without one."""
        cache = self._patch_cache
        return self._skipped if cache is None else cache.stats

    @property
    def _patch_cache(self) -> PatchCache | None:
        return self.stepper.model.cache if isinstance(self.stepper, PatchedStepper) else None

    def forget_cache(self) -> None:
        """Let go of all that the cache holds, and let `cache_stats` begin anew."""
        if (cache := self._patch_cache) is not None:
            cache.forget()
            cache.stats = CacheStats()
        elif self._skipped is not None:
            self._skipped = CacheStats()

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
        """Raise UsageError if the model cannot serve the request (its resolution, steps, adapters, or edit)."""
        self.check_resolution(request.resolution)
        require_adapters(request.adapters, () if self.adapters is None else self.adapters.names)
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

    def num_computed(self, request: Request) -> int:
        """How many steps of a request the model computes."""
        schedule = self._schedule_of(request)
        return request.num_steps if schedule is None else schedule.num_computed(request)

    def _schedule_of(self, request: Request) -> CacheSchedule | None:
        """Which of its steps are computed; None for all, as of an image that is to leave a record of all of them."""
        return None if request.request_id in self.reuse.trajectories else self.schedule

    def _start_schedule(self, request: Request, generator: torch.Generator | None) -> SamplerState:
        state = self.sampler.start(
            request.num_inference_steps,
            device=self.device,
            generator=generator,
            schedule_kwargs=self.family.schedule_kwargs(request),
            first_step=self.family.geometry.first_step(request),
        )
        schedule = self._schedule_of(request)
        if schedule is not None and schedule.skips(request):
            state.skip(schedule.plan_of(state.first + state.num_steps, state.first))
        return state

    def tune(self, resolutions: Iterable[Resolution], folder: Path) -> None:
        """Let the engine choose by measurement what is faster for these resolutions; `folder` keeps the result.

        Raises UsageError: the engine's options do not fit the resolutions.
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
        with self._preparing, torch.inference_mode():
            return [self._prepare(Request(0, "", resolution, steps, scale)) for resolution in resolutions]

    @torch.inference_mode()
    def prepare(self, request: Request) -> PreparedRequest:
        """Encode the text, set the schedule and draw the first latents from the request's own generator; of an edit,
        encode its image.

        The latents are drawn on the CPU whatever the device, so that a seed means the same image everywhere.
        """
        with self._preparing:
            prepared = self._prepare(request)
        if self._skipped is not None:
            self._skipped.count(WHOLE_MODEL, prepared.state.num_wanted, prepared.steps_reused)
        return prepared

    def _prepare(self, request: Request) -> PreparedRequest:
        edit, record = request.edit, self.reuse.find(request)
        template = None if edit is None or record is not None else edit.template
        if edit is not None and template is not None:
            # A twin has no records at all, and begins as an edit that reads one.
            edit = edit if self.reuse.store is None and template.kind == "noised" else replace(edit, template=None)
        is_guided = self.family.uses_guidance(request.guidance_scale)
        encode, prompts = self.family.condition, self.prompts
        with nullcontext() if self.adapters is None else self.adapters.encoding(request.adapters):
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
            steps_reused=state.num_wanted - state.num_steps,
        )
        if (trajectory := self.reuse.trajectories.get(request.request_id)) is not None:
            prepared.on_pass = trajectory.note
        self.stepper.prepare(prepared)
        # The denoise loop works on another stream.
        finish_stream(self.device)
        return prepared

    @torch.inference_mode()
    def decode(self, latents: torch.Tensor) -> "Image":
        """Turn the final latents of one request into its image. Raises RunError: it is not finite."""
        return self.family.decode(latents.to(self.dtype), self._decode)[0]

    def abort_stages(self) -> None:
        """Have what waits for processes of stages fail at once, from any thread; `close` comes next."""
        if self.stages is not None:
            self.stages.abort()

    def close(self) -> None:
        """Let go of what outlives calls, such as the processes of other ranks and of stages."""
        self.stepper.close()
        if self.stages is not None:
            self.stages.close()
