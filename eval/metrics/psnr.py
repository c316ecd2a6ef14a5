"""Peak signal-to-noise ratio of 8-bit images, through torchmetrics."""

import torch

from ...data.errors import MissingExtraError, UsageError
from .images import AnyImage, to_array

MAX_PSNR_DB = 100.0
"""Value for equal images, whose PSNR is infinite. The smallest change of a 256 x 256 image gives 101 dB."""


def psnr(image: AnyImage, reference: AnyImage) -> float:
    """Return PSNR in dB: 10 log10(255^2 / mean squared error over all pixels and channels); infinite for equal images.

    Raises:
        UsageError: the images have different sizes.
        MissingExtraError: torchmetrics is not installed.
    """
    try:
        from torchmetrics.functional.image import peak_signal_noise_ratio
    except ImportError as error:
        raise MissingExtraError("torchmetrics", "eval") from error
    one, other = to_array(image), to_array(reference)
    if one.shape != other.shape:
        raise UsageError(
            f"images are {one.shape[1]}x{one.shape[0]} and {other.shape[1]}x{other.shape[0]}, "
            "but PSNR compares images of one size"
        )
    pair = (torch.tensor(each, dtype=torch.float64) for each in (one, other))
    return float(peak_signal_noise_ratio(*pair, data_range=255.0))
