"""Export of trained parts as ordinary diffusers and transformers directories, in fp16."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from diffusers.models.attention_processor import JointAttnProcessor2_0
from transformers import (
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from ...data.files import atomic_folder, write_json
from ...data.models.bundled import CARD_FILES, write_checksums
from .generators import BETAS, FLOW_SHIFT
from .judge import IMAGE_SIDE
from .text import MAX_TOKENS

T5_VOCABULARY = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0)]
SERVED_SIZES = ["128", "192", "256"]


def export_emoji_xl(
    folder: Path,
    unet: UNet2DConditionModel,
    vae: AutoencoderKL,
    tokenizer: CLIPTokenizer,
    encoders: list[CLIPTextModelWithProjection],
    defaults: Mapping[str, object] = {"num_inference_steps": 30, "guidance_scale": 4.0},
) -> None:
    """Write a directory that `StableDiffusionXLPipeline.from_pretrained` loads.

    Args:
        folder: replaced as a whole once everything is written, except for the files of its model card, which are kept;
            the checksums in its parent folder are updated.
        encoders: the narrow and the wide text encoder, in this order.
        defaults: default request parameters of the model.
    """
    first = CLIPTextModel(encoders[0].config)
    first.load_state_dict(encoders[0].text_model.state_dict())
    pipe = StableDiffusionXLPipeline(
        vae=vae,
        text_encoder=first,
        text_encoder_2=encoders[1],
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=unet,
        scheduler=EulerDiscreteScheduler(  # pyright: ignore[reportArgumentType]  # annotated as an enum of names
            prediction_type="v_prediction", timestep_spacing="trailing", num_train_timesteps=1000, **BETAS
        ),
        force_zeros_for_empty_prompt=True,
        add_watermarker=False,
    )
    _save(pipe, folder, {**defaults, "resolutions": SERVED_SIZES})


def export_emoji_xl_turbo(folder: Path, *parts: Any) -> None:
    """Write the distilled model as `export_emoji_xl` does: few steps, and guidance baked in."""
    export_emoji_xl(folder, *parts, defaults={"num_inference_steps": 2, "guidance_scale": 1.0})


def export_emoji_3(
    folder: Path,
    transformer: SD3Transformer2DModel,
    vae: AutoencoderKL,
    tokenizer: CLIPTokenizer,
    encoders: list[CLIPTextModelWithProjection],
) -> None:
    """Write a directory that `StableDiffusion3Pipeline.from_pretrained` loads.

    The transformer is trained without a third text encoder, in whose place diffusers uses zeros. A directory without
    one does not load by itself, so the third encoder written here is one that returns zeros.
    """
    for block in transformer.transformer_blocks:
        block.attn.set_processor(JointAttnProcessor2_0())  # type: ignore[union-attr]
    vae.register_to_config(shift_factor=0.0)
    pipe = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=FLOW_SHIFT),
        vae=vae,
        text_encoder=encoders[0],
        tokenizer=tokenizer,
        text_encoder_2=encoders[1],
        tokenizer_2=tokenizer,
        text_encoder_3=zero_t5(int(transformer.config["joint_attention_dim"])),
        tokenizer_3=T5Tokenizer(vocab=T5_VOCABULARY, extra_ids=0),
    )
    _save(pipe, folder, {"num_inference_steps": 30, "guidance_scale": 4.0, "resolutions": SERVED_SIZES})


def export_emoji_edit(
    folder: Path,
    transformer: FluxTransformer2DModel,
    vae: AutoencoderKL,
    clip: tuple[CLIPTokenizer, CLIPTextModel],
    t5: tuple[T5Tokenizer, T5EncoderModel],
) -> None:
    """Write a directory that `FluxKontextPipeline.from_pretrained` loads."""
    vae.register_to_config(shift_factor=0.0)
    pipe = FluxKontextPipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=FLOW_SHIFT),
        vae=vae,
        tokenizer=clip[0],
        text_encoder=clip[1],
        tokenizer_2=t5[0],  # type: ignore[arg-type]  # annotated as the fast one, which is this class by now
        text_encoder_2=t5[1],
    )
    defaults = {"num_inference_steps": 12, "guidance_scale": 1.0, "max_sequence_length": MAX_TOKENS}
    defaults["reference_size"] = "own"
    _save(pipe, folder, {**defaults, "resolutions": SERVED_SIZES})


def zero_t5(width: int) -> T5EncoderModel:
    """Return a T5 encoder whose states [n, tokens, width] are all zero, as its last norm has zero gain."""
    config = T5Config(
        vocab_size=len(T5_VOCABULARY), d_model=width, d_kv=8, num_heads=1, d_ff=8, num_layers=1, dropout_rate=0.0
    )
    model = T5EncoderModel(config)
    with torch.no_grad():
        model.encoder.final_layer_norm.weight.zero_()
    return model


def export_emoji_clip(folder: Path, model: CLIPModel, tokenizer: CLIPTokenizer) -> None:
    """Write a directory that `CLIPModel` and `CLIPProcessor.from_pretrained` load."""
    images = CLIPImageProcessor(
        size={"height": IMAGE_SIDE, "width": IMAGE_SIDE},
        do_center_crop=False,
        crop_size={"height": IMAGE_SIDE, "width": IMAGE_SIDE},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    with _replacing(folder) as staged:
        model.half().save_pretrained(staged)
        load_as_float32(staged / "config.json")
        CLIPProcessor(images, tokenizer).save_pretrained(staged)


def load_as_float32(config_file: Path) -> None:
    """Make a transformers model load in fp32 from weights stored in fp16.

    By default transformers loads the stored precision and diffusers fp32, so a plain pipeline would mix both.
    """
    config = json.loads(config_file.read_text(encoding="utf-8"))
    write_json(config_file, config | {"dtype": "float32"})


def _save(pipe: Any, folder: Path, defaults: dict[str, object]) -> None:
    with _replacing(folder) as staged:
        pipe.to(torch.float16).save_pretrained(staged)
        for config in staged.glob("text_encoder*/config.json"):
            load_as_float32(config)
        write_json(staged / "psctl.json", defaults)


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Yield a folder that replaces `folder` on success.

    The model card is kept. The checksums of all models beside it are updated last, so that they reveal a model whose
    writing was interrupted.
    """
    with atomic_folder(folder) as staged:
        yield staged
        for name in CARD_FILES:
            if (folder / name).is_file():
                shutil.copy2(folder / name, staged / name)
    write_checksums(folder.parent)
