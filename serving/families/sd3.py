"""Stable Diffusion 3: a transformer with joint attention over text and image, flow matching."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift
from diffusers.utils.torch_utils import randn_tensor
from PIL.Image import Image

from ...data.requests import Request
from ...data.resolution import Resolution
from ..samplers import SamplerState

# The default of StableDiffusion3Pipeline.__call__.
_MAX_SEQUENCE_LENGTH = 256


class SD3Family:
    """Serves one `StableDiffusion3Pipeline`; each method does what the pipeline's `__call__` does at that point.

    Args:
        pipe: the loaded pipeline.
        max_sequence_length: number of text positions kept for the third (T5) encoder, present or not.
    """

    pass_step_kwargs = False

    def __init__(self, pipe: StableDiffusion3Pipeline, *, max_sequence_length: int | None = None) -> None:
        # Any: the annotations of diffusers' pipelines say None where there never is any.
        self._pipe: Any = pipe
        self._max_sequence_length = _MAX_SEQUENCE_LENGTH if max_sequence_length is None else max_sequence_length

    @property
    def size_multiple(self) -> int:
        return self._pipe.vae_scale_factor * self._pipe.patch_size

    @property
    def max_side(self) -> int | None:
        # Positions are cropped from a fixed square of this many transformer patches.
        positions = self._pipe.transformer.config.pos_embed_max_size
        return None if positions is None else positions * self.size_multiple

    def uses_guidance(self, guidance_scale: float) -> bool:
        return guidance_scale > 1

    def condition(self, request: Request, *, is_guided: bool) -> dict[str, torch.Tensor]:
        text, negative_text, pooled, negative_pooled = self._pipe.encode_prompt(
            prompt=request.prompt,
            prompt_2=None,  # as the first
            prompt_3=None,
            device=self._pipe.transformer.device,
            do_classifier_free_guidance=is_guided,
            negative_prompt=request.negative_prompt,
            max_sequence_length=self._max_sequence_length,
        )
        if is_guided:
            text = torch.cat([negative_text, text])
            pooled = torch.cat([negative_pooled, pooled])
        return {"text": text, "pooled": pooled}

    def schedule_kwargs(self, resolution: Resolution) -> dict[str, Any]:
        config = self._pipe.scheduler.config
        if not config.get("use_dynamic_shifting", None):
            return {}
        num_tokens = (resolution.height // self.size_multiple) * (resolution.width // self.size_multiple)
        mu = calculate_shift(
            num_tokens,
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.16),
        )
        return {"mu": mu}

    def latent_size(self, resolution: Resolution) -> tuple[int, int]:
        factor = self._pipe.vae_scale_factor
        return resolution.height // factor, resolution.width // factor

    def initial_latents(
        self, resolution: Resolution, generator: torch.Generator, dtype: torch.dtype, state: SamplerState
    ) -> torch.Tensor:
        model = self._pipe.transformer
        shape = (1, model.config.in_channels, *self.latent_size(resolution))
        return randn_tensor(shape, generator=generator, device=model.device, dtype=dtype)

    def conditions(self, conditioning: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {"encoder_hidden_states": conditioning["text"], "pooled_projections": conditioning["pooled"]}

    def decode(self, latents: torch.Tensor) -> Sequence[Image]:
        vae = self._pipe.vae
        image = vae.decode((latents / vae.config.scaling_factor) + vae.config.shift_factor, return_dict=False)[0]
        return self._pipe.image_processor.postprocess(image, output_type="pil")
