"""Edits of scenes: a picture before and after, and the instruction between them, so that the truth is known."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from PIL import Image

from ..resolution import Resolution
from .art import object_names
from .dataset import Numbered
from .scene import (
    BACKGROUNDS,
    SINGLE_ONLY,
    TINTS,
    Scene,
    Split,
    compose,
    is_heldout,
    plural,
    recoloured,
    render,
    sample_scene,
    with_article,
)

EditKind = Literal["background", "replace", "remove", "recolour"]
KIND_WEIGHTS: dict[EditKind, float] = {"background": 0.27, "replace": 0.37, "remove": 0.14, "recolour": 0.22}


@dataclass(frozen=True, slots=True)
class SceneEdit:
    """One edit.

    Attributes:
        kind: what changes.
        before, after: the scene that is edited, and what it becomes.
        instruction: the edit in words.
        old, new: the object that disappears and the one that appears, "" if there is none; for `recolour`, `old` is the
            object whose colour changes.
        colour: the new colour of the background or of the object, "" if neither changes.
    """

    kind: EditKind
    before: Scene
    after: Scene
    instruction: str
    old: str = ""
    new: str = ""
    colour: str = ""

    def in_words(self, rng: np.random.Generator) -> str:
        """Return the instruction in one of several phrasings."""
        is_double = sum(placement.name == self.old for placement in self.before.placements) == 2
        old, colour = plural(self.old) if is_double else self.old, self.colour
        match self.kind:
            case "background":
                if colour == "white" and rng.random() < 0.3:
                    return "remove the background"
                to = f"put it on {with_article(colour)} background"
                phrasings = (f"make the background {colour}", f"change the background to {colour}", to)
            case "replace":
                new = f"two {plural(self.new)}" if is_double else with_article(self.new)
                phrasings = (
                    f"replace the {old} by {new}",
                    f"turn the {old} into {new}",
                    f"replace the {old} with {new}",
                )
            case "remove":
                phrasings = (f"remove the {old}", f"take the {old} away", f"erase the {old}")
            case "recolour":
                it = "them" if is_double else "it"
                phrasings = (f"make the {old} {colour}", f"make {it} {colour}", f"paint the {old} {colour}")
        return phrasings[rng.integers(3)]


@dataclass(frozen=True, slots=True)
class EditDataset(Numbered):
    """Edits. In the held-out split the edited picture, before or after, shows a combination that no training picture
    does.
    """

    def edit(self, index: int) -> SceneEdit:
        return sample_edit(self.rng(index, kind=2), self.resolution, self.split)

    def images(self, index: int) -> tuple[Image.Image, Image.Image]:
        """Return the picture before and after the edit."""
        edit = self.edit(index)
        return render(edit.before, self.resolution), render(edit.after, self.resolution)


def sample_edit(rng: np.random.Generator, resolution: Resolution, split: Split) -> SceneEdit:
    """Draw an edit whose changed picture is of the split, and whose other one is of the training split."""
    kind: EditKind = rng.choice(list(KIND_WEIGHTS), p=list(KIND_WEIGHTS.values()))  # type: ignore[assignment]
    scene = sample_scene(rng, resolution, split)
    while kind == "remove" and (len(scene.placements) != 1 or scene.names[0] in SINGLE_ONLY):
        scene = sample_scene(rng, resolution, split)
    while kind == "recolour" and len(scene.names) != 1:
        scene = sample_scene(rng, resolution, split)
    edit = _EDITS[kind](rng, scene, resolution)
    return replace(edit, instruction=edit.in_words(rng))


def _background(rng: np.random.Generator, scene: Scene, resolution: Resolution) -> SceneEdit:
    others = [ground for ground in BACKGROUNDS if ground != scene.background]
    others = [ground for ground in others if not any(is_heldout(name, ground) for name in scene.names)] or others
    ground = others[rng.integers(len(others))]
    shade = compose(rng, resolution, scene.names[:1], ground).shade
    return SceneEdit("background", replace(scene, background=ground, shade=shade), scene, "", colour=scene.background)


def _replace(rng: np.random.Generator, scene: Scene, resolution: Resolution) -> SceneEdit:
    del resolution
    new = scene.names[rng.integers(len(scene.names))]
    rest = [name for name in scene.names if name != new]
    usable = [name for name in object_names() if name not in scene.names and not is_heldout(name, scene.background)]
    usable = [name for name in usable if not any(is_heldout(name, other) for other in rest)]
    if sum(placement.name == new for placement in scene.placements) == 2:
        usable = [name for name in usable if name not in SINGLE_ONLY]
    old = usable[rng.integers(len(usable))]
    placements = tuple(replace(each, name=old) if each.name == new else each for each in scene.placements)
    return SceneEdit("replace", replace(scene, placements=placements), scene, "", old=old, new=new)


def _remove(rng: np.random.Generator, scene: Scene, resolution: Resolution) -> SceneEdit:
    kept = scene.names[0]
    usable = [name for name in object_names() if name != kept and not is_heldout(name, kept)]
    usable = [name for name in usable if not is_heldout(name, scene.background)]
    old = usable[rng.integers(len(usable))]
    names = (old, kept) if rng.random() < 0.5 else (kept, old)
    before = replace(compose(rng, resolution, names, scene.background), shade=scene.shade)
    placements = tuple(each for each in before.placements if each.name != old)
    return SceneEdit("remove", before, replace(scene, placements=placements), "", old=old)


def _recolour(rng: np.random.Generator, scene: Scene, resolution: Resolution) -> SceneEdit:
    del resolution
    colours = [colour for colour in TINTS if colour != scene.background]
    colour = colours[rng.integers(len(colours))]
    return SceneEdit("recolour", scene, recoloured(scene, colour), "", old=scene.names[0], colour=colour)


_EDITS = {"background": _background, "replace": _replace, "remove": _remove, "recolour": _recolour}
