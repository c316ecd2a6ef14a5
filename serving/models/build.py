"""Puts a served model together: a loaded pipeline, its family, and the stepper that the options ask for."""

from collections.abc import Callable
from functools import partial
from typing import Any

from ...data.errors import UsageError
from ...data.tables.block_facts import BlockFacts
from ..cache.rules import load_rule
from ..core.denoiser import denoiser_of
from ..core.stepper import Stepper
from ..layout.tensors import check_kernels
from ..options import EngineOptions
from ..patched.cached_block import block_facts
from ..patched.captured import CudaRecorder
from ..patched.patched_model import PatchedModel
from ..patched.stepper import PatchedStepper
from ..plain.formats import PlainModels, compile_whole
from ..plain.stepper import PlainStepper
from ..samplers.batched import BatchedSampler
from ..samplers.single import PerRequestSampler
from .defaults import ModelDefaults
from .families import Family, build_family
from .served import ServedModel


def build_model(
    pipe: Any,
    *,
    name: str,
    fingerprint: str = "",
    defaults: ModelDefaults | None = None,
    options: EngineOptions | None = None,
) -> ServedModel:
    """Make a served model of a diffusers pipeline that is already on its device and in its dtype.

    Args:
        pipe: of a supported class; several served models may share it.
        name, fingerprint, defaults, options: of `ServedModel`.

    Raises:
        UsageError, MissingExtraError: as `build_stepper`.
    """
    defaults, options = defaults or ModelDefaults(), options or EngineOptions()
    family = build_family(pipe, max_sequence_length=defaults.max_sequence_length)
    stepper = build_stepper(pipe, family, options, partial(block_facts, pipe, name, fingerprint))
    return ServedModel(pipe, family, stepper, name=name, fingerprint=fingerprint, defaults=defaults, options=options)


def with_engine(model: ServedModel, options: EngineOptions) -> ServedModel:
    """The same loaded model, sharing its weights, served by another engine."""
    return build_model(
        model.pipe, name=model.name, fingerprint=model.fingerprint, defaults=model.defaults, options=options
    )


def build_stepper(pipe: Any, family: Family, options: EngineOptions, facts: Callable[[int], BlockFacts]) -> Stepper:
    """Make the denoise stage of a pipeline.

    Args:
        pipe: the pipeline.
        family: of the pipeline.
        options: which engine denoises, and how.
        facts: says for a patch size what a cache predictor must have been trained for.

    Raises:
        UsageError: if the patch engine cannot run the model or its scheduler; the message names what and says that
            `--engine plain` can.
        MissingExtraError: if Triton is asked for and not installed.
    """
    denoiser = denoiser_of(pipe)
    device = denoiser.device
    if options.cuda_graphs and device.type != "cuda":
        raise UsageError(f"--cuda-graphs needs a CUDA device, but the model is on {device}")
    if options.compile:
        # Also what the patch engine hands batches of one resolution to.
        compile_whole(denoiser)
    if options.engine == "plain":
        sampler = PerRequestSampler(pipe.scheduler, pass_step_kwargs=family.pass_step_kwargs)
        return PlainStepper(denoiser, family.conditions, sampler)
    check_kernels(options.kernels, device)
    order = options.order
    if order == "auto":
        order = "patch" if device.type == "cuda" or options.kernels == "triton" else "image"
    if order == "image" and options.kernels == "triton":
        raise UsageError("--kernels triton works on patches; use it with --order patch")
    patched = PatchedModel(
        denoiser, order=order, patch_size=options.patch_size, kernels=options.kernels, strategy=options.strategy
    )
    if cache := options.cache if options.cache.is_on else None:
        patched.use_cache(cache, load_rule(cache, facts(cache.patch_size), device, options.kernels))
    if options.compile:
        patched.compile()
    if options.cuda_graphs:
        patched.use_graphs(CudaRecorder(device))
    batched_sampler = BatchedSampler(pipe.scheduler, pass_step_kwargs=family.pass_step_kwargs)
    plain = PlainModels(denoiser, patched.channels_last_weights, is_compiled=options.compile)
    return PatchedStepper(patched, plain, family.conditions, batched_sampler)
