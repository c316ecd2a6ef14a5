"""Options of the engine: the patch engine, plain diffusers as the baseline, or several devices at once.

This module imports no torch, so that options are checked before anything heavy is loaded.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from ..data.adapters import check_adapter_name
from ..data.checks import require_counts
from ..data.errors import UsageError
from ..data.templates import Keep, LoadPlan
from .cache.options import CacheOptions
from .conflicts import conflict_in, refuse_conflicts
from .parallel.options import ParallelOptions
from .samplers.names import SamplerName

EngineName = Literal["patched", "plain", "parallel"]
OrderName = Literal["auto", "image", "patch"]
StrategyName = Literal["auto", "stitch", "regroup"]
KernelsName = Literal["auto", "torch", "triton"]
OffloadName = Literal["none", "text"]
QuantizeName = Literal["int8", "fp8"]
DecoderDtype = Literal["auto", "float32", "bfloat16", "float16"]
StagesName = Literal["auto", "threads", "processes", "inline"]
Calibrate = Literal["auto", "off", "force"]
"""Whether latencies are measured at the start: those that the workspace lacks, none, or all of them again."""
CALIBRATE_S = 60.0
"""Seconds after which no further measurement at the start of a server begins."""
RecordTemplates = Literal["first", "never"]
"""Whether a server records the template of an edit that finds no record, or only reads existing records."""
_FEW_CORES = 4
"""Most cores for which `inline` is the default. Measured with 2 cores (docs/benchmarks/serving.md), where `inline`
serves more, and 1; a stage takes only a small share of many cores."""
PATCH_OPTIONS = ("order", "patch_size", "strategy", "kernels", "compile", "cuda_graphs")
"""Names of the options of the patch engine in `EngineOptions`, without the cache."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options for reading records over a slow link.

    Attributes:
        link_mbps: megabytes (10^6 bytes) per second at which they are read, each step from its file.
        plan: plan of which parts of passes read them.
    """

    link_mbps: float
    plan: LoadPlan = "optimal"


@dataclass(frozen=True, slots=True)
class TemplateTiers:
    """Limits on the size of template records, in megabytes (10^6 bytes).

    Attributes:
        memory_mb: limit on whole records in memory; with a GPU, in pinned memory.
        staging_mb: limit on steps on the device that the present or the next pass reads.
        disk_mb: limit on the folder.

    Raises:
        UsageError: a limit is negative, or `staging_mb` or `disk_mb` is 0.
    """

    memory_mb: float = 2_000.0
    staging_mb: float = 4_000.0
    disk_mb: float = 20_000.0

    def __post_init__(self) -> None:
        if not self.memory_mb >= 0:
            raise UsageError(f"--template-memory-mb is {self.memory_mb:g}, but it must be 0 or more")
        for name, value in (("staging", self.staging_mb), ("disk", self.disk_mb)):
            if not value > 0:
                raise UsageError(f"--template-{name}-mb is {value:g}, but it must be above 0")


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """Options of a server for records of templates.

    Attributes:
        record: see `RecordTemplates`.
        keep: which tensors records hold, see `Keep`.
        loads: options for reading them over a slow link; None to read everything that a pass can use, at full speed.
        tiers: limits on their size.
    """

    record: RecordTemplates = "first"
    keep: Keep = "all"
    loads: LoadOptions | None = None
    tiers: TemplateTiers = TemplateTiers()


@dataclass(frozen=True, slots=True)
class Lora:
    """An adapter to be fused into the weights.

    Attributes:
        path: path of its file.
        scale: factor of its change of the weights.
    """

    path: Path
    scale: float

    @classmethod
    def parse(cls, text: str) -> "Lora":
        """Read PATH or PATH:SCALE. Raises UsageError: the scale is not a number."""
        path, colon, scale = text.rpartition(":")
        if not colon:
            return cls(Path(text).expanduser(), 1.0)
        try:
            found = float(scale)
        except ValueError as error:
            raise UsageError(f"--lora {text}: {scale!r} is not a number; give PATH or PATH:SCALE") from error
        if not math.isfinite(found):
            raise UsageError(f"--lora {text}: the scale must be finite")
        return cls(Path(path).expanduser(), found)


@dataclass(frozen=True, slots=True)
class NamedFile:
    """An adapter or a ControlNet that requests may name.

    Attributes:
        name: its name in requests.
        path: path of its file, or of its folder.
    """

    name: str
    path: Path

    @classmethod
    def parse(cls, text: str, what: str = "adapter") -> "NamedFile":
        """Read NAME=PATH. Raises UsageError: the form or the name is not valid."""
        name, equals, path = text.partition("=")
        if not equals or not path:
            raise UsageError(f"--{what.lower()} {text}: give NAME=PATH")
        check_adapter_name(name, what)
        return cls(name, Path(path).expanduser())


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Changes of a model before it is served.

    Attributes:
        sampler: sampler in place of the model's own; None keeps it.
        lora: adapters that are fused into the weights, each as PATH or PATH:SCALE.
        adapter: adapters that requests may name, each as NAME=PATH; they leave the weights unchanged.
        controlnet: ControlNets that requests may name, each as NAME=PATH of a folder of diffusers.
        quantize: `int8`: the weights of the denoising model's linear layers are in 8 bits, and multiply in the model's
            dtype. `fp8`: projections and feed-forward layers multiply in 8-bit floating point (`core.float8`). None:
            neither.

    Raises:
        UsageError: if a value is not allowed.
    """

    sampler: SamplerName | None = None
    lora: list[str] | None = field(default=None, hash=False)
    adapter: list[str] | None = field(default=None, hash=False)
    controlnet: list[str] | None = field(default=None, hash=False)
    quantize: QuantizeName | None = None

    def __post_init__(self) -> None:
        if self.sampler is not None and self.sampler not in get_args(SamplerName):
            raise UsageError(f"sampler is {self.sampler!r}, but it must be one of {', '.join(get_args(SamplerName))}")
        if self.quantize is not None and self.quantize not in get_args(QuantizeName):
            raise UsageError(
                f"quantize is {self.quantize!r}, but it must be one of {', '.join(get_args(QuantizeName))}"
            )
        # Parsed now, before anything is loaded.
        _ = self.loras
        for option, files in (("adapter", self.adapters), ("controlnet", self.controlnets)):
            names = [each.name for each in files]
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise UsageError(f"--{option} {twice} is given twice: each needs a name of its own")

    @property
    def is_any(self) -> bool:
        """Whether anything is changed for all requests."""
        return self.sampler is not None or bool(self.lora) or self.quantize is not None

    @property
    def loras(self) -> tuple[Lora, ...]:
        """The adapters that are fused."""
        return tuple(Lora.parse(each) for each in self.lora or ())

    @property
    def adapters(self) -> tuple[NamedFile, ...]:
        """The adapters that requests may name."""
        return tuple(NamedFile.parse(each) for each in self.adapter or ())

    @property
    def controlnets(self) -> tuple[NamedFile, ...]:
        """The ControlNets that requests may name."""
        return tuple(NamedFile.parse(each, "ControlNet") for each in self.controlnet or ())

    def from_anywhere(self) -> "ModelOptions":
        """Return the same options with absolute paths, for a process with another working folder."""
        loras = [f"{each.path.absolute()}:{each.scale}" for each in self.loras]
        adapters, nets = (
            [f"{each.name}={each.path.absolute()}" for each in files] or None
            for files in (self.adapters, self.controlnets)
        )
        return replace(self, lora=loras or None, adapter=adapters, controlnet=nets)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of the engine; order, patch size, strategy, kernels and patch cache apply only to the patch engine.

    Attributes:
        engine: `patched`; `plain`: one forward pass of unmodified diffusers per resolution; or `parallel`: several
            devices share each image, one resolution at a time.
        order: order of packed tokens (see `serving.layout.packing`); auto is image on a CPU and patch on CUDA.
        patch_size: side of a patch in latent pixels; None for the greatest common divisor of the sizes in a batch.
        strategy: how convolutions see beyond a patch; auto uses the faster measured strategy, by default `regroup`.
        kernels: one of `kernels.launch.KERNELS`.
        compile: run transformer blocks through torch.compile.
        cuda_graphs: record the launches of passes, and replay them (`core.captured`); None to record them on CUDA,
            unless another option excludes it (`why_not_recorded`).
        cache: options of the cache, which reuses results of earlier steps.
        parallel: how several devices share an image; given with more than one rank, the engine is `parallel`.
        model: changes of the model.
        prompt_cache_mb: size of the cache for what encoders returned for earlier texts; 0 encodes every text.
        offload: `text`: text encoders are on the device only while they encode.
        stages: where texts are encoded and images decoded: in `threads` beside the denoise loop, in separate
            `processes`, or `inline`, between its steps, which is the baseline of InstGenIE's section 4.3; auto chooses
            by `stages_on`.
        decoder_dtype: number format in which images are decoded; auto chooses by `models.build.build_decoder`.
        decode_batch: largest number of images of one size that are decoded together, rounded down to 1, 2, 4 or 8; None
            for what a tenth of a GPU's memory allows, and 1 on a CPU, where it delays the first of them and saves
            little.

    Raises:
        UsageError: if a value is not allowed, or two options do not work together (`serving.conflicts`).
    """

    engine: EngineName = "patched"
    order: OrderName = "auto"
    patch_size: int | None = None
    strategy: StrategyName = "auto"
    kernels: KernelsName = "auto"
    compile: bool = False
    cuda_graphs: bool | None = None
    cache: CacheOptions = field(default_factory=CacheOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    prompt_cache_mb: int = 256
    offload: OffloadName = "none"
    stages: StagesName = "auto"
    decoder_dtype: DecoderDtype = "auto"
    decode_batch: int | None = None

    def __post_init__(self) -> None:
        choices = {
            "engine": EngineName,
            "order": OrderName,
            "strategy": StrategyName,
            "kernels": KernelsName,
            "offload": OffloadName,
            "stages": StagesName,
            "decoder_dtype": DecoderDtype,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in get_args(allowed):
                raise UsageError(
                    f"{name} is {getattr(self, name)!r}, but it must be one of {', '.join(get_args(allowed))}"
                )
        require_counts({"patch size": self.patch_size, "decode batch": self.decode_batch})
        if self.prompt_cache_mb < 0:
            raise UsageError(f"the prompt cache has {self.prompt_cache_mb} MB, but it must be 0 at the least")
        if self.engine == "parallel" and not self.parallel.is_on:
            raise UsageError("--engine parallel needs --parallel with two ranks at least, as in --parallel 2")
        refuse_conflicts(self.features)

    @property
    def features(self) -> dict[str, str]:
        """Features in use, by their name in `serving.conflicts.CONFLICTS`, each as users write it."""
        is_used = {
            f"--engine {self.engine}": True,
            "--parallel": self.parallel.is_on,
            "--parallel-decode strips": self.parallel.is_on and self.parallel.decode == "strips",
            "--order": self.order != "auto",
            f"--order {self.order}": True,
            "--patch-size": self.patch_size is not None,
            "--strategy": self.strategy != "auto",
            "--kernels": self.kernels != "auto",
            f"--kernels {self.kernels}": True,
            "--compile": self.compile,
            "--cuda-graphs": bool(self.cuda_graphs),
            "--sampler": self.model.sampler is not None,
            "--lora": bool(self.model.lora),
            "--adapter": bool(self.model.adapter),
            "--controlnet": bool(self.model.controlnet),
            "--quantize": self.model.quantize is not None,
            f"--offload {self.offload}": True,
            f"--stages {self.stages}": True,
            "--decoder-dtype": self.decoder_dtype != "auto",
        }
        return {name: name for name, is_given in is_used.items() if is_given} | self.cache.features

    @property
    def patch_options(self) -> dict[str, Any]:
        """Options of the patch engine without the cache, by name."""
        return {name: getattr(self, name) for name in PATCH_OPTIONS}


def order_on(device_type: str, kernels: str) -> Literal["image", "patch"]:
    """Return the choice of `--order auto` on a type of device, as torch names it, with these kernels."""
    return "patch" if device_type == "cuda" or kernels == "triton" else "image"


def why_not_recorded(device_type: str, features: Mapping[str, str]) -> str | None:
    """Return why passes are not recorded by default; None if they are.

    Args:
        device_type: device type of the denoising model, as torch names it.
        features: `EngineOptions.features`, and the class of the pipeline.
    """
    if device_type != "cuda":
        return "only CUDA records passes"
    return conflict_in({**features, "--cuda-graphs": "recording passes"})


def stages_on(device_type: str, cores: int) -> StagesName:
    """Return the choice of `--stages auto`: `inline` if a CPU of few cores does everything, otherwise `threads`.

    On such a CPU, every operator of a step waits for its thread on the core that another stage uses. With a GPU, the
    CPU is free for the other stages.

    Args:
        device_type: device type of the denoising model, as torch names it.
        cores: number of cores that this process may use.
    """
    return "inline" if device_type == "cpu" and cores <= _FEW_CORES else "threads"
