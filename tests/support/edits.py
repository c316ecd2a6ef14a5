"""Images, masks and edits for tests, and diffusers' inpainting pipelines as the reference."""

import inspect
import io
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from diffusers import (
    ChromaImg2ImgPipeline,
    ChromaInpaintPipeline,
    ChromaPipeline,
    Flux2KleinInpaintPipeline,
    Flux2KleinPipeline,
    FluxImg2ImgPipeline,
    FluxInpaintPipeline,
    FluxKontextInpaintPipeline,
    FluxKontextPipeline,
    FluxPipeline,
    StableDiffusion3Img2ImgPipeline,
    StableDiffusion3InpaintPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInpaintPipeline,
    ZImageImg2ImgPipeline,
    ZImageInpaintPipeline,
)
from numpy.typing import NDArray
from PIL import Image

from patchedserve.data.edits import EditSpec
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution

from .plain import unpacked

MASKS = ("box", "ellipse", "line", "speckles", "all")
_INPAINT = {
    "StableDiffusionPipeline": StableDiffusionInpaintPipeline,
    "StableDiffusionXLPipeline": StableDiffusionXLInpaintPipeline,
    "StableDiffusion3Pipeline": StableDiffusion3InpaintPipeline,
    "FluxPipeline": FluxInpaintPipeline,
    "ChromaPipeline": ChromaInpaintPipeline,
    "ZImagePipeline": ZImageInpaintPipeline,
    "FluxKontextPipeline": FluxKontextInpaintPipeline,
    "Flux2KleinPipeline": Flux2KleinInpaintPipeline,
}
_WHOLE = {
    "StableDiffusionPipeline": StableDiffusionImg2ImgPipeline,
    "StableDiffusionXLPipeline": StableDiffusionXLImg2ImgPipeline,
    "StableDiffusion3Pipeline": StableDiffusion3Img2ImgPipeline,
    "FluxPipeline": FluxImg2ImgPipeline,
    "ChromaPipeline": ChromaImg2ImgPipeline,
    "ZImagePipeline": ZImageImg2ImgPipeline,
}


def image_of(size: Resolution, seed: int = 0) -> NDArray[np.uint8]:
    """Return a picture of soft colours, (height, width, 3)."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8))
    return np.asarray(coarse.resize(size, Image.Resampling.BICUBIC))


def mask_of(size: Resolution, kind: str = "box") -> NDArray[np.bool_]:
    """Return a mask of one of `MASKS`, (height, width); its edges are not at multiples of 8."""
    width, height = size
    down, right = np.mgrid[:height, :width]
    if kind == "box":
        return (down > height // 4 - 3) & (down < height // 2 + 5) & (right > width // 3) & (right < width - 9)
    if kind == "ellipse":
        return ((down / height - 0.5) / 0.4) ** 2 + ((right / width - 0.4) / 0.3) ** 2 < 1
    if kind == "left":
        return right < width // 2
    if kind == "line":
        return (right > width // 2 - 5) & (right < width // 2 + 5)
    if kind == "speckles":
        return np.random.default_rng(0).random((height, width)) < 0.3
    return np.ones((height, width), dtype=bool)


def file_of(pixels: NDArray[Any], kind: str = "PNG", **options: Any) -> bytes:
    """Return an image file of these pixels."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def edit_request(
    request_id: int,
    size: Resolution,
    kind: str = "box",
    strength: float = 1.0,
    *,
    num_steps: int = 6,
    guidance_scale: float = 4.0,
    seed: int = 0,
    **of_edit: Any,
) -> Request:
    """Return a request that edits `image_of` its size."""
    edit = EditSpec(image_of(size, seed), mask_of(size, kind), strength, **of_edit)
    return Request(request_id, "a red hat", size, num_steps, guidance_scale, seed, edit=edit)


def redraw_request(request_id: int, size: Resolution, strength: float = 0.6, **of_request: Any) -> Request:
    """Return a request that redraws the whole of `image_of` its size."""
    request = edit_request(request_id, size, **of_request)
    assert request.edit is not None
    return replace(request, edit=EditSpec.of_whole_image(request.edit.image, strength))


def plain_edit(pipe: Any, request: Request, output_type: str = "latent", **options: Any) -> Any:
    """Run diffusers' inpainting pipeline, or its image-to-image pipeline if the whole image is redrawn, with these
    options on one edit alone; returns the final latents, or the PIL image.
    """
    edit = request.edit
    assert edit is not None
    kinds: dict[str, Any] = _WHOLE if edit.is_whole else _INPAINT
    is_klein = isinstance(pipe, Flux2KleinPipeline)
    kept: dict[str, Any] = {"is_distilled": pipe.config["is_distilled"]} if is_klein else {}
    inpaint = kinds[type(pipe).__name__](**pipe.components, **kept)
    inpaint.set_progress_bar_config(disable=True)
    takes_none = isinstance(pipe, FluxPipeline | Flux2KleinPipeline)
    own: dict[str, Any] = {} if takes_none else {"negative_prompt": request.negative_prompt}
    if isinstance(pipe, FluxKontextPipeline):
        own |= {"max_area": request.resolution.pixels, "_auto_resize": False}
    # The image itself is one that these pipelines see anyway.
    if others := [each.image for each in request.references if each.image is not edit.image]:
        own["image_reference"] = Image.fromarray(others[0])
    if isinstance(pipe, ChromaPipeline):
        # diffusers' inpainting reads this setting, which Chroma's configuration lacks.
        pipe.transformer.register_to_config(guidance_embeds=False)
        own["max_sequence_length"] = 512  # as in `ChromaPipeline`
    if not edit.is_whole:
        own["mask_image"] = Image.fromarray(edit.mask.astype(np.uint8) * 255)
    if "width" in inspect.signature(inpaint.__call__).parameters:
        own |= {"width": request.resolution.width, "height": request.resolution.height}
    own |= options
    drawn = inpaint(
        prompt=request.prompt,
        **own,
        image=Image.fromarray(edit.image),
        strength=edit.strength,
        num_inference_steps=request.num_inference_steps,
        guidance_scale=request.guidance_scale,
        generator=torch.Generator("cpu").manual_seed(request.seed),
        output_type=output_type,
    ).images
    return (unpacked(pipe, drawn, request) if output_type == "latent" else drawn)[0]
