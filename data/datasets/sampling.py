"""Sampling of text-image pairs: the same pairs on every machine, whatever the order of the files."""

import hashlib
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path

from PIL import Image

from ..checks import require_counts
from ..errors import UsageError
from .base import BadEntries, BadImageError, CaptionDataset, CaptionedImage, CaptionEntry
from .decode import decode_rgb
from .prefetch import prefetch
from .sample_cache import read_cached, sample_key, write_cached


@dataclass(frozen=True)
class Sample:
    """Pairs drawn from a data set, in the order of the draw. A smaller sample of the same seed is the beginning of a
    larger one, unless bad entries occur in between.

    Attributes:
        dataset: the data set.
        items: the pairs.
        seed: seed of the draw.
        bad: skipped entries, one line each; empty if no bad entry is allowed.
    """

    dataset: CaptionDataset
    items: tuple[CaptionedImage, ...]
    seed: int
    bad: tuple[str, ...] = ()
    _by_id: dict[str, CaptionedImage] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_id", {item.id: item for item in self.items})

    def __len__(self) -> int:
        return len(self.items)

    @property
    def name(self) -> str:
        """Name of the data set."""
        return self.dataset.name

    @property
    def has_images(self) -> bool:
        """Whether the data set has images, or captions only."""
        return self.dataset.image_kind != "none"

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(item.id for item in self.items)

    @property
    def captions(self) -> tuple[str, ...]:
        return tuple(item.caption for item in self.items)

    @property
    def reading_order(self) -> tuple[str, ...]:
        """Ids in the order in which reading their images is fastest."""
        return tuple(item.id for item in sorted(self.items, key=lambda item: (item.location or "", item.id)))

    def open_image(self, image_id: str) -> Image.Image:
        """Return the image of a pair, upright, in mode RGB. Raises BadImageError, and UsageError for captions only."""
        return self.dataset.open_image(self._location(image_id))

    def content(self, image_id: str) -> bytes:
        """Return the bytes of the image. Raises as `open_image`."""
        return self.dataset.content(self._location(image_id))

    def _location(self, image_id: str) -> str:
        location = self._by_id[image_id].location
        if location is None:
            raise UsageError(f"{self.name}: holds captions only, no images")
        return location


def sample_pairs(
    dataset: CaptionDataset,
    n: int | None,
    seed: int = 0,
    *,
    max_bad: int = 0,
    cache_dir: Path | None = None,
    workers: int = 2,
) -> Sample:
    """Draw text-image pairs without replacement, one caption per image.

    Images are drawn in the order of sha256("SEED|ID"); an image's caption is the one with the smallest
    sha256("SEED|ID|CAPTION"). The sample therefore depends on seed, ids and captions alone, not on the order of the
    files, the machine or a library's random numbers.

    A drawn entry that cannot be used (see `CaptionEntry.problem`; its image is missing or damaged; its id belongs to
    several entries) is named, counted and skipped, and the next one takes its place. Entries that are not drawn are not
    checked. Every drawn image is decoded once, so that all n images are usable.

    Memory: n entries, in addition to what the data set needs to read its annotations.

    Args:
        dataset: data set from `registry.open_dataset`.
        n: number of pairs; None for all.
        seed: seed of the draw.
        max_bad: maximum number of bad entries that are skipped; one more is an error.
        cache_dir: folder that keeps the sample under what determines it (annotations' content, n, seed); None for no
            cache. A sample with bad entries is not kept, because they may be repaired.
        workers: number of threads that check images.

    Raises:
        UsageError: there are fewer than n usable pairs, more bad entries than allowed, n is below 1, or the data set
            cannot be read.
        OSError: the cache cannot be written.
    """
    require_counts({"the number of pairs": n, "the number of workers": workers})
    bad = BadEntries(dataset.name, max_bad)
    # Computing the key reads the annotations.
    key = None if cache_dir is None else sample_key(dataset.fingerprint(), n, seed)
    if cache_dir is not None and key is not None:
        kept = read_cached(cache_dir, key)
        if kept is not None:
            return Sample(dataset, kept, seed)
    items = _draw(dataset, n, seed, bad, workers)
    if cache_dir is not None and key is not None and not len(bad):
        write_cached(cache_dir, key, items)
    return Sample(dataset, tuple(items), seed, bad.problems)


def _draw(
    dataset: CaptionDataset,
    n: int | None,
    seed: int,
    bad: BadEntries,
    workers: int,
) -> list[CaptionedImage]:
    page = None if n is None else n + bad.limit + 1
    drawn = _in_hash_order(dataset, seed, page)
    items: list[CaptionedImage] = []
    while n is None or len(items) < n:
        # No more than are missing, so that every bad entry among them was really drawn.
        groups = list(islice(drawn, None if n is None else n - len(items)))
        if not groups:
            break
        items += _usable(dataset, groups, seed, bad, workers)
    if len(items) < (n or 1):
        asked = "at least 1" if n is None else str(n)
        found = "only 1 usable one" if len(items) == 1 else f"only {len(items)} usable ones"
        raise UsageError(
            f"{dataset.name}: {asked} text-image pairs were asked for, but there are {found}"
            + (f" ({len(bad)} bad entries skipped)" if len(bad) else "")
        )
    return items


def _in_hash_order(dataset: CaptionDataset, seed: int, page: int | None) -> Iterator[list[CaptionEntry]]:
    """Yield the entries of each id, in the order of the ids' hashes.

    Every page is a pass over the data set that keeps the `page` smallest hashes beyond those of the previous one. Pages
    double in size, so that even a restrictive filter needs few passes. Equal ids have equal hashes, so entries that
    share an id are adjacent, without a list of all ids.
    """
    after = b""
    while True:
        hashed = ((_digest(seed, entry.id), entry) for entry in dataset.entries())
        beyond = (pair for pair in hashed if pair[0] > after)
        if page is None:
            chosen = sorted(beyond, key=lambda pair: pair[0])
        else:
            page = max(page, 2)
            chosen = heapq.nsmallest(page, beyond, key=lambda pair: pair[0])
        is_last = page is None or len(chosen) < page
        groups = [[entry for _, entry in group] for _, group in groupby(chosen, key=lambda pair: pair[0])]
        if not is_last and len(groups) > 1:
            # The last id may have more entries beyond this page, so it is left to the next page.
            groups.pop()
        yield from groups
        if is_last or page is None:
            return
        after = _digest(seed, groups[-1][0].id)
        page *= 2


def _usable(
    dataset: CaptionDataset, groups: Sequence[list[CaptionEntry]], seed: int, bad: BadEntries, workers: int
) -> Iterator[CaptionedImage]:
    """Yield the pairs of the usable groups, in their order, and count the others as bad."""

    def examine(group: list[CaptionEntry]) -> tuple[str, CaptionedImage | BadImageError | str]:
        entry = group[0]
        size = entry.width, entry.height
        if len(group) > 1:
            return entry.id, "is the id of more than one entry of the data set, so it is ambiguous"
        if entry.problem is not None:
            return entry.id, entry.problem
        if dataset.image_kind == "stored":
            try:
                size = decode_rgb(dataset.content(entry.location or ""), entry.location or "").size
            except BadImageError as error:
                return entry.id, error
        caption = min(entry.captions, key=lambda text: _digest(seed, entry.id, text))
        return entry.id, CaptionedImage(entry.id, caption, entry.location, *size, entry.seed)

    in_reading_order = sorted(groups, key=lambda group: group[0].location or "")
    are_stored = dataset.image_kind == "stored"
    examined = dict(prefetch(in_reading_order, examine, workers) if are_stored else map(examine, groups))
    for group in groups:
        found = examined[group[0].id]
        if isinstance(found, CaptionedImage):
            yield found
        else:
            bad.add(group[0].id, found)


def _digest(seed: int, *parts: str) -> bytes:
    return hashlib.sha256("|".join([str(seed), *parts]).encode(errors="surrogatepass")).digest()
