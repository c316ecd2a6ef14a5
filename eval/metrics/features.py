"""Features of image sets for FID and KID, cached by images and weights."""

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ...data.datasets.base import BadEntries
from ...data.datasets.loading import ImageSource, digest_of_images, iter_images
from ...data.errors import UsageError
from ...data.files import atomic_write
from .images import AnyImage, batches_by_size

_VERSION = 1  # changes whenever the same images would give other features
BATCH_SIZE = 32
_MAX_WORKERS = 16


def features_of(
    source: ImageSource,
    extractor: nn.Module,
    weights_sha256: str,
    cache_dir: Path | None = None,
    *,
    workers: int | None = None,
    batch_size: int = BATCH_SIZE,
    bad: BadEntries | None = None,
    on_images: Callable[[int], None] = lambda count: None,
) -> torch.Tensor:
    """Return features (n, d) of the images of a source in float32, in the order of its ids.

    Threads decode images ahead while the network works, in the order in which reading is fastest. Only the features
    stay in memory (8 KB per image), with a few batches of images. Images of one size go through the network together,
    wherever they are in the source.

    Args:
        source: the images; sizes may differ.
        extractor: maps uint8 images (n, 3, height, width) to features, such as `inception.load_inception` returns it.
        weights_sha256: SHA-256 of its weights, part of the cache's key.
        cache_dir: folder that caches features by the content of the images; None for no cache. A set with bad images
            is not cached.
        workers: number of decoding threads; None for 2 if the network runs on the same cores, otherwise one per core,
            at most 16.
        batch_size: number of images in a batch.
        bad: counts images that cannot be read, which are skipped; None makes the first one an error.
        on_images: called with the number of images after each batch.

    Raises:
        UsageError: too many images are bad.
        OSError: the cache cannot be written.
    """
    file = None
    workers = _workers_for(extractor) if workers is None else workers
    if cache_dir is not None:
        file = _cache_file(source, weights_sha256, cache_dir, workers)
        if file is not None and (kept := _read(file, len(source.ids))) is not None:
            on_images(len(kept))
            return kept
    place_of = {image_id: place for place, image_id in enumerate(source.ids)}
    images = iter_images(source, crop="none", workers=workers, bad=bad)
    placed = ((place_of[image_id], image) for image_id, image in images)
    features = features_of_images(placed, extractor, batch_size, on_images)
    if file is not None and len(features) == len(source.ids):
        with atomic_write(file) as temporary:
            save_file({"features": features}, temporary)
    return features


def features_of_images(
    images: Iterable[tuple[int, AnyImage]],
    extractor: Callable[[torch.Tensor], torch.Tensor],
    batch_size: int = BATCH_SIZE,
    on_images: Callable[[int], None] = lambda count: None,
) -> torch.Tensor:
    """Return features (n, d) in float32 of images of any sizes, each given with its place, in the order of places."""
    parts, places = [], []
    for keys, batch in batches_by_size(images, batch_size):
        parts.append(extractor(batch).float().cpu())
        places += keys
        on_images(len(keys))
    return torch.cat(parts)[np.argsort(places)] if parts else torch.zeros(0, 0)


def _workers_for(extractor: nn.Module) -> int:
    parameter = next(extractor.parameters(), None)
    if parameter is None or parameter.device.type == "cpu":
        return 2
    return max(2, min(_MAX_WORKERS, os.cpu_count() or 2))


def _cache_file(source: ImageSource, weights_sha256: str, folder: Path, workers: int) -> Path | None:
    try:
        images = digest_of_images(source, workers=workers)
    except UsageError:
        # An image is missing; reading all images names and counts it later.
        return None
    key = hashlib.sha256(f"{_VERSION}|{weights_sha256}|{images}".encode()).hexdigest()
    return folder / f"features-{key[:32]}.safetensors"


def _read(file: Path, count: int) -> torch.Tensor | None:
    if not file.is_file():
        return None
    try:
        features = load_file(file)["features"]
    except (SafetensorError, KeyError, OSError):
        # The file is damaged; the features are computed again and the file is replaced.
        return None
    return features if len(features) == count else None
