"""Models, batches and ways of running for the tests of the patch engine's models."""

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn

from patchedserve.serving.models.loading import load_model

from .patched_models import Size, Way
from .random_models import MODELS

TOLERANCE = 1e-5
UNETS = ["sd15", "sd2", "sdxl", "scale-shift", "gelu"]
TRANSFORMERS = [
    *(
        "sd3",
        "sd35",
        "flux",
        "schnell",
        "flux2",
        "klein",
        "aura",
        "chroma",
        "ovis",
        "pixart",
        "lumina2",
        "qwen",
        "z-image",
    ),
]
MASKED = ["chroma", "pixart", "lumina2", "qwen", "z-image"]
"""Models whose text has a mask: equal tokens do not identify what it leaves out."""
WITH_POSITIONS = ["ovis", "flux2", "klein"]
"""Models whose text tokens have positions, so that equal tokens differ."""
WITH_ODD_SIDES = ["flux2", "klein"]
"""Transformers whose images may have odd sides."""
SOME = ["sd15", "sdxl", "scale-shift", "sd3", "sd35", "flux"]
FOUR_LEVELS = ["sd15", "sd2"]  # patches of 8 and more
BUNDLED = ["emoji-xl", "emoji-3"]

STRATEGIES = ["regroup", "stitch", "mixed"]
WAYS = [
    *(Way("image", None, strategy) for strategy in STRATEGIES),
    *(Way("patch", 8, strategy) for strategy in STRATEGIES),
    *(Way("patch", patch_size, strategy) for patch_size in (4, 16) for strategy in ("regroup", "stitch")),
    Way("patch", None, "stitch"),
]
IMAGE, IMAGE_STITCH = Way("image", None, "regroup"), Way("image", None, "stitch")
PATCH, PATCH_STITCH = Way("patch", 8, "regroup"), Way("patch", 8, "stitch")
FEW_WAYS = [IMAGE, IMAGE_STITCH, PATCH, PATCH_STITCH]

# Latent sizes (height, width) and rows of each; images have eight times as many pixels on a side.
BATCHES: dict[str, tuple[list[Size], int]] = {
    "one row": ([(16, 16)], 1),
    "all three sizes": ([(16, 16), (24, 24), (32, 32)], 1),
    "128x256 and 256x128": ([(16, 32), (32, 16), (16, 16)], 1),
    "160x224 and 224x160": ([(20, 28), (28, 20), (20, 28), (16, 32)], 1),
    "16 guided requests": ([*[(8, 8)] * 6, *[(8, 16)] * 5, *[(16, 16)] * 5], 2),
    "one resolution": ([(16, 24)] * 4, 1),
    "many resolutions": ([(8, 8), (8, 16), (16, 8), (16, 16), (8, 24), (24, 8), (24, 16), (16, 24), (32, 8)], 1),
    "odd sides": ([(15, 18), (17, 16), (15, 18), (9, 7)], 1),
    "few pixels": ([(2, 2), (4, 4), (2, 6)], 1),
    # At the deeper levels every image is a single position, so that levels have equal shapes.
    "one position": ([(2, 2), (2, 2)], 1),
}
TWO_SIZES: list[list[Size]] = [[(16, 16), (8, 16)], [(8, 8), (8, 8), (16, 24)], [(8, 16)] * 3 + [(24, 16)] * 2]
THREE_SIZES: list[list[Size]] = [[(8, 8), (8, 16), (16, 16)], [(8, 8), (16, 16), (16, 16), (24, 16)]]
MIXED: list[Size] = [(16, 16), (16, 16), (16, 16), (24, 24), (16, 32), (8, 8)]


@functools.cache
def model_of(name: str) -> Any:
    """Return a model, which tests must not change."""
    if name in MODELS:
        return MODELS[name](seed=1)
    pipe: Any = load_model(name, device="cpu", dtype="float32").pipe
    return pipe.transformer if getattr(pipe, "unet", None) is None else pipe.unet


def ways_for(name: str, sizes: Sequence[Size], ways: Sequence[Way] = tuple(WAYS)) -> list[Way]:
    """Return the ways that the model and these sizes allow. SD3 has no convolutions, hence no choice of strategy."""
    has_choice = name in UNETS or name == "emoji-xl"
    return [way for way in ways if way.fits(model_of(name), sizes) and (has_choice or way.strategy == "regroup")]


def modules_of(model: nn.Module) -> list[tuple[str, int]]:
    """Return the name and id of every module, in order."""
    return [(name, id(module)) for name, module in model.named_modules(remove_duplicate=False)]
