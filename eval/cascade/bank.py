"""Drawing of a bank: the same prompts by both models of a cascade, with confidences and Inception features.

The module also draws the examples that a discriminator learns from, of other prompts. Interrupted sets of images
continue where they stopped.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ...data.datasets.loading import ImageSource, iter_images
from ...data.edits import EditSpec
from ...data.errors import UsageError
from ...data.files import atomic_write
from ...data.requests import Request
from ...data.resolution import Resolution
from ...data.workspace import ModelWorkspace
from ...profiling.cascade.bank import FEATURES_FILE, Bank, BankEntry, bank_name
from ...serving.cascade.legs import LEGS, SIDES, Leg, Side
from ...serving.models.served import ServedModel
from ...training.cascade.discriminator import Discriminator, RealImages, load_discriminator, thumbnail
from ...training.cascade.fitting import Examples
from ..measurer import Measurer, StartPhase
from ..metrics.fid import frechet_influence
from ..metrics.judges import Judges
from ..options import EvalOptions, EvalPlan
from ..run import DrawnSet, draw_set
from ..sets.drawers import EngineDrawer
from ..sets.generate import read_manifest
from ..sets.image_sets import fitted_sample, set_of

_ALWAYS = frozenset({*LEGS, "reference"})
_SHRINKAGE = 0.05
"""Shrinkage of covariances of some thousand images in 2,048 dimensions."""


def draw_bank(
    models: Mapping[Leg, ServedModel],
    plans: Mapping[Leg, EvalPlan],
    options: EvalOptions,
    discriminator: Discriminator,
    measurer: Measurer,
    places: Mapping[Leg, ModelWorkspace],
    folder: Path,
    *,
    reuse: float | None = None,
) -> tuple[Bank, Path]:
    """Draw the missing parts of a bank. Returns the bank and its folder.

    Args:
        models: loaded light and heavy models, which may be the same.
        plans: plans of both models, with the same prompts and each model's own steps.
        options: options of the data set and the engine.
        discriminator: discriminator that scores the light images.
        measurer: provides Inception features, and reports progress.
        places: workspaces of both models, which receive their images.
        folder: parent folder of the bank, whose name is derived from what determines its images and confidences.
        reuse: strength of heavy images that start from light ones; None draws none.

    Raises:
        UsageError, RunError: as `draw_set` and `features_of`.
        KeyboardInterrupt: on Ctrl-C; what is drawn is kept.
    """
    start_phase = measurer.start_phase
    measurer.judges.check(("fid",))
    drawn = draw_legs(models, plans, options, places, start_phase)
    about = {
        "discriminator": discriminator.digest,
        "dataset": options.dataset,
        "seed": options.seed,
        **{leg: dict(drawn[leg].manifest.settings) for leg in LEGS},
        "prompts": drawn["light"].manifest.prompts_digest,
    }
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]
    place = folder / bank_name(f"{len(plans['light'].items)}-{key}", reuse)
    sources: dict[Side, ImageSource] = {leg: set_of(drawn[leg].folder, drawn[leg].manifest) for leg in LEGS}
    images: dict[Side, Path] = {leg: drawn[leg].folder for leg in LEGS}
    if reuse is not None:
        reused = _draw_reused(
            models["heavy"], plans["heavy"], options, drawn["light"], reuse, places["heavy"], start_phase
        )
        about["reused"] = dict(reused.manifest.settings)
        sources["reused"], images["reused"] = set_of(reused.folder, reused.manifest), reused.folder
    items = plans["light"].items
    score = start_phase("confidences", len(items))
    confidences = []
    for small in thumbnails(sources["light"]):
        confidences += discriminator.confidences(small[None]).tolist()
        score(1)
    entries = tuple(
        BankEntry(item.prompt, Resolution(item.width, item.height), item.seed, confidence)
        for item, confidence in zip(items, confidences, strict=True)
    )
    sizes = {item.id: Resolution(item.width, item.height) for item in items}
    measured = {**sources, "reference": fitted_sample(plans["light"].sample, sizes)}
    features = {name: measurer.features(source, name).half() for name, source in measured.items()}
    bank = Bank(entries, about | {f"{side}_images": str(folder.resolve()) for side, folder in images.items()})
    with atomic_write(place / FEATURES_FILE) as temporary:
        save_file(features, temporary)
    # Written last: a folder with this file holds a complete bank.
    bank.save(place)
    return bank, place


def _draw_reused(
    model: ServedModel,
    plan: EvalPlan,
    options: EvalOptions,
    light: DrawnSet,
    strength: float,
    place: ModelWorkspace,
    start_phase: StartPhase,
) -> DrawnSet:
    """Draw images of the heavy model, each from the light image of its prompt. Raises as `draw_set`."""
    drawn_light = set_of(light.folder, light.manifest)

    def from_light(request: Request) -> Request:
        image = drawn_light.open_image(plan.items[request.request_id].id)
        return replace(request, edit=EditSpec.of_whole_image(np.asarray(image.convert("RGB")), strength))

    return draw_set(
        EngineDrawer(model, from_light),
        plan,
        options,
        place,
        start_phase=start_phase,
        what="denoising steps from light images",
        more={"strength": strength, "starts_from": light.manifest.digest},
    )


def draw_legs(
    models: Mapping[Leg, ServedModel],
    plans: Mapping[Leg, EvalPlan],
    options: EvalOptions,
    places: Mapping[Leg, ModelWorkspace],
    start_phase: StartPhase,
) -> dict[Leg, DrawnSet]:
    """Draw the missing images of both models. Raises as `draw_set`."""
    drawn: dict[Leg, DrawnSet] = {}
    for leg in LEGS:
        what = f"denoising steps of the {leg} model"
        drawer = EngineDrawer(models[leg])
        drawn[leg] = draw_set(drawer, plans[leg], options, places[leg], start_phase=start_phase, what=what)
    return drawn


def load_features(folder: Path, num_entries: int) -> dict[str, torch.Tensor]:
    """Return Inception features of a bank in float32, (n, 2048) each: light, heavy, real images of the same captions
    and, if the bank has them, heavy images that start from light ones (`reused`).

    Raises UsageError if the file is missing or damaged.
    """
    path = folder / FEATURES_FILE
    try:
        features = {name: tensor.float() for name, tensor in load_file(path).items()}
    except (SafetensorError, OSError) as error:
        raise UsageError(
            f"{path}: cannot be read as the features of a bank; psctl profile cascade makes one"
        ) from error
    drawn = [side for side in SIDES if side in features]
    if not _ALWAYS <= features.keys() <= _ALWAYS | {*SIDES} or any(len(features[s]) != num_entries for s in drawn):
        raise UsageError(f"{path}: does not belong to its bank of {num_entries} prompts")
    return features


def bank_scores(
    bank: Bank, files: Sequence[Path], judges: Judges, start_phase: StartPhase
) -> dict[str, dict[Leg, list[float]]]:
    """Return the scores of all images of a bank by discriminators, and their CLIP scores, by name of the scorer.

    Args:
        bank: bank, whose images must still be in the folders that it names.
        files: files of discriminators.
        judges: networks of the CLIP score, with the device for all scorers.
        start_phase: reports progress.

    Raises:
        UsageError: a discriminator or an image cannot be read, or the bank has no images.
    """
    known = {path: load_discriminator(path).to(torch.device(judges.device)) for path in files}
    names = {path: f"{each.about.net} {each.about.real}" for path, each in known.items()}
    unique = {path: name if list(names.values()).count(name) == 1 else f"{name} ({path.stem})"
              for path, name in names.items()}  # fmt: skip
    clip_name = f"CLIP score ({judges.clip_name})"
    found: dict[str, dict[Leg, list[float]]] = {name: {} for name in (*unique.values(), clip_name)}
    for leg in LEGS:
        folder = Path(_images_of(bank, leg))
        manifest = read_manifest(folder)
        source = set_of(folder, manifest)
        advance = start_phase(f"{leg} images scored", len(source.ids) * (1 + len(known)))
        small = thumbnails(source)
        for path, each in known.items():
            own = found[unique[path]][leg] = []
            for image in small:
                own += each.confidences(image[None]).tolist()
                advance(1)
        captions = {item.id: item.prompt for item in manifest.items}
        _, values = Measurer(judges, start_phase=lambda what, total, own=advance: own).clip(source, captions)
        found[clip_name][leg] = [values[image_id] for image_id in source.ids]
    return found


def _images_of(bank: Bank, leg: Leg) -> str:
    if (folder := bank.about.get(f"{leg}_images")) is None:
        raise UsageError(
            "the bank has features of its images only, as those in the box: psctl profile cascade draws one"
        )
    return folder


def examples_for(
    models: Mapping[Leg, ServedModel],
    plans: Mapping[Leg, EvalPlan],
    options: EvalOptions,
    real: RealImages,
    measurer: Measurer,
    places: Mapping[Leg, ModelWorkspace],
) -> Examples:
    """Return the examples of a discriminator: generated images, and images that count as real.

    The heavy model draws every other prompt, and the light one the rest, so that no caption is on both sides. With
    `heavy` as real, only the light model's images count as generated. With `near`, the light model draws all prompts,
    and the half of its images at each resolution that adds least to FID counts as real.

    Args:
        models, plans, options, measurer, places: as in `draw_bank`; each plan has all prompts.
        real: kind of images that count as real.

    Raises:
        as `draw_bank`.
    """
    if real == "near":
        return _near_and_far(models["light"], plans["light"], options, measurer, places["light"])
    halves: dict[Leg, EvalPlan] = {
        leg: replace(plans[leg], items=plans[leg].items[start::2]) for start, leg in enumerate(LEGS)
    }
    drawn = draw_legs(models, halves, options, places, measurer.start_phase)
    small = {leg: torch.stack(list(thumbnails(set_of(drawn[leg].folder, drawn[leg].manifest)))) for leg in LEGS}
    if real == "heavy":
        return Examples(small["heavy"], small["light"])
    plan = plans["light"]
    truth = fitted_sample(plan.sample, {item.id: Resolution(item.width, item.height) for item in plan.items})
    advance = measurer.start_phase("real images", len(plan.items))
    if real == "gt":
        real_images = []
        for each in thumbnails(truth):
            real_images.append(each)
            advance(1)
        return Examples(torch.stack(real_images), torch.cat([small["light"], small["heavy"]]))
    return Examples(_through_autoencoder(models["heavy"], truth, advance), torch.cat([small["light"], small["heavy"]]))


def _near_and_far(
    model: ServedModel, plan: EvalPlan, options: EvalOptions, measurer: Measurer, place: ModelWorkspace
) -> Examples:
    what, start_phase = "denoising steps of the light model", measurer.start_phase
    drawn = draw_set(EngineDrawer(model), plan, options, place, start_phase=start_phase, what=what)
    sizes = {item.id: Resolution(item.width, item.height) for item in plan.items}
    source = set_of(drawn.folder, drawn.manifest)
    light, real = measurer.features(source, "light"), measurer.features(fitted_sample(plan.sample, sizes), "reference")
    added = frechet_influence(real, light, shrinkage=_SHRINKAGE)
    small = torch.stack(list(thumbnails(source)))
    is_near = torch.zeros(len(small), dtype=torch.bool)
    for size in sorted(set(sizes.values())):
        own = torch.tensor([sizes[image_id] == size for image_id in source.ids])
        is_near |= own & (added <= added[own].median())
    return Examples(small[is_near], small[~is_near])


def thumbnails(source: ImageSource) -> Sequence[torch.Tensor]:
    """Return the images of a source in the form that discriminators take, in the order of its ids."""
    place_of = {image_id: place for place, image_id in enumerate(source.ids)}
    found: list[torch.Tensor | None] = [None] * len(source.ids)
    for image_id, image in iter_images(source, crop="none"):
        found[place_of[image_id]] = thumbnail(image)
    return [each for each in found if each is not None]


@torch.inference_mode()
def _through_autoencoder(model: ServedModel, source: ImageSource, advance: Any) -> torch.Tensor:
    """Return thumbnails of images after a model's own autoencoder has encoded and decoded them."""
    vae = model.pipe.vae
    found: dict[str, torch.Tensor] = {}
    for image_id, image in iter_images(source, crop="none"):
        pixels = torch.from_numpy(image).permute(2, 0, 1)[None].to(model.device, vae.dtype) / 127.5 - 1
        again = vae.decode(vae.encode(pixels).latent_dist.mode(), return_dict=False)[0]
        eight_bits = ((again.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        found[image_id] = thumbnail(np.ascontiguousarray(eight_bits[0].permute(1, 2, 0).cpu().numpy()))
        advance(1)
    return torch.stack([found[image_id] for image_id in source.ids])
