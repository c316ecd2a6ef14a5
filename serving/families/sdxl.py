"""SDXL: a U-Net with cross attention and added time and text conditioning (`StableDiffusionXLPipeline`)."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import StableDiffusionXLPipeline
from diffusers.utils.torch_utils import randn_tensor
from PIL.Image import Image

from ...data.requests import Request
from ...data.resolution import Resolution
from ..samplers import SamplerState


class SDXLFamily:
    """Serves one `StableDiffusionXLPipeline`; each method does what the pipeline's `__call__` does at that point."""

    pass_step_kwargs = True

    def __init__(self, pipe: StableDiffusionXLPipeline, *, max_sequence_length: int | None = None) -> None:
        if max_sequence_length is not None:
            raise ValueError("max_sequence_length applies to StableDiffusion3Pipeline only")
        # Any: the annotations of diffusers' pipelines say None where there never is any.
        self._pipe: Any = pipe
        if pipe.vae.dtype == torch.float16 and pipe.vae.config.force_upcast:
            # The pipeline casts such an autoencoder to float32 and back for each image, because it overflows in
            # float16. The weights' values are the same when it simply stays in float32.
            pipe.vae.to(dtype=torch.float32)

    @property
    def size_multiple(self) -> int:
        # The pipeline itself asks for multiples of 8, also where the autoencoder reduces by less.
        return math.lcm(8, self._pipe.vae_scale_factor)

    @property
    def max_side(self) -> int | None:
        return None

    def uses_guidance(self, guidance_scale: float) -> bool:
        # Models distilled with an embedded guidance scale need no unconditional row.
        return guidance_scale > 1 and self._pipe.unet.config.time_cond_proj_dim is None

    def condition(self, request: Request, *, is_guided: bool) -> dict[str, torch.Tensor]:
        pipe = self._pipe
        device = pipe.unet.device
        text, negative_text, pooled, negative_pooled = pipe.encode_prompt(
            prompt=request.prompt,
            device=device,
            do_classifier_free_guidance=is_guided,
            negative_prompt=request.negative_prompt,
        )
        encoder = pipe.text_encoder_2
        projection_dim = int(pooled.shape[-1]) if encoder is None else encoder.config.projection_dim
        size = (request.resolution.height, request.resolution.width)
        time_ids = pipe._get_add_time_ids(
            size, (0, 0), size, dtype=text.dtype, text_encoder_projection_dim=projection_dim
        ).to(device)
        if is_guided:
            text = torch.cat([negative_text, text])
            pooled = torch.cat([negative_pooled, pooled])
            time_ids = time_ids.repeat(2, 1)
        tensors = {"text": text.to(device), "pooled": pooled.to(device), "time_ids": time_ids}
        if pipe.unet.config.time_cond_proj_dim is not None:
            scale = torch.tensor([request.guidance_scale - 1])
            embedding = pipe.get_guidance_scale_embedding(scale, embedding_dim=pipe.unet.config.time_cond_proj_dim)
            tensors["guidance"] = embedding.to(device=device, dtype=text.dtype)
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
        return {
            "encoder_hidden_states": conditioning["text"],
            "timestep_cond": conditioning.get("guidance"),
            "added_cond_kwargs": {"text_embeds": conditioning["pooled"], "time_ids": conditioning["time_ids"]},
        }

    def decode(self, latents: torch.Tensor) -> Sequence[Image]:
        pipe = self._pipe
        config = pipe.vae.config
        latents = latents.to(pipe.vae.dtype)
        mean, std = getattr(config, "latents_mean", None), getattr(config, "latents_std", None)
        if mean is not None and std is not None:
            shape = (1, len(mean), 1, 1)
            latents = latents * latents.new_tensor(std).view(shape) / config.scaling_factor
            latents = latents + latents.new_tensor(mean).view(shape)
        else:
            latents = latents / config.scaling_factor
        image = pipe.vae.decode(latents, return_dict=False)[0]
        if pipe.watermark is not None:
            image = pipe.watermark.apply_watermark(image)
        return pipe.image_processor.postprocess(image, output_type="pil")
