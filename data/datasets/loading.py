"""Images of a sample or a folder as arrays for metrics, and a digest that identifies them by content."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import numpy as np
from PIL import Image

from ..checks import require_counts
from ..errors import UsageError
from ..resolution import Resolution
from .base import BadEntries, BadImageError
from .prefetch import prefetch
from .sampling import Sample

Crop = Literal["center-square", "none"]


class ImageSource(Protocol):
    """Images by id: a `Sample` or an `ImageFolder`."""

    @property
    def name(self) -> str: ...

    @property
    def ids(self) -> Sequence[str]: ...

    @property
    def reading_order(self) -> Sequence[str]:
        """Ids in the order in which reading the images is fastest."""
        ...

    def open_image(self, image_id: str, /) -> Image.Image: ...

    def content(self, image_id: str, /) -> bytes: ...


def iter_images(
    source: ImageSource,
    size: int | Resolution | None = None,
    *,
    crop: Crop = "center-square",
    workers: int = 2,
    bad: BadEntries | None = None,
) -> Iterator[tuple[str, np.ndarray]]:
    """Read images ahead with threads, in the source's reading order, which may differ from the order of its ids.

    Few images are in memory at a time (`prefetch.AHEAD_PER_WORKER` per thread).

    Images are cropped and scaled as in FID evaluations of text-to-image models: the largest window in the middle, then
    Pillow's bicubic filter, which is antialiased (its support grows with the scale), in eight bits, in one pass.

    Args:
        source: a sample with images, or a folder.
        size: size of the arrays in pixels, a number for a square; None does not scale.
        crop: "center-square" takes the largest window of the shape of `size` (a square without `size`); "none" takes
            the whole image, which is distorted if its shape differs.
        workers: number of decoding threads.
        bad: counts images that cannot be read, which are skipped; None makes the first one an error.

    Yields:
        (id, uint8 array (height, width, 3)); the caller owns the array.

    Raises:
        UsageError: a size or the number of workers is below 1, the source has no images, or too many are bad.
    """
    require_counts({"the number of workers": workers})
    if crop not in ("center-square", "none"):
        raise UsageError(f"crop is {crop!r}, but it must be center-square or none")
    target = Resolution(size, size) if isinstance(size, int) else size
    if target is not None and min(target) < 1:
        raise UsageError(f"image size is {target}, but both sides must be at least 1 pixel")
    if isinstance(source, Sample) and not source.has_images:
        raise UsageError(f"{source.name}: holds captions only, no images")
    bad = BadEntries(source.name) if bad is None else bad
    return _images(source, target, crop, workers, bad)


def _images(
    source: ImageSource, target: Resolution | None, crop: Crop, workers: int, bad: BadEntries
) -> Iterator[tuple[str, np.ndarray]]:
    def load(image_id: str) -> tuple[str, np.ndarray | BadImageError]:
        try:
            return image_id, np.array(fitted(source.open_image(image_id), target, crop))
        except BadImageError as error:
            return image_id, error

    for image_id, image in prefetch(source.reading_order, load, workers):
        if isinstance(image, BadImageError):
            bad.add(image_id, image)
        else:
            yield image_id, image


def fitted(image: Image.Image, target: Resolution | None, crop: Crop) -> Image.Image:
    """Crop and scale one image as `iter_images` does."""
    box = (0, 0, *image.size) if crop == "none" else _middle(image.size, target)
    if target is None or target == (box[2] - box[0], box[3] - box[1]):
        return image.crop(box)
    return image.resize(target, Image.Resampling.BICUBIC, box)


def _middle(size: tuple[int, int], target: Resolution | None) -> tuple[int, int, int, int]:
    """Return the largest centred window (left, top, right, bottom) of the target's shape, in whole pixels."""
    (width, height), (x, y) = size, target or (1, 1)
    if width * y > height * x:
        window = max(1, round(height * x / y)), height
    else:
        window = width, max(1, round(width * y / x))
    left, top = (width - window[0]) // 2, (height - window[1]) // 2
    return left, top, left + window[0], top + window[1]


def digest_of_images(source: ImageSource, *, workers: int = 2) -> str:
    """Return the SHA-256 over ids and contents of images, in the order of the ids: the key of computed features.

    It covers the content, because size and time of a file may stay the same when the content changes, and time changes
    with a mere copy. Every file is read once, which costs little compared with the features. Images that psctl draws
    itself are drawn.

    Raises:
        BadImageError: an image is missing.
        UsageError: the source has no images.
    """

    def digest(image_id: str) -> tuple[str, str]:
        return image_id, hashlib.sha256(source.content(image_id)).hexdigest()

    digests = dict(prefetch(source.reading_order, digest, workers))
    total = hashlib.sha256()
    for image_id in source.ids:
        for part in (image_id, digests[image_id]):
            content = part.encode()
            # With their lengths, so that no two lists of parts give the same bytes.
            total.update(len(content).to_bytes(8) + content)
    return total.hexdigest()
