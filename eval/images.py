"""Images as the metrics take them: PIL images or arrays (height, width, 3) of uint8."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from PIL import Image

from ..data.checks import require_counts
from ..data.errors import UsageError

AnyImage = Image.Image | np.ndarray


def to_array(image: AnyImage) -> np.ndarray:
    """The image as a uint8 array (height, width, 3).

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
    """The image as an RGB PIL image. Raises as `to_array`."""
    return image.convert("RGB") if isinstance(image, Image.Image) else Image.fromarray(to_array(image))


def batches(images: Iterable[AnyImage], batch_size: int) -> Iterator[torch.Tensor]:
    """Stack images in order into uint8 tensors (n, 3, height, width), n at most `batch_size`.

    A batch holds images of one size; where the size changes, a new batch starts. The images are read one batch at a
    time, so a generator of any length will do.

    Raises:
        UsageError: the batch size is below 1, or an array is no image.
    """
    require_counts({"batch size": batch_size})
    batch: list[np.ndarray] = []
    for image in images:
        array = to_array(image)
        if batch and (len(batch) == batch_size or array.shape != batch[0].shape):
            yield _stack(batch)
            batch = []
        batch.append(array)
    if batch:
        yield _stack(batch)


def _stack(arrays: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)
