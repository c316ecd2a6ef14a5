"""Tiny diffusers pipelines with random weights, built in code: the real architectures at a size for tests."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AuraFlowPipeline,
    AutoencoderKL,
    AutoencoderKLQwenImage,
    ChromaPipeline,
    DDIMScheduler,
    DDPMScheduler,
    DEISMultistepScheduler,
    DPMSolverMultistepScheduler,
    DPMSolverSinglestepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    HeunDiscreteScheduler,
    KDPM2AncestralDiscreteScheduler,
    KDPM2DiscreteScheduler,
    LCMScheduler,
    LMSDiscreteScheduler,
    Lumina2Pipeline,
    PixArtSigmaPipeline,
    PNDMScheduler,
    QwenImagePipeline,
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
    Gemma2Config,
    Gemma2Model,
    GemmaTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

from .patched_models import (
    aura_transformer,
    chroma_transformer,
    flux_transformer,
    lumina2_transformer,
    pixart_transformer,
    qwen_transformer,
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
"""Samplers of the pipelines with a U-Net, made of the configuration of another."""
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
"""The same, of those that are not batched."""
_TEXT_POSITIONS = 16
_LUMINA_SYSTEM_PROMPT = (
    "You are an assistant designed to generate superior images with the superior degree of image-text alignment based "
    "on textual prompts or user prompts."
)
_QWEN_SYSTEM_PROMPT = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the "
    "objects and background:"
)
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


def tiny_tokenizer() -> CLIPTokenizer:
    """Return a CLIP tokenizer that knows single letters, digits and signs only."""
    letters = [chr(code) for code in range(33, 127)]
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    vocabulary = {word: index for index, word in enumerate(words)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=_TEXT_POSITIONS)


def _text_config(num_layers: int = 3, width: int = 32) -> CLIPTextConfig:
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


def _autoencoder(**config: Any) -> AutoencoderKL:
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
    """Return SDXL's architecture, small: two text encoders of these widths, which add up to 64, three down blocks, 8x
    autoencoder, Euler.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        unet = UNet2DConditionModel(**_UNET)
        scheduler: Any = EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
        return StableDiffusionXLPipeline(
            vae=_autoencoder(scaling_factor=0.5),
            text_encoder=CLIPTextModel(_text_config(width=widths[0])),
            text_encoder_2=CLIPTextModelWithProjection(_text_config(width=widths[1])),
            tokenizer=tiny_tokenizer(),
            tokenizer_2=tiny_tokenizer(),
            unet=unet,
            scheduler=scheduler,
            add_watermarker=False,
        )


def tiny_sd(seed: int = 0) -> StableDiffusionPipeline:
    """Return Stable Diffusion 1.5's architecture, small: one text encoder, proj_in by convolution, DDIM."""
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
            vae=_autoencoder(scaling_factor=0.5),
            text_encoder=CLIPTextModel(_text_config()),
            tokenizer=tiny_tokenizer(),
            unet=unet,
            scheduler=scheduler,
            requires_safety_checker=False,
            **no_checker,
        )


def smallest_sd() -> StableDiffusionPipeline:
    """Return Stable Diffusion's architecture with as few layers as it can have, for runs of very many requests."""
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
        text_encoder = CLIPTextModel(_text_config(num_layers=1))
    pipe.register_modules(unet=unet, text_encoder=text_encoder)
    return pipe


def tiny_sd3(seed: int = 0, num_channels: int = 4, **scheduler: Any) -> StableDiffusion3Pipeline:
    """Return SD3's architecture, small: two CLIP encoders, no T5, two joint blocks, flow-match Euler."""
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
            vae=_autoencoder(scaling_factor=0.7, shift_factor=0.1, latent_channels=num_channels),
            text_encoder=CLIPTextModelWithProjection(_text_config()),
            tokenizer=tiny_tokenizer(),
            text_encoder_2=CLIPTextModelWithProjection(_text_config()),
            tokenizer_2=tiny_tokenizer(),
            **no_t5,
        )


def tiny_t5(width: int, *, is_umt5: bool = False) -> tuple[Any, T5Tokenizer]:
    """Return a T5 encoder whose states have this width, and a tokenizer that knows single letters, digits and signs."""
    letters = [(chr(code), -1.0) for code in range(33, 127)]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0), *letters]
    config: Any
    encoder: Any
    config, encoder = (UMT5Config, UMT5EncoderModel) if is_umt5 else (T5Config, T5EncoderModel)
    sizes: dict[str, Any] = {"d_model": width, "d_kv": 8, "num_heads": 2, "d_ff": 32, "num_layers": 2}
    return encoder(config(vocab_size=len(vocabulary), dropout_rate=0.0, **sizes)), T5Tokenizer(
        vocab=vocabulary, extra_ids=0
    )


def tiny_flux(seed: int = 0, *, is_dev: bool = True, num_channels: int = 4) -> FluxPipeline:
    """Return FLUX.1's architecture, small: CLIP and T5, two joint blocks and two of one stream, heads and scheduler as
    published; dev embeds the guidance scale and shifts its schedule by the size, schnell does neither.
    """
    schedule: dict[str, Any] = {"shift": 3.0, "use_dynamic_shifting": True} if is_dev else {"shift": 1.0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        t5, tokenizer = tiny_t5(24)
        return FluxPipeline(
            transformer=flux_transformer(
                seed,
                in_channels=4 * num_channels,
                joint_attention_dim=24,
                pooled_projection_dim=32,
                guidance_embeds=is_dev,
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(max_shift=1.15, **schedule),
            vae=_autoencoder(scaling_factor=0.36, shift_factor=0.1, latent_channels=num_channels),
            text_encoder=CLIPTextModel(_text_config()),
            tokenizer=tiny_tokenizer(),
            text_encoder_2=t5,
            tokenizer_2=tokenizer,
        )


def tiny_schnell(seed: int = 0) -> FluxPipeline:
    """Return `tiny_flux` as FLUX.1 schnell."""
    return tiny_flux(seed, is_dev=False)


def tiny_aura(seed: int = 0) -> AuraFlowPipeline:
    """Return AuraFlow's architecture, small: a UMT5 encoder, two joint blocks and two of one stream."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder, tokenizer = tiny_t5(24, is_umt5=True)
        return AuraFlowPipeline(
            transformer=aura_transformer(seed, joint_attention_dim=24),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
            vae=_autoencoder(scaling_factor=0.13),
            text_encoder=encoder,
            tokenizer=tokenizer,
        )


def tiny_chroma(seed: int = 0, *, num_channels: int = 4) -> ChromaPipeline:
    """Return Chroma's architecture, small: T5, two joint blocks and two of one stream."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder, tokenizer = tiny_t5(24)
        return ChromaPipeline(
            transformer=chroma_transformer(seed, in_channels=4 * num_channels, joint_attention_dim=24),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True, max_shift=1.15),
            vae=_autoencoder(scaling_factor=0.36, shift_factor=0.1, latent_channels=num_channels),
            text_encoder=encoder,
            tokenizer=tokenizer,
        )


def tiny_pixart(seed: int = 0) -> PixArtSigmaPipeline:
    """Return PixArt-Sigma's architecture, small: T5, three blocks, and DPM-Solver++ as published."""
    scheduler: Any = DPMSolverMultistepScheduler(beta_start=0.0001, beta_end=0.02, beta_schedule="linear")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder, tokenizer = tiny_t5(24)
        return PixArtSigmaPipeline(
            transformer=pixart_transformer(seed, caption_channels=24),
            scheduler=scheduler,
            vae=_autoencoder(scaling_factor=0.13),
            text_encoder=encoder,
            tokenizer=tokenizer,
        )


def tiny_gemma(width: int) -> tuple[Gemma2Model, GemmaTokenizer]:
    """Return a Gemma 2 whose states have this width, and a tokenizer that knows single letters, digits and signs; and
    Lumina 2's system prompt, so that it does not drown the others.
    """
    words = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *map(chr, range(33, 127))]
    tokenizer = GemmaTokenizer({word: number for number, word in enumerate(words)}, [], add_bos_token=True)
    tokenizer.add_tokens([_LUMINA_SYSTEM_PROMPT])
    config = Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    return Gemma2Model(config), tokenizer


def tiny_lumina2(seed: int = 0) -> Lumina2Pipeline:
    """Return Lumina 2's architecture, small: Gemma 2, a block that refines the text, one that refines the image, two
    that take both.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder, tokenizer = tiny_gemma(24)
        return Lumina2Pipeline(
            transformer=lumina2_transformer(seed, cap_feat_dim=24),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
            vae=_autoencoder(scaling_factor=0.36, shift_factor=0.1),
            text_encoder=encoder,
            tokenizer=tokenizer,
        )


def tiny_qwen(seed: int = 0) -> QwenImagePipeline:
    """Return Qwen-Image's architecture, small: Qwen 2.5 VL, two joint blocks, an autoencoder of videos."""
    letters = [chr(code) for code in range(33, 127)]
    words = ["<|endoftext|>", "Ġ", "Ċ", *letters]
    tokenizer = Qwen2Tokenizer({word: number for number, word in enumerate(words)}, [])
    tokenizer.add_tokens([_QWEN_SYSTEM_PROMPT])
    layers: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
    rope: dict[str, Any] = {"mrope_section": [2, 2, 2], "rope_type": "default", "type": "default"}
    vision: dict[str, Any] = {"depth": 1, "hidden_size": 24, "intermediate_size": 24, "num_heads": 2}
    config = Qwen2_5_VLConfig(
        text_config={**layers, **heads, "rope_scaling": rope, "vocab_size": len(tokenizer)},
        vision_config={**vision, "out_hidden_size": 24},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return QwenImagePipeline(
            transformer=qwen_transformer(seed, joint_attention_dim=24),
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_shift=0.9),
            vae=AutoencoderKLQwenImage(
                base_dim=8,
                z_dim=4,
                dim_mult=[1, 1, 1, 1],
                num_res_blocks=1,
                temperal_downsample=[False, True, True],
                latents_mean=[0.1, -0.2, 0.3, 0.0],
                latents_std=[1.0, 2.0, 1.5, 0.5],
            ),
            text_encoder=Qwen2_5_VLForConditionalGeneration(config),
            tokenizer=tokenizer,
        )


def save_tiny(directory: Path, pipe: Any, **defaults: Any) -> Path:
    """Save a pipeline as a plain diffusers directory, with `psctl.json` if defaults are given."""
    pipe.save_pretrained(directory)
    if defaults:
        (directory / "psctl.json").write_text(json.dumps(defaults))
    return directory


def plain_latents(pipe: Any, request: Any, **options: Any) -> torch.Tensor:
    """Return what the plain pipeline, called with these options, gives for one request alone: its final latents."""
    return _plain(pipe, request, "latent", **options)


def plain_image(pipe: Any, request: Any) -> Any:
    """Return what the plain pipeline gives for one request alone: its PIL image."""
    return _plain(pipe, request, "pil")


def _plain(pipe: Any, request: Any, output_type: str, **options: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    negative = request.negative_prompt
    if type(pipe).__name__ == "PixArtSigmaPipeline":
        options = {"use_resolution_binning": False, **options}  # draws other sizes than asked for, and scales them
        negative = negative or ""  # its default; None is none of a batch
    if type(pipe).__name__ == "QwenImagePipeline":
        options = {"true_cfg_scale": request.guidance_scale, **options}
        negative = negative or ""  # None is no guidance
    drawn = pipe(
        prompt=request.prompt,
        negative_prompt=negative,
        width=request.resolution.width,
        height=request.resolution.height,
        num_inference_steps=request.num_inference_steps,
        guidance_scale=request.guidance_scale,
        generator=torch.Generator("cpu").manual_seed(request.seed),
        output_type=output_type,
        **options,
    ).images
    if output_type == "latent" and isinstance(pipe, FluxPipeline | ChromaPipeline | QwenImagePipeline):
        drawn = pipe._unpack_latents(drawn, request.resolution.height, request.resolution.width, pipe.vae_scale_factor)
    if output_type == "latent" and type(pipe).__name__ == "QwenImagePipeline":
        drawn = drawn[:, :, 0]  # of frames, the only one
    return drawn[0]


def largest_error(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest absolute difference over pairs of tensors, each pair of the same shape."""
    errors = []
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape, f"{tuple(one.shape)} against {tuple(other.shape)}"
        errors.append(float((one.float() - other.float()).abs().max()))
    return max(errors)
