"""Images and latents of plain diffusers pipelines, which all others are compared with."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline
from PIL import Image

from patchedserve.serving.families.qwen import PICTURE


def short_texts(pipe: Any) -> dict[str, Any]:
    """Return options of a pipeline, and defaults of a model, that truncate or pad texts to a few tokens.

    Otherwise some families use 512 tokens, more than tiny images have, which take most of the time of a step.
    """
    return {"max_sequence_length": 40} if hasattr(pipe, "transformer") else {}


def plain_latents(pipe: Any, request: Any, **options: Any) -> torch.Tensor:
    """Return the final latents of the plain pipeline, called with these options, for one request alone."""
    return _plain(pipe, request, "latent", **options)


def plain_image(pipe: Any, request: Any, **options: Any) -> Any:
    """Return the PIL image of the plain pipeline, called with these options, for one request alone."""
    return _plain(pipe, request, "pil", **options)


def _plain(pipe: Any, request: Any, output_type: str, **options: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    negative = request.negative_prompt
    if type(pipe).__name__ == "PixArtSigmaPipeline":
        options = {"use_resolution_binning": False, **options}  # it draws at other sizes and scales the images
        negative = negative or ""  # its default; None is invalid in a batch
    if type(pipe).__name__.startswith("QwenImage"):
        options = {"true_cfg_scale": request.guidance_scale, **options}
        negative = negative or ""  # None disables guidance
    if type(pipe).__name__.startswith("QwenImageEdit") and not request.references:
        pipe = _drawing_qwen(pipe)
        options = {**options, "max_sequence_length": 1024}  # the other one never cuts texts
    if type(pipe).__name__ == "FluxKontextPipeline":
        options = {"max_area": request.resolution.pixels, "_auto_resize": False, **options}
    if request.references:
        images = [Image.fromarray(reference.image) for reference in request.references]
        takes_several = type(pipe).__name__.startswith("Flux2") or type(pipe).__name__ == "QwenImageEditPlusPipeline"
        options = {"image": images if takes_several else images[0], **options}
    if not type(pipe).__name__.startswith("Flux2"):
        options = {"negative_prompt": negative, **options}
    elif type(pipe).__name__ == "Flux2KleinPipeline":
        length = {name: value for name, value in options.items() if name == "max_sequence_length"}
        options = {"negative_prompt_embeds": pipe.encode_prompt(negative or "", **length)[0], **options}
    with _small_references(pipe):
        drawn = _called(pipe, request, output_type, options)
    return (unpacked(pipe, drawn, request) if output_type == "latent" else drawn)[0]


def _called(pipe: Any, request: Any, output_type: str, options: dict[str, Any]) -> Any:
    return pipe(
        prompt=request.prompt,
        width=request.resolution.width,
        height=request.resolution.height,
        num_inference_steps=request.num_inference_steps,
        guidance_scale=request.guidance_scale,
        generator=torch.Generator("cpu").manual_seed(request.seed),
        output_type=output_type,
        **options,
    ).images


SMALL_PIXELS = {1024 * 1024: 64 * 64, 384 * 384: 48 * 48}
"""Numbers of pixels to which tests make Qwen-Image-Edit scale references, by its own."""


@contextmanager
def _small_references(pipe: Any) -> Iterator[None]:
    """Make the pipeline of Qwen-Image-Edit scale references to few pixels until the context ends."""
    module = sys.modules[type(pipe).__module__]
    if "QwenImageEdit" not in type(pipe).__name__:
        yield
        return
    given = module.calculate_dimensions  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        small = lambda pixels, ratio: given(SMALL_PIXELS[pixels], ratio)  # noqa: E731
        patch.setattr(module, "calculate_dimensions", small)
        yield


def _drawing_qwen(pipe: Any) -> QwenImagePipeline:
    """Return the pipeline that draws without references with the parts and the template of one that edits."""
    parts = {name: part for name, part in pipe.components.items() if name != "processor"}
    drawing = QwenImagePipeline(**parts)
    drawing.prompt_template_encode = pipe.prompt_template_encode.replace(PICTURE, "")
    drawing.prompt_template_encode_start_idx = pipe.prompt_template_encode_start_idx
    drawing.set_progress_bar_config(disable=True)
    return drawing


def unpacked(pipe: Any, drawn: torch.Tensor, request: Any) -> torch.Tensor:
    """Return the latents of a pipeline, or of one with its parts, in our layout (1, channels, height, width)."""
    if hasattr(pipe, "_unpack_latents") and not type(pipe).__name__.startswith("Flux2"):
        drawn = pipe._unpack_latents(drawn, request.resolution.height, request.resolution.width, pipe.vae_scale_factor)
    if type(pipe).__name__.startswith("QwenImage"):
        return drawn[:, :, 0]  # the only frame
    if type(pipe).__name__ == "Flux2Pipeline":
        height, width = (side // pipe.vae_scale_factor // 2 for side in request.resolution[::-1])
        return drawn.transpose(1, 2).unflatten(2, (height, width))
    if type(pipe).__name__ == "Flux2KleinPipeline":
        # The pipeline returns the input of its autoencoder.
        norm = pipe.vae.bn
        scale = torch.sqrt(norm.running_var + norm.eps)
        return (pipe._patchify_latents(drawn) - norm.running_mean.view(1, -1, 1, 1)) / scale.view(1, -1, 1, 1)
    return drawn
