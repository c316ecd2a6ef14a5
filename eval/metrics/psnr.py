"""Peak signal-to-noise ratio of 8-bit images."""

import math

import numpy as np

from ...data.errors import UsageError
from .images import AnyImage, to_array

MAX_PSNR_DB = 100.0
"""What equal images count as, whose PSNR is infinite. The smallest change of a 256 x 256 image gives 101 dB."""


def psnr(image: AnyImage, reference: AnyImage) -> float:
    """PSNR in dB: 10 log10(255^2 / mean squared error over all pixels and channels); infinite for equal images.

    Raises:
        UsageError: the images have different sizes.
    """
    one, other = to_array(image), to_array(reference)
    if one.shape != other.shape:
        raise UsageError(
            f"images are {one.shape[1]}x{one.shape[0]} and {other.shape[1]}x{other.shape[0]}, "
            "but PSNR compares images of one size"
        )
    error = float(np.mean((one.astype(np.float64) - other.astype(np.float64)) ** 2))
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)
