"""Effect of reuse on edits: the same edits with and without a template's record, judged against each other.

    python tests/benchmarks/edit_quality.py [--model emoji-xl] [--num-edits 300] [--output-file quality.json]
        [--sheet sheet.png]

Scenes show two objects in the sizes of the model; a padded box over the first is edited into another object. Two more
sides are the box drawn by itself, without its surroundings (InstGenIE's figure 1), and the scene with that object drawn
by hand, which gives the judge's score of the right answer. Differences are paired, with 95 % intervals by resampling
edits. Goals: with a record, new object and neighbour are recognised at most 4 points less often, the interval above -8;
SSIM at least 0.95, in the box 0.80; LPIPS at most 0.05; FID to the other side at most 15; CLIP scores within 0.5. The
box drawn by itself must miss some of these.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from patchedserve.data.edits import EditSpec, TemplateSpec
from patchedserve.data.emoji.art import object_names
from patchedserve.data.emoji.scene import BACKGROUNDS, Placement, Scene, caption_of, compose, render, with_article
from patchedserve.data.files import write_json
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.eval.cards.drawing import NAME_TEMPLATES
from patchedserve.eval.metrics.bootstrap import bootstrap_mean
from patchedserve.eval.metrics.clip import clip_scores, zero_shot
from patchedserve.eval.metrics.features import features_of_images
from patchedserve.eval.metrics.fid import frechet_distance
from patchedserve.eval.metrics.judges import Judges
from patchedserve.eval.metrics.ssim import WINDOW_PX, ssim
from patchedserve.serving.editing.templates import TemplateStore
from patchedserve.serving.engine.collectors import InMemory
from patchedserve.serving.engine.engine import Engine
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.runs.machine import cpu_name
from patchedserve.serving.scheduling.policies import get_policy

COMPARED = ("reuse", "box alone")
"""Sides that are compared with edits that are computed whole."""
_PADDING = 0.04
_AT_ONCE = 8
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Edit:
    """One edit.

    Attributes:
        request: the request.
        box: (left, top, right, bottom) of the mask.
        wanted, neighbour: names of the new object and of the one that stays.
        answer: the scene with the new object, drawn by hand.
    """

    request: Request
    box: tuple[int, int, int, int]
    wanted: str
    neighbour: str
    answer: Image.Image


def edit_of(number: int, size: Resolution, model: ServedModel) -> Edit:
    """Return the edit of a number, which is the same on every machine."""
    rng = np.random.default_rng([7, number])
    names = [str(name) for name in rng.choice(object_names(), 3, replace=False)]
    ground = list(BACKGROUNDS)[rng.integers(len(BACKGROUNDS))]
    scene = compose(rng, size, (names[0], names[1]), ground)
    box = _box(scene.placements[0], size)
    mask = np.zeros((size.height, size.width), bool)
    mask[box[1] : box[3], box[0] : box[2]] = True
    after = Scene(
        (replace(scene.placements[0], name=names[2]), scene.placements[1]), ground, scene.shade, scene.caption
    )
    edit = EditSpec(np.asarray(render(scene, size)), mask, template=TemplateSpec(scene.caption, number))
    request = Request(
        number,
        caption_of((names[2], names[1]), ground),
        size,
        model.defaults.num_inference_steps,
        model.defaults.guidance_scale,
        number,
        edit=edit,
    )
    return Edit(request, box, names[2], names[1], render(after, size))


def _box(placement: Placement, size: Resolution) -> tuple[int, int, int, int]:
    half = placement.side * min(size) / 2 + _PADDING * min(size)
    x, y = placement.center_x * size.width, placement.center_y * size.height
    return (
        max(0, round(x - half)),
        max(0, round(y - half)),
        min(size.width, round(x + half)),
        min(size.height, round(y + half)),
    )


def drawn(model: ServedModel, edits: Sequence[Edit], store: TemplateStore | None) -> dict[int, Image.Image]:
    """Return the images of edits by request id, with the records of a store or without."""
    model.reuse.store = store
    engine = Engine(model, get_policy("continuous"), max_batch_size=_AT_ONCE, collector=InMemory(keep_images=True))
    for edit in edits:
        engine.submit(edit.request)
    engine.close()
    result = engine.run()
    assert all(record.status == "completed" for record in result.records), "an edit has failed"
    return result.images


def boxes_alone(model: ServedModel, edits: Sequence[Edit]) -> list[Image.Image]:
    """Return the scenes with their boxes drawn as separate images, without any influence of the surroundings."""
    multiple, alone, corners = model.family.geometry.size_multiple, [], []
    for edit in edits:
        size, spec = edit.request.resolution, edit.request.edit
        assert spec is not None
        left, top = (edge // multiple * multiple for edge in edit.box[:2])
        right, bottom = (
            min(-(-edge // multiple) * multiple, most) for edge, most in zip(edit.box[2:], size, strict=True)
        )
        part = EditSpec.of_whole_image(np.ascontiguousarray(spec.image[top:bottom, left:right]), 1.0)
        alone.append(replace(edit, request=replace(edit.request, resolution=part.resolution, edit=part)))
        corners.append((left, top))
    images, scenes = drawn(model, alone, None), []
    for edit, (left, top) in zip(edits, corners, strict=True):
        assert edit.request.edit is not None
        whole, (x, y, right, bottom) = Image.fromarray(edit.request.edit.image), edit.box
        part = images[edit.request.request_id].crop((x - left, y - top, right - left, bottom - top))
        whole.paste(part, (x, y))
        scenes.append(whole)
    return scenes


class Judge:
    """Judgements of images by networks."""

    def __init__(self) -> None:
        self._judges, self._names = Judges(), object_names()
        self._judges.check(("clip", "lpips", "fid"))
        self._classes = self._judges.clip.embed_classes([with_article(name) for name in self._names], NAME_TEMPLATES)

    def sees(self, images: Sequence[Image.Image], names: Sequence[str]) -> list[float]:
        """Return 1 for each image that shows the named object, else 0."""
        nearest = zero_shot(self._judges.clip.embed_images(images), self._classes, 1)[:, 0].tolist()
        return [float(self._names[found] == name) for found, name in zip(nearest, names, strict=True)]

    def fit(self, images: Sequence[Image.Image], prompts: Sequence[str]) -> list[float]:
        """Return the CLIP score of each image and its prompt."""
        clip = self._judges.clip
        return clip_scores(clip.embed_images(images), clip.embed_texts(prompts)).tolist()

    def fid(self, real: Sequence[Image.Image], other: Sequence[Image.Image]) -> float:
        """Return the FID of `other` to `real`."""
        first, second = (
            features_of_images(
                ((place, np.asarray(image)) for place, image in enumerate(images)), self._judges.inception
            )
            for images in (real, other)
        )
        return frechet_distance(first, second)

    def lpips(self, image: Image.Image, other: Image.Image) -> float:
        """Return the LPIPS distance of two images."""
        return float(self._judges.lpips(_tensor(image), _tensor(other))[0])


def _tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]


def judged(edits: Sequence[Edit], sides: dict[str, list[Image.Image]]) -> dict[str, list[float]]:
    """Return a value for each edit, by measured quantity."""
    judge, found = Judge(), {}
    for side, images in sides.items():
        boxes = [image.crop(edit.box) for edit, image in zip(edits, images, strict=True)]
        rests = [_without_box(edit, image) for edit, image in zip(edits, images, strict=True)]
        found[f"object: {side}"] = judge.sees(boxes, [edit.wanted for edit in edits])
        found[f"neighbour: {side}"] = judge.sees(rests, [edit.neighbour for edit in edits])
        found[f"clip score: {side}"] = judge.fit(images, [edit.request.prompt for edit in edits])
    for side in COMPARED:
        pairs = list(zip(edits, sides[side], sides["whole"], strict=True))
        found[f"ssim: {side}"] = [float(ssim(_tensor(one), _tensor(other))[0]) for _, one, other in pairs]
        found[f"ssim inside: {side}"] = [
            float(ssim(_tensor(one.crop(edit.box)), _tensor(other.crop(edit.box)))[0])
            for edit, one, other in pairs
            if min(edit.box[2] - edit.box[0], edit.box[3] - edit.box[1]) >= WINDOW_PX
        ]
        found[f"lpips: {side}"] = [judge.lpips(one, other) for _, one, other in pairs]
        found[f"fid: {side}"] = [judge.fid(sides["whole"], sides[side])]
    return found


def _without_box(edit: Edit, image: Image.Image) -> Image.Image:
    """Return the image with its box filled with the colour of its border."""
    rest = image.copy()
    pixels = np.asarray(image)
    edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    colour = tuple(int(level) for level in np.median(edge, axis=0))
    rest.paste(colour, edit.box)
    return rest


def summary_of(values: dict[str, list[float]]) -> dict[str, Any]:
    """Return means, and paired differences between the sides with their intervals."""
    result: dict[str, Any] = {name: float(np.mean(each)) for name, each in values.items()}
    for side in COMPARED:
        for what in ("object", "neighbour", "clip score"):
            differences = np.array(values[f"{what}: {side}"]) - np.array(values[f"{what}: whole"])
            result[f"{what}: {side} - whole"] = asdict(bootstrap_mean(differences))
    return result


def bars_of(found: dict[str, Any], side: str) -> dict[str, bool]:
    """Return which bars a side meets."""
    bars = {
        f"{what}: {side} - whole": found[name]["value"] >= -0.04 and found[name]["low"] >= -0.08
        for what in ("object", "neighbour")
        for name in [f"{what}: {side} - whole"]
    }
    score = f"clip score: {side} - whole"
    return bars | {
        score: abs(found[score]["value"]) <= 0.5,
        "ssim": found[f"ssim: {side}"] >= 0.95,
        "ssim inside": found[f"ssim inside: {side}"] >= 0.80,
        "lpips": found[f"lpips: {side}"] <= 0.05,
        "fid": found[f"fid: {side}"] <= 15,
    }


def sheet_of(edits: Sequence[Edit], sides: dict[str, list[Image.Image]]) -> Image.Image:
    """Return a sheet of the first edits of the largest size: image, mask, and all sides."""
    largest = max(edit.request.resolution for edit in edits)
    chosen = [index for index, edit in enumerate(edits) if edit.request.resolution == largest][:_SHOWN]
    width, height = largest
    sheet = Image.new("RGB", (width * (2 + len(sides)), height * len(chosen)))
    for row, index in enumerate(chosen):
        edit = edits[index].request.edit
        assert edit is not None
        images = [Image.fromarray(edit.image), Image.fromarray(edit.mask).convert("RGB")]
        for column, image in enumerate([*images, *(images[index] for images in sides.values())]):
            sheet.paste(image, (column * width, row * height))
    return sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="emoji-xl")
    parser.add_argument("--num-edits", type=int, default=300)
    parser.add_argument("--output-file", type=Path)
    parser.add_argument("--sheet", type=Path)
    given = parser.parse_args()
    model = load_model(given.model)
    sizes = model.defaults.resolutions
    edits = [edit_of(number, sizes[number % len(sizes)], model) for number in range(given.num_edits)]
    sides: dict[str, list[Image.Image]] = {"whole": [], "reuse": [], "box alone": []}
    shares = []
    with tempfile.TemporaryDirectory() as folder:
        model.tune(sizes, Path(folder))
        for start in range(0, len(edits), _AT_ONCE):
            some = edits[start : start + _AT_ONCE]
            # A new store for each batch: records of other edits are not needed again.
            store = TemplateStore(Path(folder) / str(start))
            for edit in some:
                model.reuse.store = store
                model.reuse.use_template(edit.request, store.folder, lambda count: None)
                assert edit.request.edit is not None
                shares.append(model.family.geometry.active_share(edit.request.edit))
            for side, used in (("whole", None), ("reuse", store)):
                images = drawn(model, some, used)
                sides[side] += [images[edit.request.request_id] for edit in some]
            sides["box alone"] += boxes_alone(model, some)
            print(f"{len(sides['whole'])} of {len(edits)} edits", flush=True)
    sides["drawn by hand"] = [edit.answer for edit in edits]
    found = summary_of(judged(edits, sides))
    result = {
        "machine": cpu_name(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "model": given.model,
        "num_edits": given.num_edits,
        "active_share": float(np.mean(shares)),
        "read_a_record": float(np.mean([share <= model.reuse.masked_up_to for share in shares])),
        **found,
        "kept": {side: bars_of(found, side) for side in COMPARED},
    }
    print(json.dumps(result, indent=1))
    if given.output_file is not None:
        write_json(given.output_file, result)
    if given.sheet is not None:
        sheet_of(edits, sides).save(given.sheet)


if __name__ == "__main__":
    main()
