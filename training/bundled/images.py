"""Pictures as training tensors: pools drawn once into uint8, batches cut from them."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ...data.emoji.dataset import EmojiDataset
from ...data.emoji.scene import Scene


def draw_pool(dataset: EmojiDataset, on_image: Callable[[], None] = lambda: None) -> tuple[Tensor, list[Scene]]:
    """All pictures of a dataset as uint8 [n, 3, height, width], and their scenes."""
    resolution = dataset.resolution
    pool = torch.empty(len(dataset), 3, resolution.height, resolution.width, dtype=torch.uint8)
    scenes = []
    for index, (scene, image) in enumerate(dataset):
        pool[index] = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        scenes.append(scene)
        on_image()
    return pool, scenes


def to_float(images: Tensor) -> Tensor:
    """uint8 [n, 3, h, w] to float32 in -1..1, the range of diffusers' autoencoders."""
    return images.float().div_(127.5).sub_(1.0)


def random_crops(pools: Sequence[Tensor], num_crops: int, side: int, rng: np.random.Generator) -> Tensor:
    """Square crops of `side` pixels from random pictures of pools that are large enough, uint8 [n, 3, side, side]."""
    usable = [pool for pool in pools if min(pool.shape[2:]) >= side]
    crops = []
    for _ in range(num_crops):
        pool = usable[rng.integers(len(usable))]
        top = int(rng.integers(pool.shape[2] - side + 1))
        left = int(rng.integers(pool.shape[3] - side + 1))
        crops.append(pool[int(rng.integers(len(pool))), :, top : top + side, left : left + side])
    return torch.stack(crops)
