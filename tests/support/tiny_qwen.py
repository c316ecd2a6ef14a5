"""Tiny pipelines of Qwen-Image and Qwen-Image-Edit."""

from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
)
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from .random_models import qwen_transformer
from .tiny_families import in_parts, tiny_chat_tokenizer

_QWEN_SYSTEM_PROMPT = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the "
    "objects and background:"
)


_QWEN_EDIT_SYSTEM_PROMPT = (
    "Describe the key features of the input image (color, shape, size, texture, objects, background), then explain how "
    "the user's text instruction should alter or modify the image. Generate a new image that meets the user's "
    "requirements while maintaining consistency with the original input where appropriate."
)


def tiny_qwen_edit(
    seed: int = 0,
    pipeline: type[QwenImageEditPipeline | QwenImageEditPlusPipeline] = QwenImageEditPlusPipeline,
    *,
    is_at_zero: bool = True,
) -> Any:
    """Return a small pipeline of Qwen-Image-Edit, whose text encoder sees images, by default of version 2511, whose
    references are modulated as at timestep 0.

    Without torchvision, transformers can neither load nor build the processor of videos, which the pipeline has and
    does not use; it is left out.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
    from transformers.processing_utils import ProcessorMixin

    def without_videos(self: Any, image_processor: Any, tokenizer: Any, *_: Any, **__: Any) -> None:
        self.image_processor, self.tokenizer, self.video_processor = image_processor, tokenizer, None

    signs = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
    # The pipeline drops 64 tokens of its template, of which 47 are single letters here.
    tokenizer = tiny_chat_tokenizer(*in_parts(_QWEN_EDIT_SYSTEM_PROMPT, 17), *signs)
    start, image, end, video = map(tokenizer.convert_tokens_to_ids, signs)
    ids = {"vision_start_token_id": start, "image_token_id": image, "vision_end_token_id": end, "video_token_id": video}
    images = Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=4 * 56 * 56)  # type: ignore[call-arg]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessorMixin, "__init__", without_videos)
        processor = Qwen2VLProcessor(images, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = Qwen2_5_VLForConditionalGeneration(_qwen_config(tokenizer, **ids)).eval()
    parts: dict[str, Any] = tiny_qwen(seed).components | {
        "text_encoder": encoder,
        "tokenizer": tokenizer,
        "processor": processor,
    }
    parts["transformer"] = qwen_transformer(seed, joint_attention_dim=24, zero_cond_t=is_at_zero)
    return pipeline(**parts)


def _qwen_config(tokenizer: Qwen2Tokenizer, **ids: Any) -> Qwen2_5_VLConfig:
    layers: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
    rope: dict[str, Any] = {"mrope_section": [2, 2, 2], "rope_type": "default", "type": "default"}
    vision: dict[str, Any] = {"depth": 1, "hidden_size": 24, "intermediate_size": 24, "num_heads": 2}
    return Qwen2_5_VLConfig(
        text_config={**layers, **heads, "rope_scaling": rope, "vocab_size": len(tokenizer)},
        vision_config={**vision, "out_hidden_size": 24},
        **ids,
    )


def tiny_qwen(seed: int = 0) -> QwenImagePipeline:
    """Return a small pipeline of Qwen-Image's architecture: Qwen 2.5 VL, two joint blocks, a video autoencoder."""
    tokenizer = tiny_chat_tokenizer(_QWEN_SYSTEM_PROMPT)
    config = _qwen_config(tokenizer)
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
