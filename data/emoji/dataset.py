"""Numbered pictures: (seed, split, resolution, index) always names the same scene, on every machine."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image

from ..resolution import Resolution
from .scene import Scene, Split, render, sample_scene

SPLIT_NUMBERS: dict[Split, int] = {"train": 0, "heldout": 1}


@dataclass(frozen=True, slots=True)
class Numbered:
    """`size` members of one resolution and split. Nothing is stored: each is drawn on demand."""

    resolution: Resolution
    size: int
    split: Split = "train"
    seed: int = 0

    def rng(self, index: int, kind: int = 0) -> np.random.Generator:
        """Return the generator that draws a member. Datasets of another kind (0, 2, ...) draw others.

        Raises IndexError: there are fewer members.
        """
        if not 0 <= index < self.size:
            raise IndexError(f"member {index} of {self.size}")
        width, height = self.resolution
        return np.random.default_rng([self.seed, kind + SPLIT_NUMBERS[self.split], width, height, index])

    def __len__(self) -> int:
        return self.size


@dataclass(frozen=True, slots=True)
class EmojiDataset(Numbered):
    """Pictures."""

    def scene(self, index: int) -> Scene:
        return sample_scene(self.rng(index), self.resolution, self.split)

    def image(self, index: int) -> Image.Image:
        return render(self.scene(index), self.resolution)

    def __iter__(self) -> Iterator[tuple[Scene, Image.Image]]:
        for index in range(self.size):
            scene = self.scene(index)
            yield scene, render(scene, self.resolution)
