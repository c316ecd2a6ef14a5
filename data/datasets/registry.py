"""Data sets by their spec: "coco:PATH", "diffusiondb:PATH" and so on."""

import inspect
from collections.abc import Callable
from typing import Any

from ..errors import UsageError
from .base import CaptionDataset
from .captions import open_captions
from .coco import open_coco
from .diffusiondb import open_diffusiondb
from .emoji import open_emoji
from .imagefolder import open_imagefolder
from .parquet import open_parquet

OPENERS: dict[str, Callable[..., CaptionDataset]] = {
    "coco": open_coco,
    "diffusiondb": open_diffusiondb,
    "imagefolder": open_imagefolder,
    "parquet": open_parquet,
    "captions": open_captions,
    "emoji": open_emoji,
}

SPEC_FORMS = "coco:PATH, diffusiondb:PATH or diffusiondb:hub, imagefolder:PATH, parquet:PATH, captions:FILE, emoji"
"""What a spec may look like, for messages and help texts."""


def open_dataset(spec: str, **options: Any) -> CaptionDataset:
    """Open a data set; no image is read yet.

    Args:
        spec: one of `SPEC_FORMS`.
        options: keyword arguments of the kind's own function (`open_coco` and so on); None stands for its default, so
            that a command can hand on all of its options.

    Raises:
        UsageError: the spec has another form, nothing of that kind is at the path, or an option belongs to another kind.
        MissingExtraError, RunError: as the kind's own function.
    """
    kind, _, path = spec.partition(":")
    opener = OPENERS.get(kind)
    if opener is None:
        raise UsageError(f"data set is {spec!r}, but it must be one of: {SPEC_FORMS}")
    if not path and kind != "emoji":
        raise UsageError(f"data set is {spec!r}, but it needs a path: {kind}:PATH")
    given = {name: value for name, value in options.items() if value is not None}
    allowed = [
        name
        for name, parameter in inspect.signature(opener).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    for name in given:
        if name not in allowed:
            raise UsageError(f"{name} is no option of the data set {kind}, whose options are: {', '.join(allowed)}")
    return opener(path, **given)
