"""Features of image sets for FID and KID, computed once for the same images and weights."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ..data.datasets.base import BadEntries
from ..data.datasets.loading import ImageSource, digest_of_images, iter_images
from ..data.errors import UsageError
from ..data.files import atomic_write
from .images import batches

_VERSION = 1  # changes whenever the same images would give other features
BATCH_SIZE = 32


def features_of(
    source: ImageSource,
    extractor: nn.Module,
    weights_sha256: str,
    cache_dir: Path | None = None,
    *,
    workers: int = 2,
    batch_size: int = BATCH_SIZE,
    bad: BadEntries | None = None,
    on_images: Callable[[int], None] | None = None,
) -> torch.Tensor:
    """Features (n, d) of the images of a source in float32, in the order of its ids.

    Images are decoded ahead by threads while the network works; only the features stay in memory (8 KB an image).

    Args:
        source: the images; sizes may differ.
        extractor: takes uint8 images (n, 3, height, width) to features, as `eval.inception.load_inception` gives it.
        weights_sha256: what its weights are, part of the cache's key.
        cache_dir: where features are kept by the content of the images, None for nowhere. A set with bad images is
            not kept.
        workers: decoding threads.
        batch_size: images at a time; images of other sizes make batches of their own.
        bad: counts images that cannot be read, which are left out; None: the first one is an error.
        on_images: called with the number of images that were just done.

    Raises:
        UsageError: too many images are bad.
        OSError: the cache cannot be written.
    """
    file = None
    if cache_dir is not None:
        file = _cache_file(source, weights_sha256, cache_dir, workers)
        if file is not None and (kept := _read(file, len(source.ids))) is not None:
            if on_images is not None:
                on_images(len(kept))
            return kept
    parts: list[torch.Tensor] = []
    images = (image for _, image in iter_images(source, crop="none", workers=workers, bad=bad))
    for batch in batches(images, batch_size):
        parts.append(extractor(batch).float().cpu())
        if on_images is not None:
            on_images(len(batch))
    features = torch.cat(parts) if parts else torch.zeros(0, 0)
    if file is not None and len(features) == len(source.ids):
        with atomic_write(file) as temporary:
            save_file({"features": features}, temporary)
    return features


def _cache_file(source: ImageSource, weights_sha256: str, folder: Path, workers: int) -> Path | None:
    try:
        images = digest_of_images(source, workers=workers)
    except UsageError:
        # An image is missing; whoever reads them all will name and count it.
        return None
    key = hashlib.sha256(f"{_VERSION}|{weights_sha256}|{images}".encode()).hexdigest()
    return folder / f"features-{key[:32]}.safetensors"


def _read(file: Path, count: int) -> torch.Tensor | None:
    if not file.is_file():
        return None
    try:
        features = load_file(file)["features"]
    except (SafetensorError, KeyError, OSError):
        # Damaged: it is computed again and replaced.
        return None
    return features if len(features) == count else None
