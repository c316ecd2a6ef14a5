"""Computation that the patch cache saved while a set of images was drawn, kept beside the images.

A set may be drawn in several runs, the last of which may have nothing left to draw, so each run adds to a file.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ...data.files import write_json
from ...data.parsing import parse
from ...data.records import read_json

if TYPE_CHECKING:
    from ...serving.models.served import ServedModel

CACHE_USE_FILE = "cache-use.json"
Counts = Mapping[str, tuple[int, int]]
"""Number of patches in all passes, and of those that were reused, by block."""


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Computation that the cache saved.

    Attributes:
        num_images: number of images that were drawn while patches were counted.
        by_block: number of patches, and of reused ones, by block.
    """

    num_images: int = 0
    by_block: Counts = field(default_factory=dict)

    @property
    def saved_computation(self) -> float:
        """Share of the patches of all blocks that were reused, 0 to 1; 0 if nothing was counted."""
        patches, skipped = map(sum, zip((0, 0), *self.by_block.values(), strict=True))
        return skipped / patches if patches else 0.0

    def __add__(self, other: "CacheUse") -> "CacheUse":
        return CacheUse(self.num_images + other.num_images, _added(self.by_block, other.by_block))

    def describe(self) -> dict[str, Any]:
        """Return the entry for results: the saved share in total and of every block, and the number of images."""
        saved = {name: skipped / patches for name, (patches, skipped) in self.by_block.items() if patches}
        return {"saved_computation": self.saved_computation, "saved_by_block": saved, "num_images": self.num_images}

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read the counts of a set; None if there are none.

        Raises:
            UsageError: the file is damaged.
        """
        file = folder / CACHE_USE_FILE
        if not file.is_file():
            return None
        remedy = "delete it to continue without what the cache saved"
        return parse(cls, read_json(file, "savings"), f"{file}: is damaged", remedy)


class CacheMeter:
    """Adds the savings of a model's cache to the file of a set; does nothing without a cache."""

    def __init__(self, model: "ServedModel | None", folder: Path) -> None:
        self._stats = None if model is None else model.cache_stats
        self._folder = folder
        self._before = self._counts()

    def note(self, num_images: int) -> None:
        """Add the savings since the last call, in which `num_images` images were drawn. Raises OSError, UsageError."""
        if self._stats is None:
            return
        now = self._counts()
        saved = CacheUse(num_images, _added(now, self._before, sign=-1))
        self._before = now
        write_json(self._folder / CACHE_USE_FILE, asdict((CacheUse.read(self._folder) or CacheUse()) + saved))

    def _counts(self) -> Counts:
        if self._stats is None:
            return {}
        return {name: (patches, skipped) for name, (patches, skipped) in self._stats.by_block.items()}


def cache_use_of(
    folder: Path, settings: Mapping[str, Any], num_images: int | None
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the savings of the cache for a set (None without a cache), and a warning if images were not counted.

    Args:
        folder: folder of the set.
        settings: settings of its manifest.
        num_images: number of its images; None leaves out the warning.

    Raises:
        UsageError: the set's file of savings is damaged.
    """
    cache = settings.get("cache")
    if not isinstance(cache, Mapping) or cache.get("mode", "off") == "off":
        return None, []
    use = CacheUse.read(folder) or CacheUse()
    warnings = []
    if num_images is not None and use.num_images < num_images:
        warnings.append(
            f"the share of computation that the cache saved was counted for {use.num_images} of {num_images} images"
        )
    return use.describe() if use.num_images else None, warnings


def _added(one: Counts, other: Counts, sign: int = 1) -> Counts:
    pairs = {name: (one.get(name, (0, 0)), other.get(name, (0, 0))) for name in [*one, *other]}
    return {name: (first[0] + sign * second[0], first[1] + sign * second[1]) for name, (first, second) in pairs.items()}
