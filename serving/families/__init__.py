"""Model families: the differences between the supported diffusers pipelines, as far as the engines depend on them.

A family is one module. It defines how a request's text and size become conditioning tensors, their names in the
denoising model's forward, how latents become an image (`Family`) and, for transformers, how the blocks run on packed
tokens (`Transformer`). Everything else (batching, attention, samplers, guidance, stages) is shared. This module imports
no torch, so that an unsupported model is refused before anything heavy is loaded.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .table import FAMILIES, SUPPORTED_PIPELINES, Entry, entry_of

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from ...data.requests import Request
    from .geometry import Geometry
    from .transformer import Transformer


Decode = Callable[["torch.Tensor"], "torch.Tensor"]
"""Latents (n, channels, h, w), scaled for the autoencoder -> n images (n, 3, height, width)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One loaded pipeline, as functions that do the work of the corresponding parts of the pipeline's `__call__`.

    Attributes:
        geometry: sizes of latents and tokens.
        latent_channels: number of channels of the latents that are denoised.
        max_side: largest width or height in pixels; None if the architecture sets no bound.
        is_distilled: whether guidance is distilled into the model, with or without the scale as an input, so that no
            unconditional row is needed.
        neutral_scale: guidance scale, in the pipeline's convention, at which guidance returns the conditional
            prediction; guidance is off up to this scale.
        noise_dtype: dtype of the initial noise; None for the dtype of the text.
        guided_norm: norms of a prediction (channels, height, width), shaped to divide it by, that guidance restores to
            those of the conditional prediction; None if guidance does not rescale.
        scales_noise: whether the first latents are noise times the scheduler's `init_noise_sigma`.
        pass_step_kwargs: whether the pipeline passes `generator` and `eta` to `scheduler.step`.
        schedule_kwargs: further arguments of `set_timesteps` that depend on the request.
        condition: encodes a request, given whether it is guided. Each tensor has 2 rows (unconditional, conditional) if
            it is, else 1.
        conditions: maps conditioning tensors (rows, ...) to the arguments of the denoising model's forward.
        decode: turns final latents (n, channels, h, w) into n images, with the given decoder of the autoencoder.
        encode: turns images (n, 3, height, width) from -1 to 1 into latents, the inverse of `decode`. They are sampled
            from the autoencoder's posterior, or are its mode if the pipelines use the mode.
    """

    geometry: "Geometry"
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
        """Return whether a request with this scale needs an unconditional row in addition to its conditional one."""
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
    """Return the description of this denoising model's blocks for packed tokens; None for a U-Net."""
    entry = entry_of(type(model).__name__)
    return None if entry is None else getattr(_module(entry), "TRANSFORMER", None)


def _module(entry: Entry) -> Any:
    return importlib.import_module(f".{entry.module}", __name__)
