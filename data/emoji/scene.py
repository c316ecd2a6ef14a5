"""Scenes: objects and their places, background and caption, and the rendering of a scene."""

import hashlib
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np
from PIL import Image

from ..resolution import Resolution
from .art import object_names, object_raster

Split = Literal["train", "heldout"]

BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (250, 250, 250),
    "black": (34, 34, 40),
    "gray": (158, 160, 164),
    "red": (205, 62, 66),
    "orange": (240, 146, 66),
    "yellow": (249, 219, 106),
    "green": (104, 182, 112),
    "blue": (78, 132, 216),
    "purple": (146, 104, 196),
    "pink": (244, 172, 198),
}
TINTS = ("gray", "red", "orange", "yellow", "green", "blue", "purple", "pink")
"""Colours, of those of backgrounds, in which a drawing can be painted."""
SHADE_JITTER = 6  # maximum change of a background colour, in levels per channel

# Plural and mass nouns: no article.
BARE_NAMES = frozenset({"broccoli", "cheese", "cherries", "corn", "fire", "fries", "grapes"})
# Names that are never doubled, because the plural is the same word, reads badly or is not in common use.
SINGLE_ONLY = BARE_NAMES | {"fish", "ice cream", "moon", "rainbow", "sun"}
IRREGULAR_PLURALS = {"maple leaf": "maple leaves", "butterfly": "butterflies", "octopus": "octopuses"}

KIND_WEIGHTS = {"one": 0.70, "two": 0.08, "pair": 0.22}


@dataclass(frozen=True, slots=True)
class Placement:
    """One drawing in a scene. Centre and side are fractions of the image's width, height and shorter side.

    `tint` is one of TINTS, in whose shades the drawing is painted, or "" for its own colours.
    """

    name: str
    center_x: float
    center_y: float
    side: float
    angle_deg: float
    tint: str = ""


@dataclass(frozen=True, slots=True)
class Scene:
    """A composition that can be drawn at any resolution of the aspect ratio it was sampled for."""

    placements: tuple[Placement, ...]
    background: str
    shade: tuple[int, int, int]
    caption: str

    @property
    def names(self) -> tuple[str, ...]:
        """Objects in the picture, each named once."""
        return tuple(dict.fromkeys(placement.name for placement in self.placements))

    def in_words(self, rng: np.random.Generator | None = None) -> str:
        """Return a caption as `caption_of` does, which may be another one than `caption`."""
        return caption_of(tuple(placement.name for placement in self.placements), self.background, rng)


def is_heldout(*parts: str) -> bool:
    """Return whether a combination (object and background, or two objects) is held out: one in ten, by hash."""
    digest = hashlib.sha256("|".join(sorted(parts)).encode()).digest()
    return digest[0] % 10 == 0


def with_article(name: str) -> str:
    if name in BARE_NAMES:
        return name
    return f"{'an' if name[0] in 'aeiou' and not name.startswith('uni') else 'a'} {name}"


def plural(name: str) -> str:
    if name in IRREGULAR_PLURALS:
        return IRREGULAR_PLURALS[name]
    if name.endswith(("s", "x", "sh", "ch")):
        return name + "es"
    if name.endswith("y") and name[-2] not in "aeiou":
        return name[:-1] + "ies"
    return name + "s"


@cache
def heldout_singles() -> tuple[tuple[str, str], ...]:
    """Return the (object, background) combinations that no training picture shows."""
    return tuple((name, ground) for name in object_names() for ground in BACKGROUNDS if is_heldout(name, ground))


@cache
def heldout_pairs() -> tuple[tuple[str, str], ...]:
    """Return the pairs of objects that no training picture shows."""
    names = object_names()
    return tuple((a, b) for a in names for b in names if a < b and is_heldout(a, b))


def sample_scene(rng: np.random.Generator, resolution: Resolution, split: Split) -> Scene:
    """Draw a scene. The training split has no held-out combinations; in the other split every scene has one."""
    kind = rng.choice(list(KIND_WEIGHTS), p=list(KIND_WEIGHTS.values()))
    names, background = _sample_content(rng, str(kind), split)
    return compose(rng, resolution, names, background)


def compose(rng: np.random.Generator, resolution: Resolution, names: tuple[str, ...], background: str) -> Scene:
    """Return a scene of one name, or of two names, equal or not; places, shade and wording are drawn."""
    jitter = rng.integers(-SHADE_JITTER, SHADE_JITTER + 1, size=3)
    red, green, blue = (int(level) for level in np.clip(np.array(BACKGROUNDS[background]) + jitter, 0, 255))
    placements = _place_one(rng, names[0]) if len(names) == 1 else _place_two(rng, names, resolution)
    return Scene(placements, background, (red, green, blue), caption_of(names, background, rng))


def recoloured(scene: Scene, tint: str) -> Scene:
    """Return the scene with all its drawings painted in one of TINTS."""
    return replace(scene, placements=tuple(replace(placement, tint=tint) for placement in scene.placements))


def caption_of(names: tuple[str, ...], background: str, rng: np.random.Generator | None = None) -> str:
    """Return the caption of a scene; with a generator, in one of several phrasings."""
    if len(names) == 2 and names[0] == names[1]:
        subject = f"two {plural(names[0])}"
    else:
        subject = " and ".join(with_article(name) for name in names)
    phrasing = 0.0 if rng is None else rng.random()
    if phrasing < 0.8:
        return f"{subject} on {with_article(background)} background"
    if phrasing < 0.9:
        return f"{with_article(background)} background with {subject}"
    return f"{subject}, {background} background"


def render(scene: Scene, resolution: Resolution) -> Image.Image:
    """Render the scene as an RGB image of the given resolution in pixels."""
    width, height = resolution
    canvas = Image.new("RGBa", (width, height), (*scene.shade, 255))
    for placement in scene.placements:
        side = max(8, round(placement.side * min(width, height)))
        stamp = object_raster(placement.name)
        if placement.tint:
            stamp = _painted(stamp, BACKGROUNDS[placement.tint])
        # The drawing is rotated at full size, so that it stays sharp, and scaled afterwards.
        stamp = stamp.rotate(placement.angle_deg, Image.Resampling.BILINEAR).resize(
            (side, side), Image.Resampling.LANCZOS
        )
        left, top = round(placement.center_x * width - side / 2), round(placement.center_y * height - side / 2)
        _composite(canvas, stamp, left, top)
    return canvas.convert("RGBA").convert("RGB")


def _painted(stamp: Image.Image, colour: tuple[int, int, int]) -> Image.Image:
    """Paint a premultiplied stamp in shades of a colour: black stays dark, grey becomes the colour, white pale."""
    pixels = np.asarray(stamp, dtype=np.float32) / 255
    alpha = pixels[..., 3:]
    light = (pixels[..., :3] @ np.array([0.299, 0.587, 0.114], np.float32))[..., None]
    # All of these are premultiplied, like the stamp: twice the light up to the colour, then on towards white.
    full = np.array(colour, np.float32) / 255
    dark, pale = np.minimum(2 * light, alpha), np.maximum(2 * light - alpha, 0)
    painted = full * (0.3 * alpha + 0.7 * dark) + 0.6 * (1 - full) * pale
    levels = np.rint(255 * np.concatenate([np.minimum(painted, alpha), alpha], -1)).astype(np.uint8)
    return Image.frombytes("RGBa", stamp.size, levels.tobytes())


def _composite(canvas: Image.Image, stamp: Image.Image, left: int, top: int) -> None:
    """Composite a premultiplied stamp over the opaque canvas, in place, clipped to the canvas."""
    box = (max(left, 0), max(top, 0), min(left + stamp.width, canvas.width), min(top + stamp.height, canvas.height))
    part = np.asarray(stamp.crop((box[0] - left, box[1] - top, box[2] - left, box[3] - top)), dtype=np.uint16)
    below = np.asarray(canvas.crop(box), dtype=np.uint16)
    alpha = part[..., 3:]
    merged = np.minimum(part + (below * (255 - alpha) + 127) // 255, 255).astype(np.uint8)
    canvas.paste(Image.frombytes("RGBa", (box[2] - box[0], box[3] - box[1]), merged.tobytes()), box[:2])


def _sample_content(rng: np.random.Generator, kind: str, split: Split) -> tuple[tuple[str, ...], str]:
    names, grounds = object_names(), list(BACKGROUNDS)
    while True:
        if split == "heldout" and kind == "pair":
            chosen, ground = heldout_pairs()[rng.integers(len(heldout_pairs()))], grounds[rng.integers(len(grounds))]
            if rng.random() < 0.5:
                chosen = (chosen[1], chosen[0])
            return chosen, ground
        if split == "heldout":
            name, ground = heldout_singles()[rng.integers(len(heldout_singles()))]
        else:
            name, ground = names[rng.integers(len(names))], grounds[rng.integers(len(grounds))]
            if is_heldout(name, ground):
                continue
        if kind == "one":
            return (name,), ground
        if kind == "two":
            if name in SINGLE_ONLY:
                continue
            return (name, name), ground
        other = names[rng.integers(len(names))]
        if other == name or is_heldout(name, other) or is_heldout(other, ground):
            continue
        return (name, other), ground


def _place_one(rng: np.random.Generator, name: str) -> tuple[Placement, ...]:
    side = rng.uniform(0.66, 0.88)
    x, y = 0.5 + rng.uniform(-0.06, 0.06, size=2)
    return (Placement(name, float(x), float(y), float(side), float(rng.uniform(-8, 8))),)


def _place_two(rng: np.random.Generator, names: tuple[str, ...], resolution: Resolution) -> tuple[Placement, ...]:
    """Place two objects side by side, or one above the other in an upright picture, in the order of the caption."""
    width, height = resolution
    long_over_short = max(width, height) / min(width, height)
    placements = []
    for name, centre in zip(names, (0.26, 0.74), strict=True):
        side = rng.uniform(0.44, 0.50) * min(long_over_short, 1.7)
        along, across = centre + rng.uniform(-0.015, 0.015), 0.5 + rng.uniform(-0.08, 0.08)
        x, y = (along, across) if width >= height else (across, along)
        placements.append(Placement(name, float(x), float(y), float(side), float(rng.uniform(-8, 8))))
    return tuple(placements)
