"""The bundled emoji world as a data set: held-out scenes, never shown to the bundled models, drawn on demand."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast, get_args

from PIL import Image

from ... import __version__
from ..emoji.dataset import EmojiDataset
from ..emoji.scene import Split
from ..errors import UsageError
from ..resolution import Resolution, parse
from .base import CaptionEntry, ImageKind, clean_caption


@dataclass(frozen=True, slots=True)
class EmojiCaptions:
    """Numbered scenes of one resolution; an entry's id names split, seed, resolution and number."""

    scenes: EmojiDataset
    image_kind: ImageKind = "drawn"

    @property
    def name(self) -> str:
        return f"emoji ({self.scenes.split}, {self.scenes.resolution})"

    def entries(self) -> Iterator[CaptionEntry]:
        """Yield the scenes with their captions, without drawing the pictures."""
        scenes = self.scenes
        for index in range(scenes.size):
            entry_id = f"emoji-{scenes.split}-{scenes.seed}-{scenes.resolution}-{index:06d}"
            caption = clean_caption(scenes.scene(index).caption)
            yield CaptionEntry(entry_id, (caption,), f"{index:06d}", *scenes.resolution)

    def open_image(self, location: str) -> Image.Image:
        """Draw the picture of a scene. Raises RunError if resvg is not installed."""
        return self.scenes.image(int(location))

    def content(self, location: str) -> bytes:
        return self.open_image(location).tobytes()

    def fingerprint(self) -> dict[str, Any]:
        """Return the settings of the scenes and the version of psctl, as another version may draw other captions."""
        scenes = self.scenes
        return {
            "emoji": scenes.split,
            "psctl": __version__,
            "size": scenes.size,
            "seed": scenes.seed,
            "resolution": str(scenes.resolution),
        }


def open_emoji(
    path: str = "",
    *,
    split: str = "heldout",
    resolution: Resolution | str = "256",
    num_images: int = 10_000,
    data_seed: int = 0,
) -> EmojiCaptions:
    """Open scenes of the bundled emoji world, held-out ones by default; scene i is the same whatever `num_images` is.

    Options are as in `spec.parse_spec`. Raises UsageError if a path is given, there is no such split, or a number is
    out of range.
    """
    if path:
        raise UsageError(f"data set is 'emoji:{path}', but the emoji world takes no path: emoji")
    if num_images < 1 or data_seed < 0:
        raise UsageError(f"num_images is {num_images} and data_seed {data_seed}, but they must be from 1 and from 0")
    if split not in get_args(Split):
        raise UsageError(f"split of the emoji world is {split!r}, but it must be one of {', '.join(get_args(Split))}")
    size = parse(resolution) if isinstance(resolution, str) else resolution.checked()
    return EmojiCaptions(EmojiDataset(size, num_images, cast(Split, split), data_seed))
