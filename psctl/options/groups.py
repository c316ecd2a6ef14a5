"""Options that always come together: a command takes the group as one parameter, its users see single options."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from ...data.errors import UsageError
from ...serving.cache.options import CacheOptions
from ...serving.options import EngineName, EngineOptions
from .common import (
    Cache,
    CacheInterval,
    CacheMemory,
    CachePatchSize,
    CachePredictorFile,
    CacheThreshold,
    Compile,
    CudaGraphs,
    Kernels,
    MaxReuse,
    Order,
    PatchSize,
    Strategy,
    WarmupSteps,
)


@dataclass(frozen=True, slots=True)
class CacheFlags:
    """What is asked of the patch cache."""

    cache: Cache = "off"
    cache_threshold: CacheThreshold = None
    cache_predictor: CachePredictorFile = None
    cache_interval: CacheInterval = 3
    cache_patch_size: CachePatchSize = 8
    max_reuse: MaxReuse = 4
    warmup_steps: WarmupSteps = 3
    cache_memory: CacheMemory = 2048

    def to_options(self) -> CacheOptions:
        """Check it.

        Raises:
            UsageError: a value is not allowed, or a threshold was given where none is looked at.
        """
        if self.cache_threshold is not None and self.cache in ("off", "interval"):
            raise UsageError(f"--cache-threshold belongs to --cache patch, image or accumulated, not {self.cache}")
        return CacheOptions(
            self.cache,
            self.cache_threshold,
            None if self.cache_predictor is None else self.cache_predictor.expanduser(),
            self.cache_patch_size,
            self.cache_interval,
            self.max_reuse,
            self.warmup_steps,
            self.cache_memory,
        )


@dataclass(frozen=True, slots=True)
class PatchFlags:
    """What is asked of the patch engine beside its cache."""

    order: Order = "auto"
    patch_size: PatchSize = None
    strategy: Strategy = "auto"
    kernels: Kernels = "auto"
    compile: Compile = False
    cuda_graphs: CudaGraphs = False

    def to_options(self, engine: EngineName = "patched", cache: CacheFlags | None = None) -> EngineOptions:
        """Check it, with the cache's options if there are any. Raises UsageError as `EngineOptions`."""
        reuse = CacheOptions() if cache is None else cache.to_options()
        return EngineOptions(
            engine,
            self.order,
            self.patch_size,
            self.strategy,
            self.kernels,
            self.compile,
            self.cuda_graphs,
            reuse,
        )


CACHE_FLAGS, PATCH_FLAGS = CacheFlags(), PatchFlags()
"""The groups as nobody has changed them: defaults of commands' parameters."""


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Make single options of each parameter that is a group (its default is an instance of a dataclass)."""
    groups: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if not is_dataclass(parameter.default):
            parameters.append(parameter)
            continue
        kind: type[Any] = type(parameter.default)
        groups[parameter.name] = kind
        parameters += [
            parameter.replace(name=option.name, default=option.default, annotation=option.type)
            for option in fields(kind)
        ]

    def expanded(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{option.name: given.pop(option.name) for option in fields(kind)})
        command(**given)

    # Not functools.wraps: who follows `__wrapped__`, as typer does for annotations, would see the groups again.
    expanded.__name__, expanded.__doc__, expanded.__module__ = command.__name__, command.__doc__, command.__module__
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded
