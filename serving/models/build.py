"""Building of a served model from a loaded pipeline, its family, and the stepper that the options select."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...data.errors import MissingExtraError, UsageError
from ...data.run_facts import usable_cores
from ...data.tables.block_facts import BlockFacts, ProfiledModel
from ...kernels.launch import KERNELS, is_triton_installed, use_triton
from ...training.cache.schedule import CacheSchedule
from ..cache.options import CacheOptions
from ..cache.rules import load_rule
from ..conflicts import refuse_conflicts
from ..core.captured import CapturedPasses, Recorder
from ..core.controls import NO_NETS, Nets
from ..core.cuda_graphs import CudaRecorder
from ..core.denoiser import denoiser_of
from ..core.stepper import Stepper
from ..families import Decode, Family, build_family
from ..options import EngineOptions, order_on, stages_on, why_not_recorded
from ..parallel.launch import ProcessRanks
from ..parallel.recovery import RankGroup
from ..parallel.stepper import ParallelStepper
from ..parallel.virtual import VirtualRanks
from ..patched.cached_block import block_facts
from ..patched.patched_model import PatchedModel
from ..patched.stepper import PatchedStepper
from ..plain.formats import PlainModels
from ..plain.stepper import PlainStepper
from ..samplers.batched import BatchedSampler
from ..samplers.choice import choose_sampler
from ..samplers.single import PerRequestSampler
from .adapters import ModelAdapters
from .changes import adapted_fingerprint
from .controls import ModelControls
from .decoder import ImageDecoder
from .defaults import ModelDefaults
from .placement import name_of
from .served import ServedModel
from .stage_process import StageProcesses


def build_model(
    pipe: Any,
    *,
    name: str,
    fingerprint: str = "",
    defaults: ModelDefaults | None = None,
    options: EngineOptions | None = None,
    adapters: ModelAdapters | None = None,
    controls: ModelControls | None = None,
    stages: StageProcesses | None = None,
) -> ServedModel:
    """Build a `ServedModel` from a pipeline of a supported class, which several models may share.

    `adapters` are those loaded into the pipeline, `controls` its ControlNets, and `stages` the processes that encode
    and decode for it. Raises UsageError if an option does not work with the pipeline, and what `build_stepper` raises.
    """
    given = options or EngineOptions()
    defaults, options = defaults or ModelDefaults(), given
    family = build_family(pipe, max_sequence_length=defaults.max_sequence_length)
    family = replace(family, geometry=family.geometry.with_references(defaults.reference_size, defaults.resolutions))
    features = options.features | {type(pipe).__name__: f"a {type(pipe).__name__}"}
    refuse_conflicts(features)
    if options.cuda_graphs is None:
        options = replace(options, cuda_graphs=why_not_recorded(denoiser_of(pipe).device.type, features) is None)
    if options.stages == "auto":
        options = replace(options, stages=stages_on(denoiser_of(pipe).device.type, usable_cores()))
    facts, schedule = partial(block_facts, pipe, name, fingerprint), None
    if options.cache.mode == "schedule":
        schedule = load_schedule(pipe, name, fingerprint, options.cache)
    if options.cache.is_of_patches:
        suited = facts(options.cache.patch_size).patch_size
        options = replace(options, cache=replace(options.cache, patch_size=suited))
    nets = {} if controls is None else controls.nets
    stepper = build_stepper(pipe, family, options, facts, fingerprint, nets)
    shared = stepper.group.decoder if isinstance(stepper, ParallelStepper) else None
    decoder = build_decoder(pipe, given, defaults, shared)
    if stages is not None:
        family = stages.use_processes(family, denoiser_of(pipe).device)
    return ServedModel(
        pipe,
        family,
        stepper,
        name=name,
        fingerprint=fingerprint,
        defaults=defaults,
        options=options,
        decoder=decoder,
        adapters=adapters,
        controls=controls,
        stages=stages,
        schedule=schedule,
    )


def build_decoder(
    pipe: Any, options: EngineOptions, defaults: ModelDefaults, shared: Decode | None = None
) -> ImageDecoder:
    """Build the decoder of a pipeline; `shared` is that of the ranks, which decodes in its place.

    Unless a format is chosen, images are decoded in the autoencoder's. Pipelines keep some autoencoders in float32,
    beside a model of 16 bits, because they overflow in float16; such a one decodes in the format that its model's
    `psctl.json` names. On CUDA, convolutions have channels last, the form in which tensor cores read them.
    """
    vae, dtype = pipe.vae, options.decoder_dtype
    is_upcast = vae.dtype == torch.float32 != denoiser_of(pipe).dtype
    if dtype == "auto":
        dtype = (defaults.decoder_dtype if is_upcast else None) or name_of(vae.dtype)
    is_cuda = vae.device.type == "cuda"
    return ImageDecoder(
        vae,
        shared,
        dtype=getattr(torch, dtype),
        is_channels_last=is_cuda,
        is_compiled=is_cuda and options.compile,
        # With memory of their own: another thread replays them while a step is denoised. Options that exclude recorded
        # steps do not matter here.
        captured=CapturedPasses(CudaRecorder(vae.device)) if is_cuda and options.cuda_graphs is not False else None,
        most_at_once=options.decode_batch,
    )


def load_schedule(pipe: Any, name: str, fingerprint: str, cache: CacheOptions) -> CacheSchedule:
    """Load the schedule that the options name. Raises UsageError: it is missing, damaged, or of another model."""
    if cache.schedule is None:
        raise UsageError("--cache schedule needs a list of steps (psctl train-predictor schedule) or --cache-schedule")
    schedule = CacheSchedule.load(cache.schedule)
    difference = schedule.facts.difference(ProfiledModel(name, fingerprint, type(pipe.scheduler).__name__))
    if difference is not None:
        raise UsageError(f"{cache.schedule} {difference}; run psctl train-predictor schedule --model {name}")
    return schedule


def with_engine(model: ServedModel, options: EngineOptions) -> ServedModel:
    """Return the same loaded model, with shared weights, served by another engine."""
    return build_model(
        model.pipe,
        name=model.name,
        fingerprint=model.fingerprint,
        defaults=model.defaults,
        options=options,
        adapters=model.adapters,
        controls=model.controls,
        stages=model.stages if options.stages == "processes" else None,
    )


def as_plain(model: ServedModel, *, is_eager: bool = False) -> ServedModel:
    """Return the same loaded model on plain diffusers, the baseline.

    This is the model itself if it already runs so. Compilation, recorded passes and the prompt cache are those of the
    model, unless `is_eager`: then it has none of them.
    """
    options = model.options
    efforts: dict[str, Any] = {
        "compile": options.compile and not is_eager,
        "cuda_graphs": bool(options.cuda_graphs) and not is_eager,
        "prompt_cache_mb": 0 if is_eager else options.prompt_cache_mb,
        "stages": "auto" if options.stages == "processes" else options.stages,
        "cache": CacheOptions(),
    }
    if options.engine == "plain" and replace(options, **efforts) == options:
        return model
    decoding = {"decoder_dtype": options.decoder_dtype, "decode_batch": options.decode_batch}
    return with_engine(model, EngineOptions("plain", **efforts, **decoding))


def without_cache(model: ServedModel) -> ServedModel:
    """Return the same loaded model without a cache, or the model itself if it has none."""
    return with_engine(model, replace(model.options, cache=CacheOptions())) if model.options.cache.is_on else model


def build_stepper(
    pipe: Any,
    family: Family,
    options: EngineOptions,
    facts: Callable[[int | None], BlockFacts],
    fingerprint: str = "",
    nets: Nets = NO_NETS,
) -> Stepper:
    """Build the denoise stage of a pipeline.

    Args:
        pipe: the pipeline.
        family: its family.
        options: options of the engine.
        facts: returns the conditions that a cache predictor must match, for a patch size.
        fingerprint: fingerprint that ranks must find in the model's folder.
        nets: ControlNets beside it, which ranks do not have.

    Raises:
        UsageError: if the patch engine cannot run the model; the message names the cause and points to
            `--engine plain`. Or the scheduler draws noise that does not depend on a seed.
        MissingExtraError: if Triton is requested and not installed.
    """
    denoiser = denoiser_of(pipe)
    device, skips = denoiser.device, options.cache.mode == "schedule"
    if options.cuda_graphs:
        check_graphs(device)
    recorder = CudaRecorder(device) if options.cuda_graphs else None
    if options.engine == "plain":
        captured = None if recorder is None else CapturedPasses(recorder)
        plain = PlainModels(denoiser, is_compiled=options.compile, captured=captured, nets=nets)
        return build_plain(pipe, family, plain, skips=skips)
    if options.engine == "parallel":
        captured = None if recorder is None else CapturedPasses(recorder)
        plain = build_plain(pipe, family, PlainModels(denoiser, captured=captured), skips=skips)
        return parallel_stepper(pipe, plain, options, adapted_fingerprint(options.model, fingerprint), recorder)
    check_kernels(options.kernels, device)
    order = order_on(device.type, options.kernels) if options.order == "auto" else options.order
    patched = PatchedModel(
        denoiser,
        order=order,
        patch_size=options.patch_size,
        kernels=options.kernels,
        strategy=options.strategy,
        nets=nets,
    )
    if cache := options.cache if options.cache.is_of_patches else None:
        served = facts(cache.patch_size)
        rule = load_rule(cache, served, device, options.kernels)
        patched.use_cache(replace(cache, patch_size=served.patch_size), rule)
    if options.compile:
        patched.compile()
    if recorder is not None:
        patched.use_graphs(recorder)
    sampler = choose_sampler(pipe.scheduler, pass_step_kwargs=family.pass_step_kwargs, skips=skips)[0]
    plain = PlainModels(denoiser, patched.channels_last_weights, is_compiled=options.compile, nets=nets)
    return PatchedStepper(patched, plain, family.conditions, sampler)


def parallel_stepper(
    pipe: Any, plain: PlainStepper, engine: EngineOptions, fingerprint: str, recorder: Recorder | None = None
) -> ParallelStepper:
    """Return the denoise stage on ranks: virtual ones, or processes that load the same files and change them alike.

    Raises UsageError: the model has no folder; or as `ProcessRanks`.
    """
    options, changes = engine.parallel, asdict(engine.model.from_anywhere())
    denoiser, autoencoder = denoiser_of(pipe), pipe.vae if options.decode == "strips" else None
    if options.is_virtual:
        group: RankGroup = VirtualRanks(denoiser, options, autoencoder, recorder)
    else:
        folder = pipe.name_or_path
        if folder is None or not Path(folder).is_dir():
            raise UsageError("the ranks of --parallel load the model from its folder, and this one has none")
        group = ProcessRanks(denoiser, fingerprint, str(folder), options, autoencoder, changes, recorder)
    return ParallelStepper(group, options, plain.models, plain.conditions, plain.sampler, plain.alone)


def build_plain(pipe: Any, family: Family, models: PlainModels, *, skips: bool = False) -> PlainStepper:
    """Return the denoise stage of plain diffusers, with the batched sampler if it covers the pipeline's scheduler.

    `skips` says whether requests may skip steps, see `choose_sampler`.
    """
    options = {"pass_step_kwargs": family.pass_step_kwargs}
    sampler = choose_sampler(pipe.scheduler, **options, skips=skips)[0]
    batched = sampler if isinstance(sampler, BatchedSampler) else None
    return PlainStepper(models, family.conditions, batched, PerRequestSampler(pipe.scheduler, **options))


def check_graphs(device: torch.device) -> None:
    """Raise UsageError if passes cannot be recorded on this device."""
    if device.type != "cuda":
        raise UsageError(f"--cuda-graphs needs a CUDA device, but the model is on {device}")


def check_kernels(kernels: str, device: torch.device) -> None:
    """Check a user's choice of kernels at the start, rather than at the first step.

    Raises:
        UsageError: `kernels` is not one of `KERNELS`, or is "triton" on a device that triton does not run on.
        MissingExtraError: `kernels` is "triton", and triton is not installed.
    """
    if kernels not in KERNELS:
        raise UsageError(f"kernels is {kernels!r}, but it must be one of {', '.join(KERNELS)}")
    if kernels == "triton" and not is_triton_installed():
        raise MissingExtraError("triton", "gpu")
    try:
        use_triton(kernels, device)
    except ModuleNotFoundError as error:
        raise MissingExtraError("triton", "gpu") from error
    except ValueError as error:
        raise UsageError(f"{error}; use --kernels torch or auto") from error
