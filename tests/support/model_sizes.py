"""Configurations of denoising models of every family: as published, for two cores, and tiny."""

from typing import Any

SDXL: dict[str, Any] = {
    "sample_size": 128,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (320, 640, 1280),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 1280 + 6 * 256,
}
SD3: dict[str, Any] = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 768 + 1280,
    "pos_embed_max_size": 192,
}
FLUX: dict[str, Any] = {"guidance_embeds": True}  # everything else is the class's default
KLEIN: dict[str, Any] = {  # the model of 4 billion weights
    "num_layers": 5,
    "num_single_layers": 20,
    "num_attention_heads": 24,
    "joint_attention_dim": 3 * 2560,
    "guidance_embeds": False,
}
AURA: dict[str, Any] = {"pos_embed_max_size": 9216}  # as in AuraFlow 0.3; everything else is the class's default
PIXART: dict[str, Any] = {"caption_channels": 4096, "interpolation_scale": 2, "use_additional_conditions": False}
LUMINA2: dict[str, Any] = {"cap_feat_dim": 2304}
TINY: dict[str, dict[str, Any]] = {
    "sdxl": {"block_out_channels": (32, 64, 64), "transformer_layers_per_block": 1, "attention_head_dim": (1, 2, 2)},
    "sd3": {"num_layers": 2, "num_attention_heads": 2, "caption_projection_dim": 128},
    "flux-dev": {"num_layers": 2, "num_single_layers": 2, "num_attention_heads": 2, "joint_attention_dim": 128},
    "aura": {
        "num_mmdit_layers": 2,
        "num_single_dit_layers": 2,
        "attention_head_dim": 32,
        "num_attention_heads": 2,
        "joint_attention_dim": 128,
        "caption_projection_dim": 64,
    },
}
TINY["pixart"] = {
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 36,
    "cross_attention_dim": 72,
    "caption_channels": 128,
}
TINY["lumina2"] = {
    "hidden_size": 96,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "axes_dim_rope": (8, 8, 8),
    "cap_feat_dim": 64,
}
TINY["qwen"] = {
    "num_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": 128,
    "axes_dims_rope": (8, 12, 12),
}
TINY["flux2-dev"] = TINY["flux2-klein"] = {
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": 3 * 32,
    "axes_dims_rope": (8, 8, 8, 8),
}
TINY["z-image"] = {
    "dim": 96,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "cap_feat_dim": 64,
    "axes_dims": [16, 16, 16],
}
TINY["flux-schnell"] = TINY["flux-kontext"] = TINY["flux-dev"]
TINY["chroma"] = TINY["flux-dev"] | {"approximator_hidden_dim": 64, "approximator_layers": 2}
SMALL: dict[str, dict[str, Any]] = {
    "flux-dev": {"num_layers": 4, "num_single_layers": 8, "num_attention_heads": 3, "joint_attention_dim": 512},
    "flux2-klein": {"num_layers": 2, "num_single_layers": 4, "num_attention_heads": 1, "joint_attention_dim": 3 * 64},
    "sd3": {"num_layers": 12, "num_attention_heads": 6, "caption_projection_dim": 384},
    "qwen": {"num_layers": 12, "num_attention_heads": 3, "joint_attention_dim": 512},
    "z-image": {"dim": 384, "n_layers": 10, "n_refiner_layers": 1, "n_heads": 3, "n_kv_heads": 3, "cap_feat_dim": 512},
}
SMALL_SETTINGS: dict[str, dict[str, Any]] = {
    "flux2-klein": {"default_resolution": 128, "resolutions": [64, 96, 128, 192], "max_sequence_length": 32},
}
"""Settings (`psctl.json`) of small models whose published ones are too large for two cores."""
CONFIGS: dict[str, dict[str, Any]] = {
    "sdxl": SDXL,
    "sd3": SD3,
    "flux-dev": FLUX,
    "flux-schnell": FLUX | {"guidance_embeds": False},
    "flux-kontext": FLUX,
    "flux2-dev": {},
    "flux2-klein": KLEIN,
    "aura": AURA,
    "chroma": {},
    "pixart": PIXART,
    "lumina2": LUMINA2,
    "qwen": {},
    "z-image": {},
}
