"""Images in the forms that metrics take: PIL images or arrays (height, width, 3) of uint8."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np
import torch
from PIL import Image

from ...data.checks import require_counts
from ...data.errors import UsageError

AnyImage = Image.Image | np.ndarray
Key = TypeVar("Key")

_MAX_WAITING = 4
"""Maximum number of waiting images, in batches."""


def to_array(image: AnyImage) -> np.ndarray:
    """Return the image as a uint8 array (height, width, 3).

    Raises:
        UsageError: an array has another shape or type.
    """
    if isinstance(image, Image.Image):
        return np.asarray(image.convert("RGB"))
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise UsageError(
            f"image is an array {image.shape} of {image.dtype}, but it must be (height, width, 3) of uint8"
        )
    return image


def to_pil(image: AnyImage) -> Image.Image:
    """Return the image as an RGB PIL image. Raises as `to_array`."""
    return image.convert("RGB") if isinstance(image, Image.Image) else Image.fromarray(to_array(image))


def batches_by_size(
    images: Iterable[tuple[Key, AnyImage]], batch_size: int
) -> Iterator[tuple[list[Key], torch.Tensor]]:
    """Yield images, each given with a key, as uint8 tensors (n, 3, height, width) of one size, with their keys.

    Sets of several resolutions alternate between them, so that batches of neighbours would hold one image each. If
    there are so many sizes that few images match, the largest unfinished batch is yielded first, to bound memory.

    Raises:
        UsageError: the batch size is below 1, or an array is no image.
    """
    require_counts({"batch size": batch_size})
    waiting: dict[tuple[int, ...], tuple[list[Key], list[np.ndarray]]] = {}

    def taken(shape: tuple[int, ...]) -> tuple[list[Key], torch.Tensor]:
        keys, arrays = waiting.pop(shape)
        return keys, _stack(arrays)

    for key, image in images:
        array = to_array(image)
        keys, arrays = waiting.setdefault(array.shape, ([], []))
        keys.append(key)
        arrays.append(array)
        if len(keys) == batch_size:
            yield taken(array.shape)
        elif sum(len(keys) for keys, _ in waiting.values()) >= _MAX_WAITING * batch_size:
            yield taken(max(waiting, key=lambda shape: len(waiting[shape][0])))
    for shape in list(waiting):
        yield taken(shape)


def _stack(arrays: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)
