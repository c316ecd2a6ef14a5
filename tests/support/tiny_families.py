"""Tiny diffusers pipelines with random weights, of the families other than Stable Diffusion (`tiny_models`)."""

from itertools import pairwise
from typing import Any

import torch
from diffusers import (
    AuraFlowPipeline,
    AutoencoderKLFlux2,
    ChromaPipeline,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    FluxKontextPipeline,
    FluxPipeline,
    Lumina2Pipeline,
    OvisImagePipeline,
    PixArtSigmaPipeline,
    ZImagePipeline,
)
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from transformers import (
    CLIPTextModel,
    Gemma2Config,
    Gemma2Model,
    GemmaTokenizer,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

from .random_models import (
    aura_transformer,
    chroma_transformer,
    flux2_transformer,
    flux_transformer,
    klein_transformer,
    lumina2_transformer,
    ovis_transformer,
    pixart_transformer,
    z_image_transformer,
)
from .tiny_models import clip_config, tiny_autoencoder, tiny_tokenizer

_LUMINA_SYSTEM_PROMPT = (
    "You are an assistant designed to generate superior images with the superior degree of image-text alignment based "
    "on textual prompts or user prompts."
)

_OVIS_SYSTEM_PROMPT = (
    "Describe the image by detailing the color, quantity, text, shape, size, texture, spatial relationships of the "
    "objects and background: "
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
    """Return a small pipeline of FLUX.1's architecture: CLIP and T5, two joint and two single-stream blocks, heads and
    scheduler as published; dev embeds the guidance scale and shifts its schedule by the size, schnell does neither.
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
            vae=tiny_autoencoder(scaling_factor=0.36, shift_factor=0.1, latent_channels=num_channels),
            text_encoder=CLIPTextModel(clip_config()),
            tokenizer=tiny_tokenizer(),
            text_encoder_2=t5,
            tokenizer_2=tokenizer,
        )


def tiny_schnell(seed: int = 0) -> FluxPipeline:
    """Return `tiny_flux` as FLUX.1 schnell."""
    return tiny_flux(seed, is_dev=False)


def tiny_kontext(seed: int = 0) -> FluxKontextPipeline:
    """Return `tiny_flux` as FLUX.1 Kontext, which takes a reference."""
    return FluxKontextPipeline(**tiny_flux(seed).components)


def tiny_autoencoder_flux2() -> AutoencoderKLFlux2:
    """Return a small autoencoder of FLUX.2, whose latent statistics differ from those of new layers."""
    vae = AutoencoderKLFlux2(
        block_out_channels=(8, 8, 16, 16), latent_channels=2, norm_num_groups=4, sample_size=64, layers_per_block=1
    )
    statistics: Any = vae.bn
    statistics.running_mean.normal_(0.0, 0.3)
    statistics.running_var.uniform_(0.5, 2.0)
    return vae


def tiny_flux2(seed: int = 0) -> Flux2Pipeline:
    """Return a small pipeline of FLUX.2 dev's architecture: the layers of Mistral 3 that are read, two joint and two
    single-stream blocks. The tokenizer is for text only: the published one also reads images, which needs torchvision.
    """
    layers: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 30, "head_dim": 8}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    vision: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    tokenizer = tiny_chat_tokenizer(SYSTEM_MESSAGE)
    text: dict[str, Any] = {"model_type": "mistral", "vocab_size": len(tokenizer), **layers, **heads}
    config = Mistral3Config(
        text_config=text,
        vision_config={"model_type": "pixtral", "num_attention_heads": 2, "image_size": 28, **vision},
        image_token_index=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Flux2Pipeline(
            transformer=flux2_transformer(seed, in_channels=8, joint_attention_dim=3 * 16),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
            vae=tiny_autoencoder_flux2(),
            text_encoder=Mistral3ForConditionalGeneration(config),
            tokenizer=tokenizer,  # type: ignore[arg-type]  what the published one does with text alone
        )


def tiny_klein(seed: int = 0, *, is_distilled: bool = True) -> Flux2KleinPipeline:
    """Return a small pipeline of FLUX.2 Klein's architecture: Qwen 3 instead of Mistral 3, no guidance scale input."""
    tokenizer = tiny_chat_tokenizer()
    layers: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 27, "head_dim": 8}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Flux2KleinPipeline(
            transformer=klein_transformer(seed, in_channels=8, joint_attention_dim=3 * 16),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
            vae=tiny_autoencoder_flux2(),
            text_encoder=Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **layers, **heads)),
            tokenizer=tokenizer,
            is_distilled=is_distilled,
        )


def tiny_klein_base(seed: int = 0) -> Flux2KleinPipeline:
    """Return `tiny_klein` as the base model, which uses real guidance."""
    return tiny_klein(seed, is_distilled=False)


def tiny_aura(seed: int = 0) -> AuraFlowPipeline:
    """Return a small pipeline of AuraFlow's architecture: a UMT5 encoder, two joint and two single-stream blocks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder, tokenizer = tiny_t5(24, is_umt5=True)
        return AuraFlowPipeline(
            transformer=aura_transformer(seed, joint_attention_dim=24),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
            vae=tiny_autoencoder(scaling_factor=0.13),
            text_encoder=encoder,
            tokenizer=tokenizer,
        )


def tiny_chroma(seed: int = 0, *, num_channels: int = 4) -> ChromaPipeline:
    """Return a small pipeline of Chroma's architecture: T5, two joint and two single-stream blocks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder, tokenizer = tiny_t5(24)
        return ChromaPipeline(
            transformer=chroma_transformer(seed, in_channels=4 * num_channels, joint_attention_dim=24),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True, max_shift=1.15),
            vae=tiny_autoencoder(scaling_factor=0.36, shift_factor=0.1, latent_channels=num_channels),
            text_encoder=encoder,
            tokenizer=tokenizer,
        )


def tiny_ovis(seed: int = 0) -> OvisImagePipeline:
    """Return a small pipeline of Ovis-Image's architecture: Qwen 3, two joint and two single-stream blocks."""
    layers: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    # The pipeline drops 28 tokens of its template.
    tokenizer = tiny_chat_tokenizer(*in_parts(_OVIS_SYSTEM_PROMPT, 28))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return OvisImagePipeline(
            transformer=ovis_transformer(seed, joint_attention_dim=24),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True, max_shift=1.15),
            vae=tiny_autoencoder(scaling_factor=0.36, shift_factor=0.1),
            text_encoder=Qwen3Model(Qwen3Config(vocab_size=len(tokenizer), **layers, **heads)),
            tokenizer=tokenizer,  # type: ignore[arg-type]  AutoTokenizer is no class of tokenizers
        )


def tiny_pixart(seed: int = 0) -> PixArtSigmaPipeline:
    """Return a small pipeline of PixArt-Sigma's architecture: T5, three blocks, and DPM-Solver++ as published."""
    scheduler: Any = DPMSolverMultistepScheduler(beta_start=0.0001, beta_end=0.02, beta_schedule="linear")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder, tokenizer = tiny_t5(24)
        return PixArtSigmaPipeline(
            transformer=pixart_transformer(seed, caption_channels=24),
            scheduler=scheduler,
            vae=tiny_autoencoder(scaling_factor=0.13),
            text_encoder=encoder,
            tokenizer=tokenizer,
        )


def tiny_gemma(width: int) -> tuple[Gemma2Model, GemmaTokenizer]:
    """Return a Gemma 2 whose states have this width, and a tokenizer that knows single letters, digits and signs.

    Lumina 2's system prompt is a single token, so that it does not dominate the text.
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
    """Return a small pipeline of Lumina 2's architecture: Gemma 2, a block that refines the text, one that refines the
    image, and two for both.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder, tokenizer = tiny_gemma(24)
        return Lumina2Pipeline(
            transformer=lumina2_transformer(seed, cap_feat_dim=24),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
            vae=tiny_autoencoder(scaling_factor=0.36, shift_factor=0.1),
            text_encoder=encoder,
            tokenizer=tokenizer,
        )


def tiny_chat_tokenizer(*system_prompts: str) -> Qwen2Tokenizer:
    """Return a Qwen tokenizer that knows single letters, digits and signs.

    A chat is the texts of its messages, and a system prompt is one token, so that it does not dominate the text.
    """
    words = ["<|endoftext|>", "Ġ", "Ċ", *map(chr, range(33, 127))]
    tokenizer = Qwen2Tokenizer({word: number for number, word in enumerate(words)}, [])
    tokenizer.add_tokens(list(system_prompts))
    tokenizer.chat_template = (
        "{% for each in messages %}{{ each.content if each.content is string else each.content[0].text }}{% endfor %}"
        "{% if add_generation_prompt %}:{% endif %}"
    )
    return tokenizer


def in_parts(text: str, count: int) -> list[str]:
    """Cut a text into parts of about as many letters."""
    cuts = [round(len(text) * part / count) for part in range(count + 1)]
    return [text[start:end] for start, end in pairwise(cuts)]


def tiny_z_image(seed: int = 0) -> ZImagePipeline:
    """Return a small pipeline of Z-Image's architecture: Qwen 3, a block that refines the text, one for the image, and
    two for both.
    """
    tokenizer = tiny_chat_tokenizer()
    layers: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ZImagePipeline(
            transformer=z_image_transformer(seed, cap_feat_dim=24),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=tiny_autoencoder(scaling_factor=0.36, shift_factor=0.1),
            text_encoder=Qwen3Model(Qwen3Config(vocab_size=len(tokenizer), **layers, **heads)),
            tokenizer=tokenizer,  # type: ignore[arg-type]  AutoTokenizer is no class of tokenizers
        )
