"""Tiny diffusers pipelines with random weights, built in code: the real architectures at a size for tests.

Pipelines of Stable Diffusion are here, those of the other families in `tiny_families`.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DDPMScheduler,
    DEISMultistepScheduler,
    DPMSolverMultistepScheduler,
    DPMSolverSinglestepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    HeunDiscreteScheduler,
    KDPM2AncestralDiscreteScheduler,
    KDPM2DiscreteScheduler,
    LCMScheduler,
    LMSDiscreteScheduler,
    PNDMScheduler,
    SASolverScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    TCDScheduler,
    UNet2DConditionModel,
    UniPCMultistepScheduler,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
)

SAMPLERS: dict[str, Callable[[Any], Any]] = {
    "euler": EulerDiscreteScheduler.from_config,
    "ddim": lambda config: DDIMScheduler.from_config(config, clip_sample=False, timestep_spacing="trailing"),
    "ddim-v": lambda config: DDIMScheduler.from_config(config, clip_sample=False, prediction_type="v_prediction"),
    "euler-ancestral": EulerAncestralDiscreteScheduler.from_config,
    "dpm++": DPMSolverMultistepScheduler.from_config,
    "unipc": UniPCMultistepScheduler.from_config,
    "lcm": lambda config: LCMScheduler.from_config(config, clip_sample=False),
    "tcd": TCDScheduler.from_config,
}
"""Samplers for pipelines with a U-Net, each made from the configuration of another one."""
OWN_SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "heun": HeunDiscreteScheduler.from_config,
    "heun-karras": lambda config: HeunDiscreteScheduler.from_config(config, use_karras_sigmas=True),
    "kdpm2": KDPM2DiscreteScheduler.from_config,
    "kdpm2-ancestral": KDPM2AncestralDiscreteScheduler.from_config,
    "dpm++-sde": lambda config: DPMSolverMultistepScheduler.from_config(config, algorithm_type="sde-dpmsolver++"),
    "dpm++-third-order": lambda config: DPMSolverMultistepScheduler.from_config(config, solver_order=3),
    "dpm++-singlestep": lambda config: DPMSolverSinglestepScheduler.from_config(config, lower_order_final=True),
    "unipc-third-order": lambda config: UniPCMultistepScheduler.from_config(config, solver_order=3),
    "deis": DEISMultistepScheduler.from_config,
    "lms": LMSDiscreteScheduler.from_config,
    "pndm": lambda config: PNDMScheduler.from_config(config, skip_prk_steps=True),
    "ddpm": lambda config: DDPMScheduler.from_config(config, clip_sample=False),
    "sa-solver": SASolverScheduler.from_config,
}
"""Samplers that cannot be batched, made in the same way."""
_TEXT_POSITIONS = 16
_UNET: dict[str, Any] = {
    "block_out_channels": (16, 32, 32),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 1,
    "attention_head_dim": (1, 2, 2),
    "cross_attention_dim": 64,
    "norm_num_groups": 8,
    "sample_size": 8,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 6 * 8 + 32,
    "use_linear_projection": True,
}


def tiny_tokenizer(length: int = _TEXT_POSITIONS) -> CLIPTokenizer:
    """Return a CLIP tokenizer that knows single letters, digits and signs only, for texts of `length` tokens."""
    letters = [chr(code) for code in range(33, 127)]
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    vocabulary = {word: index for index, word in enumerate(words)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=length)


def clip_config(num_layers: int = 3, width: int = 32) -> CLIPTextConfig:
    """Return the configuration of a small CLIP text encoder for `tiny_tokenizer`."""
    return CLIPTextConfig(
        vocab_size=190,
        hidden_size=width,
        intermediate_size=48,
        projection_dim=32,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        max_position_embeddings=_TEXT_POSITIONS,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )


def tiny_autoencoder(**config: Any) -> AutoencoderKL:
    """Return a small autoencoder with these settings that reduces pictures by a factor of 8."""
    usual: dict[str, Any] = {
        "block_out_channels": (8, 8, 16, 16),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "latent_channels": 4,
        "norm_num_groups": 4,
        "sample_size": 64,
    }
    return AutoencoderKL(**usual | config)


def tiny_sdxl(seed: int = 0, widths: tuple[int, int] = (32, 32)) -> StableDiffusionXLPipeline:
    """Return a small pipeline of SDXL's architecture: two text encoders of these widths, which add up to 64, three down
    blocks, 8x autoencoder, Euler.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        unet = UNet2DConditionModel(**_UNET)
        scheduler: Any = EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
        return StableDiffusionXLPipeline(
            vae=tiny_autoencoder(scaling_factor=0.5),
            text_encoder=CLIPTextModel(clip_config(width=widths[0])),
            text_encoder_2=CLIPTextModelWithProjection(clip_config(width=widths[1])),
            tokenizer=tiny_tokenizer(),
            tokenizer_2=tiny_tokenizer(),
            unet=unet,
            scheduler=scheduler,
            add_watermarker=False,
        )


def tiny_sd(seed: int = 0) -> StableDiffusionPipeline:
    """Return a small pipeline of Stable Diffusion 1.5's architecture: one text encoder, convolutional proj_in, DDIM."""
    config: dict[str, Any] = {
        name: value for name, value in _UNET.items() if "addition" not in name and "projection" not in name
    }
    config |= {"cross_attention_dim": 32, "attention_head_dim": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        unet = UNet2DConditionModel(**config)
        scheduler: Any = DDIMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, steps_offset=1
        )
        no_checker: dict[str, Any] = {"safety_checker": None, "feature_extractor": None}
        return StableDiffusionPipeline(
            vae=tiny_autoencoder(scaling_factor=0.5),
            text_encoder=CLIPTextModel(clip_config()),
            tokenizer=tiny_tokenizer(),
            unet=unet,
            scheduler=scheduler,
            requires_safety_checker=False,
            **no_checker,
        )


def smallest_sd() -> StableDiffusionPipeline:
    """Return Stable Diffusion's architecture with as few layers as possible, for runs with very many requests."""
    pipe = tiny_sd()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        unet = UNet2DConditionModel(
            block_out_channels=(8, 8),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            layers_per_block=1,
            attention_head_dim=2,
            cross_attention_dim=32,
            norm_num_groups=4,
            sample_size=8,
        )
        text_encoder = CLIPTextModel(clip_config(num_layers=1))
    pipe.register_modules(unet=unet, text_encoder=text_encoder)
    return pipe


def tiny_sd3(seed: int = 0, num_channels: int = 4, **scheduler: Any) -> StableDiffusion3Pipeline:
    """Return a small pipeline of SD3's architecture: two CLIP encoders, no T5, two joint blocks, flow-match Euler."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=num_channels,
            out_channels=num_channels,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=64,
            caption_projection_dim=32,
            pooled_projection_dim=64,
            pos_embed_max_size=12,
        )
        no_t5: dict[str, Any] = {"text_encoder_3": None, "tokenizer_3": None}
        return StableDiffusion3Pipeline(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(**{"shift": 1.5, **scheduler}),
            vae=tiny_autoencoder(scaling_factor=0.7, shift_factor=0.1, latent_channels=num_channels),
            text_encoder=CLIPTextModelWithProjection(clip_config()),
            tokenizer=tiny_tokenizer(),
            text_encoder_2=CLIPTextModelWithProjection(clip_config()),
            tokenizer_2=tiny_tokenizer(),
            **no_t5,
        )


def save_tiny(directory: Path, pipe: Any, **defaults: Any) -> Path:
    """Save a pipeline as a plain diffusers directory, with `psctl.json` if defaults are given.

    A processor without its part for videos (`tiny_qwen_edit`) cannot be saved, and is left out.
    """
    processor = getattr(pipe, "processor", None)
    if processor is not None and processor.video_processor is None:
        pipe.register_modules(processor=None)
        try:
            return save_tiny(directory, pipe, **defaults)
        finally:
            pipe.register_modules(processor=processor)
    pipe.save_pretrained(directory)
    if defaults:
        (directory / "psctl.json").write_text(json.dumps(defaults))
    return directory


def largest_error(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest absolute difference over pairs of tensors, each pair of the same shape."""
    errors = []
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape, f"{tuple(one.shape)} against {tuple(other.shape)}"
        errors.append(float((one.float() - other.float()).abs().max()))
    return max(errors)


def dequantise(target: torch.nn.Module, model: torch.nn.Module) -> None:
    """Give a module the weights of another of its class, whose weights of 8 bits become float32."""
    weights = {
        name: weight.dequantize() if type(weight).__name__ == "Int8Tensor" else weight
        for name, weight in model.state_dict().items()
    }
    target.load_state_dict(weights)
