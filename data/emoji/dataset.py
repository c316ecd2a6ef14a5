"""Numbered pictures: (seed, split, resolution, index) always names the same scene, on every machine."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image

from ..resolution import Resolution
from .scene import Scene, Split, render, sample_scene

SPLIT_NUMBERS: dict[Split, int] = {"train": 0, "heldout": 1}


@dataclass(frozen=True, slots=True)
class EmojiDataset:
    """`size` pictures of one resolution and split. Nothing is stored: each picture is drawn on demand."""

    resolution: Resolution
    size: int
    split: Split = "train"
    seed: int = 0

    def scene(self, index: int) -> Scene:
        if not 0 <= index < self.size:
            raise IndexError(f"picture {index} of {self.size}")
        key = [self.seed, SPLIT_NUMBERS[self.split], self.resolution.width, self.resolution.height, index]
        return sample_scene(np.random.default_rng(key), self.resolution, self.split)

    def image(self, index: int) -> Image.Image:
        return render(self.scene(index), self.resolution)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[tuple[Scene, Image.Image]]:
        for index in range(self.size):
            scene = self.scene(index)
            yield scene, render(scene, self.resolution)
