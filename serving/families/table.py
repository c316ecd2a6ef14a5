"""Table of the supported families, available before anything heavy is loaded. No torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .references import CROPPED, KONTEXT, QWEN_EDIT, QWEN_EDIT_PLUS, ReferenceRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Description of a family that is available before anything heavy is loaded.

    Attributes:
        title: its name in tables.
        module: name of its module in this package.
        model: class of the denoising model.
        packs: side of the square of latents that the pipeline packs into one input of its transformer.
        folds: side of the square of the autoencoder's latents that the pipeline folds into the channels of one.
        settings: maps the configuration of model and pipeline to default settings, used if `psctl.json` has none.
        references: which references its pipeline takes; None if it takes none.
        has_soft_masks: as in `geometry.Geometry`.
    """

    title: str
    module: str
    model: str
    packs: int = 1
    folds: int = 1
    settings: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda _: {}
    references: ReferenceRule | None = None
    has_soft_masks: bool = False


def _klein_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from the model cards of FLUX.2 Klein, distilled and base."""
    if config.get("is_distilled"):
        return {"num_inference_steps": 4, "guidance_scale": 1.0}
    return {"num_inference_steps": 50, "guidance_scale": 4.0}


def _flux_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from the model cards of FLUX.1 dev, which embeds the guidance scale, and schnell, which has none."""
    if config.get("guidance_embeds"):
        return {"num_inference_steps": 28, "guidance_scale": 3.5}
    return {"num_inference_steps": 4, "guidance_scale": 0.0}


FAMILIES: Mapping[str, Entry] = {
    "StableDiffusionPipeline": Entry(title="Stable Diffusion 1.x, 2.x", module="sd", model="UNet2DConditionModel"),
    "StableDiffusionXLPipeline": Entry(title="SDXL", module="sdxl", model="UNet2DConditionModel"),
    "StableDiffusion3Pipeline": Entry(title="Stable Diffusion 3, 3.5", module="sd3", model="SD3Transformer2DModel"),
    "FluxPipeline": Entry(
        title="FLUX.1 dev, schnell",
        module="flux",
        model="FluxTransformer2DModel",
        packs=2,
        settings=_flux_settings,
    ),
    "FluxKontextPipeline": Entry(
        title="FLUX.1 Kontext dev",
        module="flux",
        model="FluxTransformer2DModel",
        packs=2,
        settings=_flux_settings,
        references=KONTEXT,
    ),
    "Flux2Pipeline": Entry(
        title="FLUX.2 dev",
        module="flux2",
        model="Flux2Transformer2DModel",
        folds=2,
        settings=lambda _: {"num_inference_steps": 50, "guidance_scale": 4.0},
        references=CROPPED,
        has_soft_masks=True,
    ),
    "Flux2KleinPipeline": Entry(
        title="FLUX.2 Klein",
        module="flux2",
        model="Flux2Transformer2DModel",
        folds=2,
        settings=_klein_settings,
        references=CROPPED,
        has_soft_masks=True,
    ),
    "AuraFlowPipeline": Entry(
        title="AuraFlow",
        module="aura",
        model="AuraFlowTransformer2DModel",
        settings=lambda _: {"num_inference_steps": 50, "guidance_scale": 3.5},
    ),
    "ChromaPipeline": Entry(
        title="Chroma",
        module="chroma",
        model="ChromaTransformer2DModel",
        packs=2,
        settings=lambda _: {"num_inference_steps": 35, "guidance_scale": 5.0},
    ),
    "OvisImagePipeline": Entry(
        title="Ovis-Image",
        module="ovis",
        model="OvisImageTransformer2DModel",
        packs=2,
        settings=lambda _: {"num_inference_steps": 50, "guidance_scale": 5.0},
    ),
    "PixArtSigmaPipeline": Entry(
        title="PixArt-Sigma",
        module="pixart",
        model="PixArtTransformer2DModel",
        settings=lambda _: {"num_inference_steps": 20, "guidance_scale": 4.5},
    ),
    "Lumina2Pipeline": Entry(
        title="Lumina 2",
        module="lumina2",
        model="Lumina2Transformer2DModel",
        settings=lambda _: {"num_inference_steps": 30, "guidance_scale": 4.0},
    ),
    "QwenImagePipeline": Entry(
        title="Qwen-Image",
        module="qwen",
        model="QwenImageTransformer2DModel",
        settings=lambda _: {"num_inference_steps": 50, "guidance_scale": 4.0},
    ),
    "QwenImageEditPipeline": Entry(
        title="Qwen-Image-Edit",
        module="qwen",
        model="QwenImageTransformer2DModel",
        settings=lambda _: {"num_inference_steps": 50, "guidance_scale": 4.0},
        references=QWEN_EDIT,
    ),
    "QwenImageEditPlusPipeline": Entry(
        title="Qwen-Image-Edit 2509, 2511",
        module="qwen",
        model="QwenImageTransformer2DModel",
        settings=lambda _: {"num_inference_steps": 40, "guidance_scale": 4.0},
        references=QWEN_EDIT_PLUS,
    ),
    "ZImagePipeline": Entry(
        title="Z-Image",
        module="z_image",
        model="ZImageTransformer2DModel",
        settings=lambda _: {"num_inference_steps": 50, "guidance_scale": 5.0},
    ),
}
"""Families by the pipeline class in model_index.json."""
SUPPORTED_PIPELINES: tuple[str, ...] = tuple(FAMILIES)
SUPPORTED_MODELS: tuple[str, ...] = tuple(dict.fromkeys(entry.model for entry in FAMILIES.values()))


def entry_of(model: object) -> Entry | None:
    """Return the first family whose denoising model has a class of this name; None if there is none."""
    return next((entry for entry in FAMILIES.values() if entry.model == model), None)


def token_side(entry: Entry | None, config: Mapping[str, Any]) -> int:
    """Return the side, in latents, of the square that one token of a transformer with this configuration represents."""
    side = config["patch_size"] if "patch_size" in config else config["all_patch_size"][0]
    return side * (1 if entry is None else entry.packs)
