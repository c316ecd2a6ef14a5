"""How diffusers' denoising models are called: the same way for U-Nets and transformers."""

from typing import Any

from torch import Tensor


def denoise(model: Any, latents: Tensor, timesteps: Tensor, conditions: dict[str, Any]) -> Tensor:
    """Predict for latents [rows, channels, height, width].

    Args:
        model: a `UNet2DConditionModel` or `SD3Transformer2DModel`; both take the latents first.
        latents: in the model's dtype.
        timesteps: (rows,), or one for all.
        conditions: named as the model's own forward names them, see `Family.conditions`.
    """
    return model(latents, timestep=timesteps, return_dict=False, **conditions)[0]
