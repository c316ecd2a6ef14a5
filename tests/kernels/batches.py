"""Batches of random images of mixed resolutions, cut into patches without the kernels under test."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from patchedserve.serving.layout.device_tables import index_tensors
from patchedserve.serving.layout.patch_layout import PatchLayout

# (height, width) of every request, and the patch size; together they have every pattern of neighbours.
MIXES = [
    ([(4, 4)], 4),  # one patch, no neighbour
    ([(4, 12)], 4),  # a row
    ([(15, 5)], 5),  # a column, odd side
    ([(9, 6)], 3),  # not square
    ([(8, 8), (4, 4), (8, 4), (8, 8)], 4),  # mixed, one resolution twice
    ([(3, 2), (1, 1), (2, 2), (1, 3)], 1),  # patches of one pixel
]
MIX_IDS = ["single", "row", "column", "rectangle", "mixed", "pixels"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass
class Batch:
    """Images in the order of the layout, (1, C, H, W) each, and the same images as patches."""

    layout: PatchLayout
    request_index: torch.Tensor
    neighbours: torch.Tensor
    images: list[torch.Tensor]
    patches: torch.Tensor

    @property
    def patch_size(self) -> int:
        return self.layout.patch_size


def cut(image: torch.Tensor, side: int, margin: int = 0, step: int | None = None) -> torch.Tensor:
    """Cut (1, C, H, W) into windows of `side`, one every `step`, after padding with `margin` zeros, by plain slices."""
    step = step or side
    padded = torch.nn.functional.pad(image, (margin,) * 4)
    _, _, height, width = padded.shape
    windows = [
        padded[:, :, top : top + side, left : left + side]
        for top in range(0, height - side + 1, step)
        for left in range(0, width - side + 1, step)
    ]
    return torch.cat(windows)


def random_batch(
    sizes: Sequence[tuple[int, int]],
    patch_size: int,
    channels: int,
    *,
    dtype: torch.dtype = torch.float32,
    mean: float = 0.0,
    seed: int = 0,
) -> Batch:
    layout = PatchLayout.build(sizes, patch_size)
    generator = torch.Generator().manual_seed(seed)
    images = [
        (torch.randn(1, channels, *sizes[request], generator=generator) + mean).to(dtype) for request in layout.order
    ]
    patches = torch.cat([cut(image, patch_size) for image in images]).to(memory_format=torch.channels_last)
    return Batch(layout, *index_tensors(layout, "cpu"), images, patches)


def cut_all(images: Sequence[torch.Tensor], side: int, margin: int = 0, step: int | None = None) -> torch.Tensor:
    return torch.cat([cut(image, side, margin, step) for image in images])
