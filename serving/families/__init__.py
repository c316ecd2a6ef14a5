"""Model families: what differs between the supported diffusers pipelines, and what the patch engine must know of them.

A family is one module: how a request's text and size become conditioning tensors, what the denoising model calls these,
how latents become an image (`Family`), and of a transformer how its blocks run on packed tokens (`Transformer`).
Everything else (batching, attention, samplers, guidance, stages) is shared. This module imports no torch, so that an
unsupported model is refused before anything heavy is loaded.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .geometry import Geometry
from .table import FAMILIES, SUPPORTED_PIPELINES, Entry, entry_of

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from ...data.requests import Request
    from .transformer import Transformer


Decode = Callable[["torch.Tensor"], "torch.Tensor"]
"""Latents (n, channels, h, w), scaled as the autoencoder takes them -> n images (n, 3, height, width)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one loaded pipeline is served; its functions do what the pipeline's `__call__` does at that point.

    Attributes:
        geometry: what the model makes of sizes.
        latent_channels: of the latents that are drawn and denoised.
        max_side: largest width or height in pixels, or None where the architecture sets no bound.
        is_distilled: whether the model has learnt guidance, with the scale as an input or without, and so needs no
            unconditional row.
        neutral_scale: guidance scale, as the pipeline counts it, with which guidance gives the conditional prediction;
            up to it there is none.
        noise_dtype: of the noise that images begin with; None for that of the text.
        guided_norm: of parts of a prediction (channels, height, width) that guidance leaves as large as in the
            conditional one, shaped to be divided by; None where it does not.
        scales_noise: whether the first latents are noise times the scheduler's `init_noise_sigma`.
        pass_step_kwargs: whether the pipeline hands `generator` and `eta` to `scheduler.step`.
        schedule_kwargs: further arguments of `set_timesteps` that depend on the request.
        condition: encodes a request, given also whether it is guided. Each tensor has 2 rows (unconditional,
            conditional) if it is, else 1.
        conditions: names conditioning tensors (rows, ...) as the denoising model's own forward does.
        decode: turns final latents (n, channels, h, w) into n images, given what does the autoencoder's part.
        encode: turns images (n, 3, height, width) from -1 to 1 into latents that `decode` would turn back, drawn from
            the autoencoder's posterior, or its mode where the pipelines take that.
    """

    geometry: Geometry
    latent_channels: int
    max_side: int | None
    is_distilled: bool
    scales_noise: bool
    pass_step_kwargs: bool
    schedule_kwargs: "Callable[[Request], dict[str, Any]]"
    condition: "Callable[[Request, bool], dict[str, torch.Tensor]]"
    conditions: "Callable[[dict[str, torch.Tensor]], dict[str, Any]]"
    decode: "Callable[[torch.Tensor, Decode], Sequence[Image]]"
    encode: "Callable[[torch.Tensor, torch.Generator], torch.Tensor]"
    neutral_scale: float = 1.0
    noise_dtype: "torch.dtype | None" = None
    guided_norm: "Callable[[torch.Tensor], torch.Tensor] | None" = None

    def uses_guidance(self, guidance_scale: float) -> bool:
        """Whether a request with this scale needs an unconditional row beside its conditional one."""
        return guidance_scale > self.neutral_scale and not self.is_distilled


def build_family(pipe: Any, *, max_sequence_length: int | None = None) -> Family:
    """Return the family that serves this loaded diffusers pipeline.

    Raises:
        ValueError: if no family serves the pipeline's class.
        UsageError: if `max_sequence_length` does not apply to it.
    """
    name = type(pipe).__name__
    if name not in FAMILIES:
        raise ValueError(f"pipeline class {name} is not supported; supported: {', '.join(SUPPORTED_PIPELINES)}")
    return _module(FAMILIES[name]).family(pipe, max_sequence_length=max_sequence_length)


def transformer_of(model: Any) -> "Transformer | None":
    """How this denoising model's blocks run on packed tokens; None for a U-Net."""
    entry = entry_of(type(model).__name__)
    return None if entry is None else getattr(_module(entry), "TRANSFORMER", None)


def _module(entry: Entry) -> Any:
    return importlib.import_module(f".{entry.module}", __name__)
