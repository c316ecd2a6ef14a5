"""Write a diffusers folder of a full-size model of SDXL or any transformer family with random weights, to measure it.

    python tests/benchmarks/make_random_model.py sdxl /tmp/sdxl
    psctl bench steps --model /tmp/sdxl --device cuda --dtype float16 --resolutions 512,768,1024

The denoising model has the published configuration. Text encoders and autoencoder have the right widths but few layers,
because `psctl bench steps` does not time them. `--tiny` makes all components small, to try the commands on a CPU:

    python tests/benchmarks/make_random_model.py flux-dev /tmp/flux --tiny
    psctl generate "a red apple" --model /tmp/flux

`--small` chooses sizes that two cores can measure (heads as published, 12 blocks of width 384):

    python tests/benchmarks/make_random_model.py flux-dev /tmp/flux-small --small
    psctl bench steps --model /tmp/flux-small --dtype float32 --resolutions 256,384,512

FLUX.2 Klein is smaller, 6 blocks of width 128, for traces with many requests, and draws images of 64 to 192 pixels:

    python tests/benchmarks/make_random_model.py flux2-klein /tmp/klein-small --small
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AuraFlowPipeline,
    AuraFlowTransformer2DModel,
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    ChromaPipeline,
    ChromaTransformer2DModel,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)

from patchedserve.tests.support.model_sizes import CONFIGS, SMALL, SMALL_SETTINGS, TINY
from patchedserve.tests.support.tiny_families import tiny_chat_tokenizer, tiny_gemma, tiny_t5
from patchedserve.tests.support.tiny_models import tiny_tokenizer


def text_encoder(kind: Any, width: int) -> Any:
    """Return a text encoder of one layer whose states have the width that the denoising model expects."""
    return kind(
        CLIPTextConfig(
            vocab_size=512,
            hidden_size=width,
            intermediate_size=width,
            projection_dim=width,
            num_hidden_layers=1,
            num_attention_heads=width // 64,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
    )


def autoencoder(channels: int) -> AutoencoderKL:
    config: dict[str, Any] = {
        "block_out_channels": (8, 8, 16, 16),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "norm_num_groups": 4,
        "sample_size": 1024,
        "shift_factor": 0.0,
    }
    return AutoencoderKL(latent_channels=channels, **config)


def build_sdxl(config: dict[str, Any]) -> StableDiffusionXLPipeline:
    euler: Any = EulerDiscreteScheduler()
    return StableDiffusionXLPipeline(
        vae=autoencoder(4),
        text_encoder=text_encoder(CLIPTextModel, 768),
        text_encoder_2=text_encoder(CLIPTextModelWithProjection, 1280),
        tokenizer=tiny_tokenizer(77),
        tokenizer_2=tiny_tokenizer(77),
        unet=UNet2DConditionModel(**config),
        scheduler=euler,
        add_watermarker=False,
    )


def build_sd3(config: dict[str, Any]) -> StableDiffusion3Pipeline:
    no_t5: dict[str, Any] = {"text_encoder_3": None, "tokenizer_3": None}
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(**config),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=autoencoder(16),
        text_encoder=text_encoder(CLIPTextModelWithProjection, 768),
        text_encoder_2=text_encoder(CLIPTextModelWithProjection, 1280),
        tokenizer=tiny_tokenizer(77),
        tokenizer_2=tiny_tokenizer(77),
        **no_t5,
    )


def build_flux(config: dict[str, Any]) -> FluxPipeline:
    transformer = FluxTransformer2DModel(**config)
    encoder, tokenizer_2 = tiny_t5(int(transformer.config["joint_attention_dim"]))
    shift: dict[str, Any] = {"shift": 3.0, "use_dynamic_shifting": True} if config["guidance_embeds"] else {}
    return FluxPipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(**shift),
        vae=autoencoder(16),
        text_encoder=text_encoder(CLIPTextModel, 768),
        tokenizer=tiny_tokenizer(77),
        text_encoder_2=encoder,
        tokenizer_2=tokenizer_2,
    )


def build_flux2(config: dict[str, Any]) -> Flux2Pipeline | Flux2KleinPipeline:
    """Return FLUX.2 dev, or Klein for a configuration without embedded guidance. Its text is the states of 3 layers."""
    transformer, own = Flux2Transformer2DModel(**config), tiny_chat_tokenizer()
    is_klein = config.get("guidance_embeds") is False
    layers: dict[str, Any] = {
        "vocab_size": len(own),
        "hidden_size": transformer.config["joint_attention_dim"] // 3,
        "intermediate_size": 32,
        "num_hidden_layers": 27 if is_klein else 30,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    }
    parts: dict[str, Any] = {
        "transformer": transformer,
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        "vae": AutoencoderKLFlux2(
            block_out_channels=(8, 8, 16, 16),
            norm_num_groups=4,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
        ),
        "tokenizer": own,
    }
    if is_klein:
        return Flux2KleinPipeline(text_encoder=Qwen3ForCausalLM(Qwen3Config(**layers)), is_distilled=True, **parts)
    vision: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    encoder = Mistral3ForConditionalGeneration(
        Mistral3Config(
            text_config={"model_type": "mistral", **layers},
            vision_config={"model_type": "pixtral", "num_attention_heads": 2, "image_size": 28, **vision},
            image_token_index=1,
        )
    )
    return Flux2Pipeline(text_encoder=encoder, **parts)


def build_aura(config: dict[str, Any]) -> AuraFlowPipeline:
    transformer = AuraFlowTransformer2DModel(**config)
    encoder, own = tiny_t5(int(transformer.config["joint_attention_dim"]), is_umt5=True)
    return AuraFlowPipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
        vae=autoencoder(4),
        text_encoder=encoder,
        tokenizer=own,
    )


def build_chroma(config: dict[str, Any]) -> ChromaPipeline:
    transformer = ChromaTransformer2DModel(**config)
    encoder, own = tiny_t5(int(transformer.config["joint_attention_dim"]))
    return ChromaPipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=autoencoder(16),
        text_encoder=encoder,
        tokenizer=own,
    )


def build_pixart(config: dict[str, Any]) -> PixArtSigmaPipeline:
    transformer = PixArtTransformer2DModel(**config)
    encoder, own = tiny_t5(int(transformer.config["caption_channels"]))
    scheduler: Any = DPMSolverMultistepScheduler(beta_start=0.0001, beta_end=0.02, beta_schedule="linear")
    return PixArtSigmaPipeline(
        transformer=transformer, scheduler=scheduler, vae=autoencoder(4), text_encoder=encoder, tokenizer=own
    )


def build_lumina2(config: dict[str, Any]) -> Lumina2Pipeline:
    transformer = Lumina2Transformer2DModel(**config)
    encoder, own = tiny_gemma(int(transformer.config["cap_feat_dim"]))
    return Lumina2Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=autoencoder(16),
        text_encoder=encoder,
        tokenizer=own,
    )


def build_qwen(config: dict[str, Any]) -> QwenImagePipeline:
    transformer = QwenImageTransformer2DModel(**config)
    width, own = int(transformer.config["joint_attention_dim"]), tiny_chat_tokenizer()
    # A head has 128 channels, two for each rotary frequency of time, height and width.
    heads: dict[str, Any] = {"num_attention_heads": width // 128, "num_key_value_heads": width // 128}
    rope: dict[str, Any] = {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"}
    layers: dict[str, Any] = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": 1}
    vision: dict[str, Any] = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    encoder = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={**layers, **heads, "rope_scaling": rope, "vocab_size": len(own)},
            vision_config={**vision, "out_hidden_size": width},
        )
    )
    return QwenImagePipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_shift=0.9),
        vae=AutoencoderKLQwenImage(base_dim=8, dim_mult=[1, 1, 1, 1], num_res_blocks=1),
        text_encoder=encoder,
        tokenizer=own,
    )


def build_z_image(config: dict[str, Any]) -> ZImagePipeline:
    transformer, own = ZImageTransformer2DModel(**config), tiny_chat_tokenizer()
    width = int(transformer.config["cap_feat_dim"])
    layers: dict[str, Any] = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": 2, "head_dim": 32}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    text: dict[str, Any] = {
        "text_encoder": Qwen3Model(Qwen3Config(vocab_size=len(own), **layers, **heads)),
        "tokenizer": own,
    }
    scheduler = FlowMatchEulerDiscreteScheduler(shift=6.0)
    return ZImagePipeline(transformer=transformer, scheduler=scheduler, vae=autoencoder(16), **text)


def build(name: str, smaller: dict[str, dict[str, Any]]) -> Any:
    builders = {
        "sdxl": build_sdxl,
        "sd3": build_sd3,
        "flux-kontext": lambda config: FluxKontextPipeline(**build_flux(config).components),
        "flux2-dev": build_flux2,
        "flux2-klein": build_flux2,
        "aura": build_aura,
        "chroma": build_chroma,
        "pixart": build_pixart,
        "lumina2": build_lumina2,
        "qwen": build_qwen,
        "z-image": build_z_image,
    }
    return builders.get(name, build_flux)(CONFIGS[name] | smaller.get(name, {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(CONFIGS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", dest="smaller", action="store_const", const=TINY, default={})
    parser.add_argument("--small", dest="smaller", action="store_const", const=SMALL)
    options = parser.parse_args()
    if options.smaller and options.name not in options.smaller:
        parser.error(f"there is no small {options.name}; there are {', '.join(options.smaller)}")
    torch.manual_seed(0)
    build(options.name, options.smaller).to(torch.float16).save_pretrained(options.folder)
    if options.smaller is SMALL and options.name in SMALL_SETTINGS:
        (options.folder / "psctl.json").write_text(json.dumps(SMALL_SETTINGS[options.name], indent=2) + "\n")


if __name__ == "__main__":
    main()
