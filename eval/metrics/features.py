"""Features of image sets for FID and KID, computed once for the same images and weights."""

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
    """Features (n, d) of the images of a source in float32, in the order of its ids.

    Images are decoded ahead by threads while the network works, in the order in which they are read fastest; only the
    features stay in memory (8 KB an image), with a few batches of images. Images of one size go through the network
    together wherever they are in the source.

    Args:
        source: the images; sizes may differ.
        extractor: takes uint8 images (n, 3, height, width) to features, as `eval.inception.load_inception` gives it.
        weights_sha256: what its weights are, part of the cache's key.
        cache_dir: where features are kept by the content of the images, None for nowhere. A set with bad images is
            not kept.
        workers: decoding threads; None for 2 where the network runs on the same cores, else one a core, at most 16.
        batch_size: images at a time.
        bad: counts images that cannot be read, which are left out; None: the first one is an error.
        on_images: called with the number of images that were just done.

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
    """Features (n, d) in float32 of images of any sizes in any order, each with its place; they come in order."""
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
