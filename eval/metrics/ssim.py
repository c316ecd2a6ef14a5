"""Structural similarity (Wang et al., "Image Quality Assessment", 2004) of 8-bit images, through torchmetrics."""

import torch

from ...data.errors import MissingExtraError, UsageError

WINDOW_PX = 11
"""Side of the Gaussian window (sigma 1.5), as in the paper; smaller images have no value."""


def ssim(images: torch.Tensor, references: torch.Tensor) -> torch.Tensor:
    """SSIM (n,) of each pair, mean over colours and over all windows that lie inside the image; 1 for equal images.

    Args:
        images, references: uint8 (n, 3, height, width).

    Raises:
        UsageError: the shapes differ, or a side is below 11 pixels.
        MissingExtraError: torchmetrics is not installed.
    """
    try:
        from torchmetrics.functional.image import structural_similarity_index_measure
    except ImportError as error:
        raise MissingExtraError("torchmetrics", "eval") from error
    if images.shape != references.shape or images.ndim != 4:
        raise UsageError(f"images are {tuple(images.shape)} and {tuple(references.shape)}, but must be alike")
    if min(images.shape[2:]) < WINDOW_PX:
        raise UsageError(f"images are {images.shape[3]}x{images.shape[2]}, but SSIM needs {WINDOW_PX} pixels")
    # float64: variances are differences of large squares.
    _, maps = structural_similarity_index_measure(
        images.double(),
        references.double(),
        sigma=1.5,
        kernel_size=WINDOW_PX,
        data_range=255.0,
        reduction="none",
        return_full_image=True,
    )
    # torchmetrics averages over mirrored borders too; the paper and scikit-image take whole windows only.
    border = WINDOW_PX // 2
    return maps[..., border:-border, border:-border].mean((1, 2, 3))
