"""Small random diffusers models of every architecture that the patch engine runs.

All weights are random, including those that diffusers sets to zero or one (norms, biases), so that a missing term
changes the result.
"""

from collections.abc import Callable
from typing import Any

import torch
from diffusers import (
    AuraFlowTransformer2DModel,
    ChromaTransformer2DModel,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    Lumina2Transformer2DModel,
    OvisImageTransformer2DModel,
    PixArtTransformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    ZImageTransformer2DModel,
)
from torch import Tensor, nn

_UNET: dict[str, Any] = {
    "sample_size": 16,
    "cross_attention_dim": 24,
    "norm_num_groups": 4,
    "norm_eps": 0.01,  # large enough to matter
    "layers_per_block": 1,
}
_FOUR_LEVELS: dict[str, Any] = {
    **_UNET,
    "block_out_channels": (16, 16, 24, 32),
    "down_block_types": (*("CrossAttnDownBlock2D",) * 3, "DownBlock2D"),
    "up_block_types": ("UpBlock2D", *("CrossAttnUpBlock2D",) * 3),
}
_THREE_LEVELS: dict[str, Any] = {
    **_UNET,
    "block_out_channels": (16, 24, 32),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "use_linear_projection": True,
}
_TWO_LEVELS: dict[str, Any] = {
    **_UNET,
    "block_out_channels": (8, 16),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": (1, 2),
}
_SD3: dict[str, Any] = {
    "sample_size": 16,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 3,
    "joint_attention_dim": 20,
    "caption_projection_dim": 24,
    "pooled_projection_dim": 12,
    "pos_embed_max_size": 20,
}

_FLUX: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 128,
    "num_attention_heads": 2,
    "joint_attention_dim": 20,
    "pooled_projection_dim": 12,
}

_FLUX2: dict[str, Any] = {
    "in_channels": 4,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": 20,
    "timestep_guidance_channels": 16,
    "axes_dims_rope": (8, 8, 8, 8),
}

_AURA: dict[str, Any] = {
    "sample_size": 16,
    "in_channels": 4,
    "num_mmdit_layers": 2,
    "num_single_dit_layers": 2,
    "attention_head_dim": 40,
    "num_attention_heads": 2,
    "joint_attention_dim": 20,
    "caption_projection_dim": 80,
    "pos_embed_max_size": 20**2,
}

_PIXART: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 36,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 3,
    "cross_attention_dim": 72,
    "sample_size": 32,
    "caption_channels": 20,
    "use_additional_conditions": False,
}


_LUMINA2: dict[str, Any] = {
    "sample_size": 16,
    "in_channels": 4,
    "hidden_size": 96,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "multiple_of": 16,
    "axes_dim_rope": (8, 8, 8),
    "cap_feat_dim": 20,
}


_QWEN: dict[str, Any] = {
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": 20,
    "axes_dims_rope": (8, 12, 12),
}


_Z_IMAGE: dict[str, Any] = {
    "in_channels": 4,
    "dim": 48,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "cap_feat_dim": 20,
    "axes_dims": [8, 8, 8],
    "axes_lens": [256, 64, 64],
}


def sd15_unet(seed: int = 0, **changes: Any) -> UNet2DConditionModel:
    """SD 1.5: 4 levels, projections of the transformers are convolutions, 8 heads everywhere."""
    return _random(UNet2DConditionModel, _FOUR_LEVELS | {"attention_head_dim": 8} | changes, seed)


def sd2_unet(seed: int = 0, **changes: Any) -> UNet2DConditionModel:
    """SD 2: as 1.5, with linear projections and more heads at deeper levels."""
    heads: dict[str, Any] = {
        "attention_head_dim": (1, 2, 3, 4),
        "use_linear_projection": True,
        "upcast_attention": True,
    }
    return _random(UNet2DConditionModel, _FOUR_LEVELS | heads | changes, seed)


def sdxl_unet(seed: int = 0, **changes: Any) -> UNet2DConditionModel:
    """SDXL: 3 levels, several transformer blocks at the deeper ones, pooled text and time ids."""
    config: dict[str, Any] = {
        **_THREE_LEVELS,
        "attention_head_dim": (1, 2, 4),
        "transformer_layers_per_block": (1, 2, 2),
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + 10,
    }
    return _random(UNet2DConditionModel, config | changes, seed)


def scale_shift_unet(seed: int = 0, **changes: Any) -> UNet2DConditionModel:
    """A U-Net whose timestep scales and shifts between norm and activation, which therefore must not be fused."""
    config = _THREE_LEVELS | {"attention_head_dim": 2, "resnet_time_scale_shift": "scale_shift"}
    return _random(UNet2DConditionModel, config | changes, seed)


def gelu_unet(seed: int = 0, **changes: Any) -> UNet2DConditionModel:
    """A U-Net of 2 levels with an activation other than SiLU, which is not fused either."""
    return _random(
        UNet2DConditionModel, _TWO_LEVELS | {"act_fn": "gelu", "resnet_out_scale_factor": 1.4} | changes, seed
    )


def small_unet(seed: int = 0, **changes: Any) -> UNet2DConditionModel:
    """The smallest U-Net with all leaf modules, for Triton's interpreter and for tests of refusals."""
    return _random(UNet2DConditionModel, _TWO_LEVELS | {"norm_num_groups": 2} | changes, seed)


def sd3_transformer(seed: int = 0, **changes: Any) -> SD3Transformer2DModel:
    """SD3: joint attention without norms of queries and keys."""
    return _random(SD3Transformer2DModel, _SD3 | changes, seed)


def sd35_transformer(seed: int = 0, **changes: Any) -> SD3Transformer2DModel:
    """SD3.5: norms of queries and keys, and a second attention in the first blocks."""
    return _random(
        SD3Transformer2DModel, _SD3 | {"qk_norm": "rms_norm", "dual_attention_layers": (0, 1)} | changes, seed
    )


def flux_transformer(seed: int = 0, **changes: Any) -> FluxTransformer2DModel:
    """FLUX.1 dev: joint blocks, single-stream blocks, rotary positions, the guidance scale as an input."""
    return _random(FluxTransformer2DModel, _FLUX | {"guidance_embeds": True} | changes, seed)


def schnell_transformer(seed: int = 0, **changes: Any) -> FluxTransformer2DModel:
    """FLUX.1 schnell: FLUX.1 without the guidance scale as an input."""
    return flux_transformer(seed, **{"guidance_embeds": False} | changes)


def flux2_transformer(seed: int = 0, **changes: Any) -> Flux2Transformer2DModel:
    """FLUX.2 dev: joint blocks, single-stream blocks with feed-forward layers parallel to attention, shared modulation,
    positions of text, the guidance scale as an input.
    """
    return _random(Flux2Transformer2DModel, _FLUX2 | {"guidance_embeds": True} | changes, seed)


def klein_transformer(seed: int = 0, **changes: Any) -> Flux2Transformer2DModel:
    """FLUX.2 Klein: FLUX.2 without the guidance scale as an input."""
    return flux2_transformer(seed, **{"guidance_embeds": False} | changes)


def aura_transformer(seed: int = 0, **changes: Any) -> AuraFlowTransformer2DModel:
    """AuraFlow: joint blocks, single-stream blocks, learnt positions; its text affects the image in spite of the
    register tokens.
    """
    model = _random(AuraFlowTransformer2DModel, _AURA | changes, seed)
    for block in model.joint_transformer_blocks:
        block.attn.add_v_proj.weight *= 4
    return model


def chroma_transformer(seed: int = 0, **changes: Any) -> ChromaTransformer2DModel:
    """Chroma: like FLUX, with masked text, and the modulation of all blocks computed by one network."""
    config = {name: value for name, value in _FLUX.items() if name != "pooled_projection_dim"}
    approximator = {"approximator_num_channels": 16, "approximator_hidden_dim": 24, "approximator_layers": 2}
    heads = {"attention_head_dim": 40, "axes_dims_rope": (8, 16, 16)}
    return _random(ChromaTransformer2DModel, config | approximator | heads | changes, seed)


def ovis_transformer(seed: int = 0, **changes: Any) -> OvisImageTransformer2DModel:
    """Ovis-Image: like FLUX, with text at positions of its own."""
    config = {name: value for name, value in _FLUX.items() if name != "pooled_projection_dim"}
    heads = {"attention_head_dim": 40, "axes_dims_rope": (8, 16, 16), "out_channels": None}
    return _random(OvisImageTransformer2DModel, config | heads | changes, seed)


def pixart_transformer(seed: int = 0, **changes: Any) -> PixArtTransformer2DModel:
    """PixArt-Sigma: cross attention to masked text, one modulation for all blocks, a variance beside the prediction."""
    return _random(PixArtTransformer2DModel, _PIXART | changes, seed)


def lumina2_transformer(seed: int = 0, **changes: Any) -> Lumina2Transformer2DModel:
    """Lumina 2: text refined separately, then one stream; grouped-query attention; rotary positions of the image that
    depend on the length of the text; timesteps, of which the model sees a thousandth, that affect the image.
    """
    model = _random(Lumina2Transformer2DModel, _LUMINA2 | changes, seed)
    embedder = model.time_caption_embed.timestep_embedder
    embedder.linear_1.weight *= 4
    embedder.linear_2.weight *= 2
    return model


def qwen_transformer(seed: int = 0, **changes: Any) -> QwenImageTransformer2DModel:
    """Qwen-Image: joint blocks with masked text, whose rotary positions follow those of the image."""
    return _random(QwenImageTransformer2DModel, _QWEN | changes, seed)


def z_image_transformer(seed: int = 0, **changes: Any) -> ZImageTransformer2DModel:
    """Z-Image: image and text refined separately, then one stream; both padded with tokens that are attended to."""
    return _random(ZImageTransformer2DModel, _Z_IMAGE | changes, seed)


MODELS: dict[str, Callable[..., Any]] = {
    "sd15": sd15_unet,
    "sd2": sd2_unet,
    "sdxl": sdxl_unet,
    "scale-shift": scale_shift_unet,
    "gelu": gelu_unet,
    "sd3": sd3_transformer,
    "sd35": sd35_transformer,
    "flux": flux_transformer,
    "schnell": schnell_transformer,
    "flux2": flux2_transformer,
    "klein": klein_transformer,
    "aura": aura_transformer,
    "chroma": chroma_transformer,
    "ovis": ovis_transformer,
    "pixart": pixart_transformer,
    "lumina2": lumina2_transformer,
    "qwen": qwen_transformer,
    "z-image": z_image_transformer,
}
TRANSFORMERS = ["sd35", "flux", "aura", "chroma", "pixart", "lumina2", "qwen"]
"""One transformer of each kind."""
WITH_ALL_OPTIONS = [
    name
    for name in MODELS
    if name
    not in ("flux", "schnell", "flux2", "klein", "aura", "chroma", "ovis", "pixart", "lumina2", "qwen", "z-image")
]
"""Models that also work with partial records, and whose costs on several ranks are counted from configurations."""


def _random(build: Callable[..., Any], config: dict[str, Any], seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # for random buffers, if there are any; all parameters are drawn again below
        model = build(**config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    is_norm = {id(module.weight) for module in model.modules() if _is_norm(module)}
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if id(parameter) in is_norm:
            drawn = 1 + 0.3 * drawn
        elif parameter.dim() < 2:
            drawn = 0.3 * drawn
        else:
            drawn = drawn / parameter[0].numel() ** 0.5
        parameter.copy_(drawn)
    return model


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ and isinstance(getattr(module, "weight", None), Tensor)
