"""Drawing of a bank: the same prompts by both models of a cascade, with confidences and Inception features.

The module also draws the examples that a discriminator learns from, of other prompts. Interrupted sets of images
continue where they stopped.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from ..sets.image_sets import MappedImages, fitted_sample, set_of

_ALWAYS = frozenset({*LEGS, "reference"})
_SHRINKAGE = 0.05
"""Shrinkage of covariances of some thousand images in 2,048 dimensions."""


@dataclass(frozen=True, slots=True)
class LegDrawer:
    """Draws images of both models of a cascade. Its methods raise as `draw_set`, and keep what is drawn on Ctrl-C.

    Attributes:
        models: loaded light and heavy models, which may be the same.
        plans: plans of both models, with the same prompts and each model's own steps.
        options: options of the data set and the engine.
        measurer: provides Inception features, and reports progress.
        places: workspaces of both models, which receive their images.
    """

    models: Mapping[Leg, ServedModel]
    plans: Mapping[Leg, EvalPlan]
    options: EvalOptions
    measurer: Measurer
    places: Mapping[Leg, ModelWorkspace]

    def bank(self, discriminator: Discriminator, folder: Path, *, reuse: float | None = None) -> tuple[Bank, Path]:
        """Draw the missing parts of a bank. Returns the bank and its folder.

        Args:
            discriminator: discriminator that scores the light images.
            folder: parent folder of the bank, whose name is derived from what determines its images and confidences.
            reuse: strength of heavy images that start from light ones; None draws none.

        Raises:
            UsageError: as `features_of`.
        """
        measurer, plan = self.measurer, self.plans["light"]
        measurer.judges.check(("fid",))
        drawn: dict[Side, DrawnSet] = {leg: self._draw(leg) for leg in LEGS}
        about = {
            "discriminator": discriminator.digest,
            "dataset": self.options.dataset,
            "seed": self.options.seed,
            **{leg: dict(drawn[leg].manifest.settings) for leg in LEGS},
            "prompts": drawn["light"].manifest.prompts_digest,
        }
        key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]
        place = folder / bank_name(f"{len(plan.items)}-{key}", reuse)
        if reuse is not None:
            drawn["reused"] = self._draw_reused(drawn["light"], reuse)
            about["reused"] = dict(drawn["reused"].manifest.settings)
        sources: dict[Side, ImageSource] = {side: set_of(each.folder, each.manifest) for side, each in drawn.items()}
        score = measurer.start_phase("confidences", len(plan.items))
        confidences = []
        for small in thumbnails(sources["light"]):
            confidences += discriminator.confidences(small[None]).tolist()
            score(1)
        entries = tuple(
            BankEntry(item.prompt, Resolution(item.width, item.height), item.seed, confidence)
            for item, confidence in zip(plan.items, confidences, strict=True)
        )
        measured = {**sources, "reference": _real_images(plan)}
        features = {name: measurer.features(source, name).half() for name, source in measured.items()}
        bank = Bank(entries, about | {f"{side}_images": str(each.folder.resolve()) for side, each in drawn.items()})
        with atomic_write(place / FEATURES_FILE) as temporary:
            save_file(features, temporary)
        # Written last: a folder with this file holds a complete bank.
        bank.save(place)
        return bank, place

    def examples(self, real: RealImages) -> Examples:
        """Return the examples of a discriminator: generated images, and images that count as real.

        The heavy model draws every other prompt, and the light one the rest, so that no caption is on both sides. With
        `heavy` as real, only the light model's images count as generated. With `near`, the light model draws all
        prompts, and the half of its images at each resolution that adds least to FID counts as real.
        """
        if real == "near":
            return self._near_and_far()
        drawn = {leg: self._draw(leg, slice(start, None, 2)) for start, leg in enumerate(LEGS)}
        small = {leg: torch.stack(list(thumbnails(set_of(each.folder, each.manifest)))) for leg, each in drawn.items()}
        if real == "heavy":
            return Examples(small["heavy"], small["light"])
        truth, both = _real_images(self.plans["light"]), torch.cat([small["light"], small["heavy"]])
        advance = self.measurer.start_phase("real images", len(truth.ids))
        if real == "gt":
            real_images = []
            for each in thumbnails(truth):
                real_images.append(each)
                advance(1)
            return Examples(torch.stack(real_images), both)
        return Examples(_through_autoencoder(self.models["heavy"], truth, advance), both)

    def _near_and_far(self) -> Examples:
        drawn, plan = self._draw("light"), self.plans["light"]
        source = set_of(drawn.folder, drawn.manifest)
        light, real = self.measurer.features(source, "light"), self.measurer.features(_real_images(plan), "reference")
        added = frechet_influence(real, light, shrinkage=_SHRINKAGE)
        small = torch.stack(list(thumbnails(source)))
        is_near = torch.zeros(len(small), dtype=torch.bool)
        sizes = {item.id: Resolution(item.width, item.height) for item in plan.items}
        for size in sorted(set(sizes.values())):
            own = torch.tensor([sizes[image_id] == size for image_id in source.ids])
            is_near |= own & (added <= added[own].median())
        return Examples(small[is_near], small[~is_near])

    def _draw(self, leg: Leg, chosen: slice = slice(None)) -> DrawnSet:
        """Draw the missing images of a model, or of some of its prompts."""
        plan = replace(self.plans[leg], items=self.plans[leg].items[chosen])
        what, start_phase = f"denoising steps of the {leg} model", self.measurer.start_phase
        drawer = EngineDrawer(self.models[leg])
        return draw_set(drawer, plan, self.options, self.places[leg], start_phase=start_phase, what=what)

    def _draw_reused(self, light: DrawnSet, strength: float) -> DrawnSet:
        """Draw images of the heavy model, each from the light image of its prompt."""
        drawn_light, plan = set_of(light.folder, light.manifest), self.plans["heavy"]

        def from_light(request: Request) -> Request:
            image = drawn_light.open_image(plan.items[request.request_id].id)
            return replace(request, edit=EditSpec.of_whole_image(np.asarray(image.convert("RGB")), strength))

        return draw_set(
            EngineDrawer(self.models["heavy"], from_light),
            plan,
            self.options,
            self.places["heavy"],
            start_phase=self.measurer.start_phase,
            what="denoising steps from light images",
            more={"strength": strength, "starts_from": light.manifest.digest},
        )


def _real_images(plan: EvalPlan) -> MappedImages:
    """Return the real images of a plan's captions, in the sizes that are drawn."""
    return fitted_sample(plan.sample, {item.id: Resolution(item.width, item.height) for item in plan.items})


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
