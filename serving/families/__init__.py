"""Model families: what differs between the supported diffusers pipelines.

A family answers, for one pipeline class, how a request's text and size become conditioning tensors, what the
denoising model calls these, and how latents become an image. Everything else (batching, samplers,
guidance, stages) is common and lives in `serving/model.py` and `serving/engine.py`. This module imports no torch, so
that an unsupported model is refused before anything heavy is loaded.
"""

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ...data.resolution import Resolution

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from ...data.requests import Request
    from ..samplers import SamplerState

# pipeline class in model_index.json -> (module of this package, class)
_FAMILIES = {
    "StableDiffusionPipeline": ("sd", "SDFamily"),
    "StableDiffusionXLPipeline": ("sdxl", "SDXLFamily"),
    "StableDiffusion3Pipeline": ("sd3", "SD3Family"),
}
SUPPORTED_PIPELINES: tuple[str, ...] = tuple(_FAMILIES)


class Family(Protocol):
    """What the served model asks of a family. One instance wraps one loaded pipeline."""

    pass_step_kwargs: bool
    """Whether this pipeline hands `generator` and `eta` to `scheduler.step`."""

    @property
    def size_multiple(self) -> int:
        """Width and height in pixels must be multiples of this."""
        ...

    @property
    def max_side(self) -> int | None:
        """Largest width or height in pixels, or None where the architecture sets no bound."""
        ...

    def uses_guidance(self, guidance_scale: float) -> bool:
        """Whether a request with this scale needs an unconditional row beside its conditional one."""
        ...

    def condition(self, request: "Request", *, is_guided: bool) -> "dict[str, torch.Tensor]":
        """Encode the request. Each tensor has 2 rows (unconditional, conditional) if guided, else 1."""
        ...

    def schedule_kwargs(self, resolution: Resolution) -> dict[str, Any]:
        """Return further arguments of `set_timesteps` that depend on the resolution."""
        ...

    def latent_size(self, resolution: Resolution) -> tuple[int, int]:
        """Height and width of the latents of an image."""
        ...

    def initial_latents(
        self, resolution: Resolution, generator: "torch.Generator", dtype: "torch.dtype", state: "SamplerState"
    ) -> "torch.Tensor":
        """Draw the request's first latents, (1, channels, height / 8, width / 8), as the pipeline does."""
        ...

    def conditions(self, conditioning: "dict[str, torch.Tensor]") -> dict[str, Any]:
        """Name conditioning tensors (rows, ...) as the denoising model's own forward does."""
        ...

    def decode(self, latents: "torch.Tensor") -> "Sequence[Image]":
        """Turn final latents (n, channels, h, w) into n images."""
        ...


def build_family(pipe: Any, *, max_sequence_length: int | None = None) -> Family:
    """Return the family that serves this loaded diffusers pipeline.

    Raises:
        ValueError: if no family serves the pipeline's class.
    """
    name = type(pipe).__name__
    if name not in _FAMILIES:
        raise ValueError(f"pipeline class {name} is not supported; supported: {', '.join(SUPPORTED_PIPELINES)}")
    module, cls = _FAMILIES[name]
    family_class = getattr(importlib.import_module(f".{module}", __name__), cls)
    return family_class(pipe, max_sequence_length=max_sequence_length)
