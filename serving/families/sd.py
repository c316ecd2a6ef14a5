"""Stable Diffusion 1.x and 2.x: a U-Net with cross attention to one text encoder (`StableDiffusionPipeline`)."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import StableDiffusionPipeline
from diffusers.utils.torch_utils import randn_tensor
from PIL.Image import Image

from ...data.requests import Request
from ...data.resolution import Resolution
from ..samplers import SamplerState


class SDFamily:
    """Serves one `StableDiffusionPipeline`; each method does what the pipeline's `__call__` does at that point."""

    pass_step_kwargs = True

    def __init__(self, pipe: StableDiffusionPipeline, *, max_sequence_length: int | None = None) -> None:
        if max_sequence_length is not None:
            raise ValueError("max_sequence_length applies to StableDiffusion3Pipeline only")
        self._pipe: Any = pipe

    @property
    def size_multiple(self) -> int:
        # The pipeline itself asks for multiples of 8, also where the autoencoder reduces by less.
        return math.lcm(8, self._pipe.vae_scale_factor)

    @property
    def max_side(self) -> int | None:
        return None

    def uses_guidance(self, guidance_scale: float) -> bool:
        return guidance_scale > 1 and self._pipe.unet.config.time_cond_proj_dim is None

    def condition(self, request: Request, *, is_guided: bool) -> dict[str, torch.Tensor]:
        pipe = self._pipe
        text, negative_text = pipe.encode_prompt(
            request.prompt, pipe.unet.device, 1, is_guided, negative_prompt=request.negative_prompt
        )
        tensors = {"text": torch.cat([negative_text, text]) if is_guided else text}
        if pipe.unet.config.time_cond_proj_dim is not None:
            scale = torch.tensor([request.guidance_scale - 1])
            embedding = pipe.get_guidance_scale_embedding(scale, embedding_dim=pipe.unet.config.time_cond_proj_dim)
            tensors["guidance"] = embedding.to(device=pipe.unet.device, dtype=text.dtype)
        return tensors

    def schedule_kwargs(self, resolution: Resolution) -> dict[str, Any]:
        return {}

    def latent_size(self, resolution: Resolution) -> tuple[int, int]:
        factor = self._pipe.vae_scale_factor
        return resolution.height // factor, resolution.width // factor

    def initial_latents(
        self, resolution: Resolution, generator: torch.Generator, dtype: torch.dtype, state: SamplerState
    ) -> torch.Tensor:
        pipe = self._pipe
        shape = (1, pipe.unet.config.in_channels, *self.latent_size(resolution))
        noise = randn_tensor(shape, generator=generator, device=pipe.unet.device, dtype=dtype)
        return noise * state.scheduler.init_noise_sigma

    def conditions(self, conditioning: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {"encoder_hidden_states": conditioning["text"], "timestep_cond": conditioning.get("guidance")}

    def decode(self, latents: torch.Tensor) -> Sequence[Image]:
        pipe = self._pipe
        latents = latents.to(pipe.vae.dtype)
        image = pipe.vae.decode(latents / pipe.vae.config.scaling_factor, return_dict=False)[0]
        image, is_unsafe = pipe.run_safety_checker(image, image.device, image.dtype)
        # What the checker has blacked out is given out as it is.
        denormalize = [True] * len(image) if is_unsafe is None else [not unsafe for unsafe in is_unsafe]
        return pipe.image_processor.postprocess(image, output_type="pil", do_denormalize=denormalize)
