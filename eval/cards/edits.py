"""Figures of the model that edits by reference, on held-out edits whose truth is drawn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from ...data.edits import Reference
from ...data.emoji.art import object_names
from ...data.emoji.edits import KIND_WEIGHTS, EditDataset, SceneEdit
from ...data.emoji.scene import BACKGROUNDS, TINTS, recoloured, render, with_article
from ...data.resolution import Resolution
from ...profiling.report.grid import image_grid
from ...serving.models.served import ServedModel
from ..metrics.clip import Clip, zero_shot
from ..metrics.images import AnyImage, to_pil
from ..metrics.ssim import ssim
from .drawing import DATA_SEED, NAME_TEMPLATES, SIZES, CardOptions, generate, shares
from .figures import background_of

CHANGED_LEVELS = 12
"""Difference in levels of any channel from which on a pixel counts as changed by an edit."""
EMPTY_LEVELS = 24.0
"""Mean difference to the truth up to which an object counts as removed, over the pixels that it covered."""
BOX_SIDE, BOX_PX = 1.08, 128
"""Side of the square in which a new object is looked for, over the object's own, and in pixels once it is scaled."""


@dataclass(frozen=True, slots=True)
class TrueEdit:
    """A held-out edit with its pictures.

    Attributes:
        resolution: size of both pictures.
        edit: the edit.
        before, after: the pictures, uint8 (height, width, 3).
        changed: (height, width), the pixels in which they differ.
    """

    resolution: Resolution
    edit: SceneEdit
    before: NDArray[np.uint8]
    after: NDArray[np.uint8]
    changed: NDArray[np.bool_]


def heldout_edits(size: int) -> list[TrueEdit]:
    """Return `size` held-out edits, spread evenly over the sizes."""
    edits = []
    for resolution, share in shares(size):
        dataset = EditDataset(resolution, share, "heldout", DATA_SEED)
        for index in range(share):
            before, after = (np.array(image) for image in dataset.images(index))
            changed = np.asarray((np.abs(before.astype(np.int16) - after) > CHANGED_LEVELS).any(-1))
            edits.append(TrueEdit(resolution, dataset.edit(index), before, after, changed))
    return edits


def measure_editor(
    model: ServedModel, clip: Clip, options: CardOptions, on_step: Callable[[int], None] = lambda steps: None
) -> dict[str, Any]:
    """Measure how many held-out edits are done, by kind and by size, and how well the rest is kept (SSIM of the pixels
    that no edit should change), beside the same of the true picture, of the picture as it was, and of a drawing from
    the caption of the truth.
    """
    edits = heldout_edits(options.num_generated)
    edited = _drawn(model, edits, options, on_step)
    drawn = _drawn(model, edits, options, on_step, by_caption=True)
    pictures = {
        "edited": edited,
        "truth": [true.after for true in edits],
        "input": [true.before for true in edits],
        "drawn from text": drawn,
    }
    figures = {}
    for label, images in pictures.items():
        done = np.array(_are_done(clip, edits, images))
        kept = [_kept(true, image) for true, image in zip(edits, images, strict=True)]
        groups = {kind: [true.edit.kind == kind for true in edits] for kind in KIND_WEIGHTS}
        groups |= {str(size): [true.resolution == size for true in edits] for size in SIZES}
        rates = {name: float(done[members].mean()) for name, members in groups.items() if any(members)}
        figures[label] = rates | {"all": float(done.mean()), "rest_kept_ssim": float(np.mean(kept))}
    return {"edits_done": figures, "num_edits": len(edits)}


def edit_grid(model: ServedModel, options: CardOptions, columns: int = 8, cell_px: int = 128) -> Image.Image:
    """Return the picture of the model card: for each size, a row of pictures above a row of their edits."""
    edits = heldout_edits(columns * len(SIZES))
    images = _drawn(model, edits, options)
    rows: list[Image.Image] = []
    for start in range(0, len(edits), columns):
        rows += [Image.fromarray(true.before) for true in edits[start : start + columns]]
        rows += images[start : start + columns]
    return image_grid(rows, columns=columns, cell_px=cell_px)


def _drawn(
    model: ServedModel,
    edits: Sequence[TrueEdit],
    options: CardOptions,
    on_step: Callable[[int], None] = lambda steps: None,
    *,
    by_caption: bool = False,
) -> list[Image.Image]:
    if by_caption:
        prompts, references = [true.edit.after.in_words() for true in edits], []
    else:
        prompts = [true.edit.instruction for true in edits]
        references = [Reference(true.before) for true in edits]
    return generate(model, prompts, [true.resolution for true in edits], options, on_step, references)


def _are_done(clip: Clip, edits: Sequence[TrueEdit], images: Sequence[AnyImage]) -> list[bool]:
    """Return for each edit whether its picture shows it.

    The border tells a background, CLIP the object in each box where one was replaced, and for the others the pixels
    that should have changed: the colour in which the true drawing would be nearest to them, or whether nothing is left
    there.
    """
    names = object_names()
    classes = clip.embed_classes([with_article(name) for name in names], NAME_TEMPLATES)
    boxes = [_boxes(true, image) for true, image in zip(edits, images, strict=True)]
    found = iter(zero_shot(clip.embed_images(list(chain(*boxes))), classes, 1)[:, 0].tolist())
    done = []
    for true, image, shown in zip(edits, images, boxes, strict=True):
        edit, pixels = true.edit, np.asarray(image)
        if edit.kind == "background":
            done.append(background_of(pixels, BACKGROUNDS) == edit.after.background)
        elif edit.kind == "replace":
            done.append({names[index] for index in islice(found, len(shown))} == {edit.new})
        elif edit.kind == "remove":
            done.append(_distance(pixels, true.after, true.changed) <= EMPTY_LEVELS)
        else:
            painted = {tint: np.asarray(render(recoloured(edit.before, tint), true.resolution)) for tint in TINTS}
            painted[""] = true.before
            distances = {tint: _distance(pixels, other, true.changed) for tint, other in painted.items()}
            done.append(min(distances, key=lambda tint: distances[tint]) == edit.colour)
    return done


def _boxes(true: TrueEdit, image: AnyImage) -> list[Image.Image]:
    """Return the parts of a picture where a replacement shows its new objects: squares, with some room around them."""
    if true.edit.kind != "replace":
        return []
    (width, height), boxes = true.resolution, []
    for place in true.edit.after.placements:
        if place.name == true.edit.new:
            side = min(BOX_SIDE * place.side, 1) * min(width, height)
            left = np.clip(place.center_x * width - side / 2, 0, width - side)
            top = np.clip(place.center_y * height - side / 2, 0, height - side)
            boxes.append(to_pil(image).resize((BOX_PX, BOX_PX), box=(left, top, left + side, top + side)))
    return boxes


def _distance(one: NDArray[np.uint8], other: NDArray[np.uint8], where: NDArray[np.bool_]) -> float:
    """Return the mean difference in levels over some pixels; 0 if there are none."""
    return float(np.abs(one.astype(np.int16) - other)[where].mean()) if where.any() else 0.0


def _kept(true: TrueEdit, image: AnyImage) -> float:
    """Return the SSIM to the truth of a picture whose changed pixels are replaced by the true ones."""
    merged = np.where(true.changed[..., None], true.after, np.asarray(image))
    pair = [torch.from_numpy(np.ascontiguousarray(each)).permute(2, 0, 1)[None] for each in (merged, true.after)]
    return float(ssim(*pair)[0])
