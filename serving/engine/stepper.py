"""Which engine denoises, and with what: the patch engine, or plain diffusers as the baseline.

This module imports no torch, so that options are checked before anything heavy is loaded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from ...data.checks import require_counts
from ...data.errors import UsageError
from ..cache.options import CacheOptions

if TYPE_CHECKING:
    from ..core.prepared import PreparedRequest
    from ..models.served import ServedModel
    from ..samplers.single import SamplerState

EngineName = Literal["patched", "plain"]
OrderName = Literal["auto", "image", "patch"]
StrategyName = Literal["auto", "stitch", "regroup"]
KernelsName = Literal["auto", "torch", "triton"]
PATCH_OPTIONS = ("order", "patch_size", "strategy", "kernels", "compile", "cuda_graphs")
"""Names of what `EngineOptions` says beside the engine and the cache."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a served model denoises; all but `engine` and `compile` are for the patch engine only.

    Attributes:
        engine: `patched`, or `plain`: one forward pass of unmodified diffusers per resolution.
        order: how tokens are packed (see `serving.layout.packing`); auto is image on a CPU and patch on CUDA.
        patch_size: side of a patch in latent pixels; None for the largest common divisor of the sizes in a batch.
        strategy: how convolutions see beyond a patch; auto uses what was measured, and else regroups.
        kernels: one of `kernels.launch.KERNELS`.
        compile: run transformer blocks through torch.compile; the plain engine, the whole model.
        cuda_graphs: record the launches of a pass for each batch composition, and play them back.
        cache: whether patches reuse what blocks gave at earlier steps, and how.

    Raises:
        UsageError: if a value is not allowed, or an option of the patch engine is given for the plain one.
    """

    engine: EngineName = "patched"
    order: OrderName = "auto"
    patch_size: int | None = None
    strategy: StrategyName = "auto"
    kernels: KernelsName = "auto"
    compile: bool = False
    cuda_graphs: bool = False
    cache: CacheOptions = field(default_factory=CacheOptions)

    def __post_init__(self) -> None:
        choices = {"engine": EngineName, "order": OrderName, "strategy": StrategyName, "kernels": KernelsName}
        for name, allowed in choices.items():
            if getattr(self, name) not in get_args(allowed):
                raise UsageError(
                    f"{name} is {getattr(self, name)!r}, but it must be one of {', '.join(get_args(allowed))}"
                )
        require_counts({"patch size": self.patch_size})
        given = {
            "--order": self.order != "auto",
            "--patch-size": self.patch_size is not None,
            "--strategy": self.strategy != "auto",
            "--kernels": self.kernels != "auto",
            "--cuda-graphs": self.cuda_graphs,
            "--cache": self.cache.is_on,
        }
        if self.engine == "plain" and any(given.values()):
            raise UsageError(
                f"{', '.join(name for name, is_given in given.items() if is_given)}: only for --engine patched"
            )
        if self.compile and self.cache.is_on:
            raise UsageError("--compile makes graphs of whole blocks, but with --cache each step takes other patches")
        if self.cuda_graphs and self.cache.is_on:
            raise UsageError("--cuda-graphs records whole passes, but with --cache each step computes other patches")

    @property
    def patch_options(self) -> dict[str, Any]:
        """All but the engine and the cache, by name."""
        return {name: getattr(self, name) for name in PATCH_OPTIONS}


@dataclass(frozen=True, slots=True)
class Tuning:
    """What a denoise stage is to be fast for.

    Attributes:
        sizes: (height, width) of the latents.
        folder: where measurements are kept.
        fingerprint: of the model's files.
        examples: prepares a request of each size.
    """

    sizes: Sequence[tuple[int, int]]
    folder: Path
    fingerprint: str
    examples: "Callable[[], Sequence[PreparedRequest]]"


class Stepper(Protocol):
    """The denoise stage. One instance serves one model; one thread at a time calls `step`."""

    @property
    def name(self) -> str: ...

    def tune(self, target: Tuning) -> None:
        """Measure what is faster for such requests, or read what was measured before.

        Raises:
            UsageError: if the engine's options do not fit the sizes.
            RunError: if a file in the folder is damaged.
        """
        ...

    def check(self, state: "SamplerState", size: tuple[int, int]) -> None:
        """Raise UsageError if the engine cannot take the steps of this schedule, or latents of this (height, width)."""
        ...

    def prepare(self, prepared: "PreparedRequest") -> None:
        """Get a request ready for its first `step`; called from the prepare stage, beside the denoise loop."""
        ...

    def step(self, active: Sequence["PreparedRequest"]) -> dict[int, str]:
        """Take one denoising step of every active request, each at its own timestep; moves their states on.

        The latents of a request are up to date in its `latents` once it has finished, failed, or left the active set
        and another step was taken.

        Returns:
            The requests that failed, by id, with the reason. The others have taken their step.
        """
        ...


def build_stepper(model: "ServedModel", options: EngineOptions) -> Stepper:
    """Make the denoise stage of a model.

    Raises:
        UsageError: if the patch engine cannot run the model or its scheduler; the message names what and says that
            `--engine plain` can.
        MissingExtraError: if triton is asked for and not installed.
    """
    if options.cuda_graphs and model.device.type != "cuda":
        raise UsageError(f"--cuda-graphs needs a CUDA device, but the model is on {model.device}")
    if options.compile:
        from ..patched.compiled import compile_whole

        # Also what the patch engine hands batches of one resolution to.
        compile_whole(model.denoiser)
    if options.engine == "plain":
        from .plain_stepper import PlainStepper

        return PlainStepper(model)
    from ..layout.tensors import check_kernels
    from ..patched.patched_model import PatchedModel
    from ..patched.plain_models import PlainModels
    from ..patched.stepper import PatchedStepper
    from ..samplers.batched import BatchedSampler

    check_kernels(options.kernels, model.device)
    order = options.order
    if order == "auto":
        order = "patch" if model.device.type == "cuda" or options.kernels == "triton" else "image"
    if order == "image" and options.kernels == "triton":
        raise UsageError("--kernels triton works on patches; use it with --order patch")
    patched = PatchedModel(
        model.denoiser,
        order=order,
        patch_size=options.patch_size,
        kernels=options.kernels,
        strategy=options.strategy,
    )
    if options.cache.is_on:
        from ..cache.rules import load_rule

        patched.use_cache(options.cache, load_rule(options.cache, model))
    if options.compile:
        patched.compile()
    if options.cuda_graphs:
        from ..patched.captured import CudaRecorder

        patched.use_graphs(CudaRecorder(model.device))
    sampler = BatchedSampler(model.pipe.scheduler, pass_step_kwargs=model.family.pass_step_kwargs)
    plain = PlainModels(model.denoiser, patched.channels_last_weights, is_compiled=options.compile)
    return PatchedStepper(patched, plain, model.family, sampler)
