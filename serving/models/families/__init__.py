"""Model families: what differs between the supported diffusers pipelines.

A family says how a request's text and size become conditioning tensors, what the denoising model calls these, and how
latents become an image. Everything else (batching, samplers, guidance, stages) is shared. Each pipeline class has a
module here whose `family` builds its `Family`. This module imports no torch, so that an unsupported model is refused
before anything heavy is loaded.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ....data.resolution import Resolution
from ..geometry import Geometry

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from ....data.requests import Request

# pipeline class in model_index.json -> module of this package
_FAMILIES = {
    "StableDiffusionPipeline": "sd",
    "StableDiffusionXLPipeline": "sdxl",
    "StableDiffusion3Pipeline": "sd3",
}
SUPPORTED_PIPELINES: tuple[str, ...] = tuple(_FAMILIES)


Decode = Callable[["torch.Tensor"], "torch.Tensor"]
"""Latents (n, channels, h, w), scaled as the autoencoder takes them -> n images (n, 3, height, width)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one loaded pipeline is served; its functions do what the pipeline's `__call__` does at that point.

    Attributes:
        geometry: what the model makes of sizes.
        max_side: largest width or height in pixels, or None where the architecture sets no bound.
        embeds_guidance: whether the model takes the guidance scale as an input, and so needs no unconditional row.
        scales_noise: whether the first latents are noise times the scheduler's `init_noise_sigma`.
        pass_step_kwargs: whether the pipeline hands `generator` and `eta` to `scheduler.step`.
        schedule_kwargs: further arguments of `set_timesteps` that depend on the resolution.
        condition: encodes a request, given also whether it is guided. Each tensor has 2 rows (unconditional,
            conditional) if it is, else 1.
        conditions: names conditioning tensors (rows, ...) as the denoising model's own forward does.
        decode: turns final latents (n, channels, h, w) into n images, given what does the autoencoder's part.
        encode: turns images (n, 3, height, width) from -1 to 1 into latents that `decode` would turn back, drawn from
            the autoencoder's posterior.
    """

    geometry: Geometry
    max_side: int | None
    embeds_guidance: bool
    scales_noise: bool
    pass_step_kwargs: bool
    schedule_kwargs: Callable[[Resolution], dict[str, Any]]
    condition: "Callable[[Request, bool], dict[str, torch.Tensor]]"
    conditions: "Callable[[dict[str, torch.Tensor]], dict[str, Any]]"
    decode: "Callable[[torch.Tensor, Decode], Sequence[Image]]"
    encode: "Callable[[torch.Tensor, torch.Generator], torch.Tensor]"

    def uses_guidance(self, guidance_scale: float) -> bool:
        """Whether a request with this scale needs an unconditional row beside its conditional one."""
        return guidance_scale > 1 and not self.embeds_guidance


def build_family(pipe: Any, *, max_sequence_length: int | None = None) -> Family:
    """Return the family that serves this loaded diffusers pipeline.

    Raises:
        ValueError: if no family serves the pipeline's class.
        UsageError: if `max_sequence_length` does not apply to it.
    """
    name = type(pipe).__name__
    if name not in _FAMILIES:
        raise ValueError(f"pipeline class {name} is not supported; supported: {', '.join(SUPPORTED_PIPELINES)}")
    module = importlib.import_module(f".{_FAMILIES[name]}", __name__)
    return module.family(pipe, max_sequence_length=max_sequence_length)
