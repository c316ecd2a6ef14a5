"""Measurement of the bundled models on held-out data, and their model cards."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ...data.emoji.art import object_names
from ...data.emoji.dataset import EmojiDataset
from ...data.emoji.scene import BACKGROUNDS, Scene, caption_of, compose, heldout_singles, render, with_article
from ...data.files import atomic_write, write_json, write_text
from ...data.models.bundled import write_checksums
from ...data.resolution import Resolution
from ...profiling.report.grid import image_grid
from ...serving.models.served import ServedModel
from ..metrics.clip import Clip
from .drawing import DATA_SEED, NAME_TEMPLATES, SIZES, CardOptions, generate, shares, steps_of, takes_references
from .edits import edit_grid, measure_editor
from .figures import (
    fid_of_images,
    measure_autoencoder_psnr,
    measure_clip_retrieval,
    measure_generated,
    measure_objects,
)
from .text import card_text

GRID_OBJECTS = ("butterfly", "red apple", "hedgehog", "red car", "candle", "sunflower", "rocket", "penguin")
GRID_BACKGROUNDS = ("blue", "yellow", "pink", "gray", "black", "white", "purple", "green")
GENERATOR_FLAGS = {
    "num_generated": "num-images",
    "num_fid": "num-fid",
    "num_inference_steps": "num-inference-steps",
    "seed": "seed",
}


def heldout_images(size: int, resolutions: Sequence[Resolution] = SIZES) -> tuple[list[Scene], list[Image.Image]]:
    """Return `size` held-out scenes and pictures, spread evenly over the resolutions."""
    scenes, images = [], []
    for resolution, share in shares(size, resolutions):
        for scene, image in EmojiDataset(resolution, share, "heldout", DATA_SEED):
            scenes.append(scene)
            images.append(image)
    return scenes, images


def measure_judge(clip: Clip, options: CardOptions) -> dict[str, float]:
    """Measure retrieval among held-out pairs, and zero-shot object recognition on real pictures of one object.

    Two captions that name the same objects on the same background are equally right, whatever their wording: a picture
    does not reveal whether its caption is "a taco on a red background" or "a red background with a taco".
    """
    scenes, images = heldout_images(options.num_pairs)
    captions = [scene.caption for scene in scenes]
    meanings = [caption_of(tuple(sorted(p.name for p in scene.placements)), scene.background) for scene in scenes]
    figures = measure_clip_retrieval(clip, images, captions, meanings)
    by_wording = measure_clip_retrieval(clip, images, captions)["image_to_text_recall_at_1"]
    singles = [(scene, image) for scene, image in zip(scenes, images, strict=True) if len(scene.placements) == 1]
    seen = measure_objects(
        clip,
        [image for _, image in singles],
        [scene.names for scene, _ in singles],
        object_names(),
        NAME_TEMPLATES,
        describe=with_article,
    )
    return figures | {
        "image_to_text_recall_at_1_same_wording": by_wording,
        "zero_shot_object_at_1": seen["object_at_1"],
        "num_pairs": len(images),
        "num_single_objects": len(singles),
    }


def measure_generator(
    model: ServedModel,
    clip: Clip,
    options: CardOptions,
    extractor: torch.nn.Module | None = None,
    on_step: Callable[[int], None] = lambda steps: None,
) -> dict[str, Any]:
    """Measure autoencoder PSNR, object and background rates by size, FID if a feature network is given, and edits of a
    model that takes references.
    """
    _, images = heldout_images(options.num_encoded)
    by_size: dict[str, list[Image.Image]] = {}
    for image in images:
        by_size.setdefault(f"{image.width}x{image.height}", []).append(image)
    figures: dict[str, Any] = {"autoencoder_psnr_db": measure_autoencoder_psnr(model.pipe.vae, by_size)}
    figures["recognised"] = _measure_recognition(model, clip, options, on_step)
    if extractor is not None and options.num_fid:
        figures["fid"] = _measure_fid(model, options, extractor, on_step)
    if takes_references(model):
        figures |= measure_editor(model, clip, options, on_step)
    defaults = model.defaults
    length = {} if defaults.max_sequence_length is None else {"max_sequence_length": defaults.max_sequence_length}
    figures["settings"] = {
        "num_inference_steps": steps_of(model, options),
        "guidance_scale": defaults.guidance_scale,
        **length,
        "scheduler": type(model.pipe.scheduler).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    return figures


def num_denoising_steps(model: ServedModel, options: CardOptions) -> int:
    """Return how many steps of pictures `measure_generator` takes."""
    num_sets = 3 if takes_references(model) else 1
    return steps_of(model, options) * (num_sets * options.num_generated + len(SIZES) * options.num_fid)


def sample_grid(model: ServedModel, options: CardOptions, cell_px: int = 128) -> Image.Image:
    """Return the picture of the model card: eight objects in three rows, one row for each size; of a model that takes
    references, eight edits for each size.
    """
    if takes_references(model):
        return edit_grid(model, options, cell_px=cell_px)
    captions = [caption_of((name,), ground) for name, ground in zip(GRID_OBJECTS, GRID_BACKGROUNDS, strict=True)]
    images = generate(model, captions * 3, [size for size in SIZES for _ in captions], options)
    return image_grid(images, columns=len(captions), cell_px=cell_px)


def _measure_recognition(
    model: ServedModel, clip: Clip, options: CardOptions, on_step: Callable[[int], None]
) -> dict[str, dict[str, float]]:
    """Return, by size and overall, rates of generated pictures of single held-out objects, and of real ones."""
    rng = np.random.default_rng(DATA_SEED)
    singles = heldout_singles()
    chosen = [singles[index % len(singles)] for index in rng.permutation(max(options.num_generated, len(singles)))]
    chosen = chosen[: options.num_generated]
    resolutions = [SIZES[index % len(SIZES)] for index in range(len(chosen))]
    images = generate(model, [caption_of((name,), ground) for name, ground in chosen], resolutions, options, on_step)
    real = [
        render(compose(rng, size, (name,), ground), size)
        for (name, ground), size in zip(chosen, resolutions, strict=True)
    ]
    figures = {}
    for label, sizes in {"all": SIZES, **{str(size): (size,) for size in SIZES}}.items():
        members = [index for index, size in enumerate(resolutions) if size in sizes]
        if not members:
            continue
        figures[label] = measure_generated(
            clip,
            [images[index] for index in members],
            [(chosen[index][0],) for index in members],
            [chosen[index][1] for index in members],
            names=object_names(),
            palette=BACKGROUNDS,
            real_images=[real[index] for index in members],
            templates=NAME_TEMPLATES,
            describe=with_article,
        ) | {"num_images": len(members)}
    return figures


def _measure_fid(
    model: ServedModel, options: CardOptions, extractor: torch.nn.Module, on_step: Callable[[int], None]
) -> dict[str, Any]:
    """Return the FID between real held-out pictures and generated ones of the same captions, by size."""
    figures = {}
    for size in SIZES:
        data = EmojiDataset(size, options.num_fid, "heldout", DATA_SEED + 1)
        real = [image for _, image in data]
        captions = [data.scene(index).caption for index in range(len(data))]
        images = generate(model, captions, [size] * len(captions), options, on_step)
        figures[str(size)] = {"fid": fid_of_images(real, images, extractor), "num_images": options.num_fid}
    return figures


def write_card(
    name: str, models_dir: Path, figures: dict[str, Any], options: CardOptions, grid: Image.Image | None = None
) -> None:
    """Write README.md, figures.json and samples.png of a model, each atomically, and update all models' checksums."""
    folder = models_dir / name
    write_json(folder / "figures.json", figures)
    write_text(folder / "README.md", card_text(name, figures, card_command(name, options)))
    if grid is not None:
        with atomic_write(folder / "samples.png") as temporary:
            grid.save(temporary, optimize=True)
    write_checksums(models_dir)


def card_command(name: str, options: CardOptions) -> str:
    """Return the command that repeats the measurement, with the options that differ from the defaults."""
    flags = {"num_pairs": "num-pairs"} if name == "emoji-clip" else GENERATOR_FLAGS
    usual = CardOptions()
    given = {
        flag: getattr(options, field)
        for field, flag in flags.items()
        if getattr(options, field) != getattr(usual, field)
    }
    return " ".join([f"psctl models card {name}", *(f"--{flag} {value}" for flag, value in given.items())])
