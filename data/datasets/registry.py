"""Data sets by their spec: "coco:PATH", "diffusiondb:PATH?max_nsfw=0.3" and so on."""

from collections.abc import Callable
from typing import Any

from .base import CaptionDataset
from .captions import open_captions
from .coco import open_coco
from .diffusiondb import open_diffusiondb
from .emoji import open_emoji
from .imagefolder import open_imagefolder
from .parquet import open_parquet
from .spec import parse_spec

OPENERS: dict[str, Callable[..., CaptionDataset]] = {
    "coco": open_coco,
    "diffusiondb": open_diffusiondb,
    "imagefolder": open_imagefolder,
    "parquet": open_parquet,
    "captions": open_captions,
    "emoji": open_emoji,
}


def open_dataset(spec: str, **options: Any) -> CaptionDataset:
    """Open a data set; no image is read yet.

    Args:
        spec: a spec as `spec.parse_spec` takes it, with or without options.
        options: further options, as keyword arguments of the kind's function (`open_coco` and so on).

    Raises:
        UsageError: as `parse_spec`, or the path holds nothing of that kind, or an option belongs to another kind or is
            also given in the spec.
        MissingExtraError, RunError: as the kind's function.
    """
    parsed = parse_spec(spec, options)
    return OPENERS[parsed.kind](parsed.path, **parsed.options)
