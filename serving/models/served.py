"""The served model: one diffusers pipeline, divided into its parts for the three stages.

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
from ...data.controls import require_controls
from ...data.edits import Reference
from ...data.errors import RunError, UsageError
from ...data.requests import Request
from ...data.resolution import Resolution
from ...data.tables.block_facts import WHOLE_MODEL, BlockFacts
from ...training.cache.schedule import CacheSchedule
from ..cache.patch_cache import PatchCache
from ..cache.stats import CacheStats
from ..conflicts import refuse_conflicts
from ..core.bounded_cache import BoundedCache
from ..core.checked_request import CheckedRequest
from ..core.denoiser import denoiser_of
from ..core.prepared import PreparedRequest
from ..core.progress import OnProgress, no_progress
from ..core.stepper import Stepper, Tuning
from ..core.timing import finish_stream
from ..editing.start import begin_edit, pixels_of
from ..editing.trajectory import begin_on_trajectory
from ..families import Family
from ..options import EngineOptions, why_not_recorded
from ..patched.cached_block import block_facts
from ..patched.stepper import PatchedStepper
from ..samplers.choice import choose_sampler
from ..samplers.single import NOISING, PerRequestSampler, SamplerState
from .adapters import ModelAdapters
from .controls import ModelControls, window_of
from .decoder import ImageDecoder
from .defaults import ModelDefaults
from .identity import ModelIdentity
from .offload import TextOffload, text_encoders
from .placement import name_of
from .prompt_cache import PromptCache
from .reuse import TemplateReuse
from .stage_process import StageProcesses

if TYPE_CHECKING:
    from PIL.Image import Image


MAX_TIMES_PIXELS = 64
"""Largest request, relative to the largest resolution that a model is made for; beyond it, images are useless."""
_MAX_SCHEDULES = 4096
"""Most schedules (steps, first step and sizes) that are cached as valid."""


class ServedModel:
    """One loaded model, ready to be driven by the engine. `build_model` puts it together.

    `prepare`, `stepper.step` and `decode` use disjoint parts of the pipeline (text encoders, and for edits the
    autoencoder's encoder; the denoising model; the autoencoder's decoder), so three threads may call them at the same
    time, but no two threads the same one; `prepare` waits for its turn.

    Args:
        pipe: a diffusers pipeline of a supported class, already on its device and in its dtype.
        family: family of the pipeline.
        stepper: the denoise stage.
        name: the user's name for the model, for tables and reports.
        fingerprint: fingerprint of the model's files; part of the key of cached measurements.
        defaults: default steps, guidance scale and resolutions of the model.
        options: options of the engine.
        decoder: the postprocess stage's decoder; None for the pipeline's autoencoder as it is.
        adapters: adapters that requests may name; None for none.
        controls: ControlNets that requests may name; None for none.
        stages: processes that compute the functions of the family; None if this process computes them.
        schedule: which steps are computed, for requests that allow the cache; None for all.

    Attributes:
        unbatched: reason why each request calls its own scheduler; None if one update serves all requests.
        reuse: records of templates for edits.
        prompts: cache of encoded texts; None if every text is encoded, or another process encodes them.
        references: cache of encoded references and of the images of controls, by their digests.
        offload: keeps the text encoders off the device; None if they stay there.
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
        decoder: ImageDecoder | None = None,
        adapters: ModelAdapters | None = None,
        controls: ModelControls | None = None,
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
        self.decoder = decoder or ImageDecoder(pipe.vae)
        self.unbatched = choose_sampler(pipe.scheduler, pass_step_kwargs=family.pass_step_kwargs)[1]
        self.prompts: PromptCache | None = None
        if options.prompt_cache_mb and stages is None:  # otherwise the process that encodes has one
            self.prompts = PromptCache(text_encoders(pipe), options.prompt_cache_mb << 20)
        self.references = BoundedCache[torch.Tensor](options.prompt_cache_mb << 20, lambda latents: latents.nbytes)
        self.reuse = TemplateReuse(
            family, stepper, pipe.scheduler, self.identity, self.device, self.unbatched, self.prepare
        )
        self.adapters, self.controls, self.stages = adapters, controls, stages
        self.offload: TextOffload | None = None
        self._known_schedules: set[tuple[int, int, tuple[Resolution, ...]]] = set()
        self._preparing = threading.Lock()

    @property
    def about(self) -> str:
        """What runs and why, in one line for users."""
        options, recorded = self.options, "passes recorded"
        if not options.cuda_graphs:
            features = options.features | {type(self.pipe).__name__: self.name}
            reason = why_not_recorded(self.device.type, features) or "--no-cuda-graphs"
            recorded = f"passes not recorded ({reason})" if self.device.type == "cuda" else ""
        parts = [
            f"{self.name} on {self.device} in {name_of(self.dtype)}",
            f"{self.stepper.name} engine",
            f"{self.stepper.model.order} order" if isinstance(self.stepper, PatchedStepper) else "",
            "compiled blocks" if options.compile else "",
            f"{options.model.quantize} (inexact)" if options.model.quantize else "",
            "" if self.decoder.dtype == self.dtype else f"images decoded in {name_of(self.decoder.dtype)}",
            recorded,
            f"cache {options.cache.mode}" if options.cache.is_on else "",
            f"stages {options.stages}",
        ]
        return ", ".join(filter(None, parts))

    @property
    def cache_stats(self) -> CacheStats | None:
        """Statistics of the cache; None without a cache."""
        cache = self._patch_cache
        return self._skipped if cache is None else cache.stats

    @property
    def _patch_cache(self) -> PatchCache | None:
        return self.stepper.model.cache if isinstance(self.stepper, PatchedStepper) else None

    def clear_cache(self) -> None:
        """Clear the caches of patches, texts and references, and reset their figures."""
        self.references.clear()
        if self.prompts is not None:
            self.prompts.clear()
        if (cache := self._patch_cache) is not None:
            cache.clear()
            cache.stats = CacheStats()
        elif self._skipped is not None:
            self._skipped = CacheStats()

    @property
    def identity(self) -> ModelIdentity:
        """Identity of the model, which determines its images."""
        dtype = str(self.dtype).removeprefix("torch.")
        return ModelIdentity(self.name, self.fingerprint, dtype, self.device.type, self.options)

    def check_resolution(self, resolution: Resolution) -> None:
        """Raise UsageError if the model cannot draw this resolution; the error names what is allowed."""
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
        """Raise UsageError if the model cannot serve the request: its size, steps, adapters, edit or references."""
        self.check_resolution(request.resolution)
        self.family.geometry.check_references(request, self.name)
        for reference in request.references:
            self.check_resolution(reference.resolution)
        if request.references:
            refuse_conflicts(self.options.features | {"--reference": "a request with references"})
        require_adapters(request.adapters, () if self.adapters is None else self.adapters.names)
        names = [control.name for control in request.controls]
        require_controls(names, () if self.controls is None else self.controls.names)
        if names and request.edit is not None and request.edit.template is not None:
            refuse_conflicts({"--control": "a request with controls", "--reuse": "--reuse"})
        self.family.geometry.check_edit(request)
        if request.edit is not None and not any(hasattr(self.pipe.scheduler, name) for name in NOISING):
            raise UsageError(f"scheduler {type(self.pipe.scheduler).__name__} cannot noise images, as edits need it")
        sizes = request.resolution, *(reference.resolution for reference in request.references)
        schedule = request.num_inference_steps, self.family.geometry.first_step(request), sizes
        if schedule in self._known_schedules and not request.controls:
            return
        try:
            state = self._start_schedule(request, generator=None)
            for size in sizes:
                self.stepper.check(state, self.family.geometry.latent_size(size))
            for control in request.controls:
                window_of(control, state)
        except UsageError:
            raise
        except (ValueError, IndexError, RuntimeError) as error:
            scheduler = type(self.pipe.scheduler).__name__
            raise UsageError(f"{scheduler} cannot take {request.num_inference_steps} steps: {error}") from error
        if len(self._known_schedules) >= _MAX_SCHEDULES:
            self._known_schedules.clear()
        self._known_schedules.add(schedule)

    def checked(self, request: Request, standalone_s: float | None = None) -> CheckedRequest:
        """Return a request in the form in which engines serve it, with its latency when served alone.

        Raises UsageError as `check_request`.
        """
        self.check_request(request)
        schedule = self._schedule_of(request)
        num_computed = request.num_steps if schedule is None else schedule.num_computed(request)
        return CheckedRequest(request, num_computed, standalone_s)

    def _schedule_of(self, request: Request) -> CacheSchedule | None:
        """Return the schedule of computed steps; None for all steps, as for an image whose passes are recorded."""
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

    def tune(
        self,
        resolutions: Iterable[Resolution],
        folder: Path,
        max_batch_size: int = 0,
        on_progress: OnProgress = no_progress,
    ) -> None:
        """Measure the faster choices of the engine for these resolutions; `folder` keeps the results.

        If passes are recorded, those of batches of up to `max_batch_size` requests are recorded now. `on_progress` is
        that of `Tuning`.

        Raises:
            UsageError: the engine's options do not fit the resolutions.
            RunError: the compiled model fails.
        """
        distinct = list(dict.fromkeys(resolutions))
        self.stepper.tune(
            replace(self.tuning(distinct, folder), max_batch_size=max_batch_size, on_progress=on_progress)
        )
        self._tune_decoder(distinct, max_batch_size, on_progress)
        if self.options.compile:
            # Compile a graph for batches of one resolution, of two, and so on; otherwise later requests wait for it.
            for count in range(1, len(distinct) + 1):
                failures = self.stepper.step(self.examples(distinct[:count]))
                if failures:
                    raise RunError(f"--compile: {next(iter(failures.values()))}")

    @torch.inference_mode()
    def _tune_decoder(self, resolutions: Sequence[Resolution], max_batch_size: int, on_progress: OnProgress) -> None:
        """Compile the decoder, and record its passes for each size and number of images, the largest first."""
        captured, generator = self.decoder.captured, torch.Generator().manual_seed(0)
        if captured is None or not max_batch_size or self.stages is not None:
            return
        sizes = sorted(set(resolutions), key=lambda size: size.pixels, reverse=True)
        buckets = [
            (size, 1 << power)
            for size in sizes
            for power in reversed(range(min(self.num_decoded(size), max_batch_size).bit_length()))
        ]
        with captured.at_once():
            for number, (size, rows) in enumerate(buckets):
                on_progress("recording", number, len(buckets))
                shape = rows, self.family.latent_channels, *self.family.geometry.latent_size(size)
                latents = torch.randn(shape, generator=generator).to(self.device, self.dtype)
                self.family.decode(latents, self.decoder.run)
        finish_stream(self.device)

    def block_facts(self, patch_size: int | None) -> BlockFacts:
        """Return the conditions under which a block profile is valid, and which a cache predictor must match.

        None stands for the default patch size.
        """
        return block_facts(self.pipe, self.name, self.fingerprint, patch_size)

    def tuning(self, resolutions: Sequence[Resolution], folder: Path) -> Tuning:
        """Return the target of measurements for these resolutions."""
        sizes = [self.family.geometry.latent_size(resolution) for resolution in resolutions]
        return Tuning(sizes, folder, self.fingerprint, lambda: self.examples(resolutions))

    def examples(self, resolutions: Iterable[Resolution]) -> list[PreparedRequest]:
        """Prepare a request of each resolution, with the model's default settings, for measurements."""
        steps, scale = self.defaults.num_inference_steps, self.defaults.guidance_scale
        with self._preparing, torch.inference_mode():
            return [self._prepare(Request(0, "", resolution, steps, scale)) for resolution in resolutions]

    @torch.inference_mode()
    def prepare(self, request: Request) -> PreparedRequest:
        """Encode the text, set the schedule and draw the first latents from the request's own generator.

        The image of an edit is encoded, too. Latents are drawn on the CPU whatever the device, so that a seed gives the
        same image everywhere.
        """
        with self._preparing:
            prepared = self._prepare(request)
        if self._skipped is not None:
            self._skipped.count(WHOLE_MODEL, prepared.state.num_requested, prepared.steps_reused)
        return prepared

    def _prepare(self, request: Request) -> PreparedRequest:
        edit, record = request.edit, self.reuse.find(request)
        template = None if edit is None or record is not None else edit.template
        if edit is not None and template is not None:
            # Without a store, an edit of a noised template begins like one that reads a record, as its exact twin.
            edit = edit if self.reuse.store is None and template.kind == "noised" else replace(edit, template=None)
        is_guided = self.family.uses_guidance(request.guidance_scale)
        adapting = nullcontext() if self.adapters is None else self.adapters.encoding(request.adapters)
        with adapting, nullcontext() if self.prompts is None else self.prompts.answering(request.adapters):
            conditioning = self.family.condition(request, is_guided)
        generator = torch.Generator("cpu").manual_seed(request.seed)
        state = self._start_schedule(request, generator)
        dtype, known = self.family.noise_dtype or conditioning["text"].dtype, None
        if edit is None:
            shape = (1, self.family.latent_channels, *self.family.geometry.latent_size(request.resolution))
            latents = randn_tensor(shape, generator=generator, device=self.device, dtype=dtype)
            if self.family.scales_noise:
                latents = latents * state.scheduler.init_noise_sigma
        elif record is not None and edit.template is not None and edit.template.kind == "trajectory":
            latents, known = begin_on_trajectory(
                record.latents(state.first),
                edit,
                state,
                generator,
                mask=self.family.geometry.mask_weights(edit.mask),
                scales_noise=self.family.scales_noise,
                dtype=dtype,
            )
        else:
            latents, known = begin_edit(
                edit,
                self.family.encode,
                state,
                generator,
                mask=self.family.geometry.mask_weights(edit.mask),
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
            known_area=known,
            template=record,
            guided_norm=self.family.guided_norm,
            neutral_scale=self.family.neutral_scale,
            steps_reused=state.num_requested - state.num_steps,
            references=tuple(map(self._encode_reference, request.references)),
        )
        if self.controls is not None:
            prepared.controls = self.controls.prepare(request.controls, state, self.references)
        if (trajectory := self.reuse.trajectories.get(request.request_id)) is not None:
            prepared.on_pass = trajectory.note
        self.stepper.prepare(prepared)
        # The denoise loop works on another stream.
        finish_stream(self.device)
        return prepared

    def _encode_reference(self, reference: Reference) -> torch.Tensor:
        """Return the latents of a reference in the model's dtype, encoded unless they are known."""
        found = self.references.find(key := reference.digest)
        if found is None:
            # Families that take references encode the mode of the autoencoder's posterior, and draw nothing.
            found = self.family.encode(pixels_of(reference.image, self.device), torch.Generator("cpu")).to(self.dtype)
            self.references.keep(key, found)
        return found

    @torch.inference_mode()
    def decode(self, latents: torch.Tensor) -> "Image":
        """Turn the final latents of one request into its image. Raises RunError: it is not finite, or a single colour.

        Latents are (1, channels, height / 8, width / 8).
        """
        return self.decode_together([latents])[0]

    def num_decoded(self, resolution: Resolution) -> int:
        """Return the number of images of this resolution that one pass decodes at most."""
        return self.decoder.num_at_once(resolution.pixels)

    @torch.inference_mode()
    def decode_together(self, latents: Sequence[torch.Tensor]) -> "Sequence[Image]":
        """Turn the final latents of requests of one size into their images, in one pass. Raises as `decode`."""
        return self.family.decode(torch.cat(list(latents)).to(self.dtype), self.decoder)

    def abort_stages(self) -> None:
        """Fail pending calls of stage processes at once, from any thread; `close` must follow."""
        if self.stages is not None:
            self.stages.abort()

    def close(self) -> None:
        """Release resources that outlive calls, such as the processes of other ranks and of stages."""
        self.stepper.close()
        if self.stages is not None:
            self.stages.close()
