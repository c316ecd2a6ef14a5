"""How images of a set are gathered for the feature network."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from patchedserve.data.datasets.folders import open_folder
from patchedserve.eval.features import batches_by_size, features_of


def _numbered(count: int, sizes: tuple[tuple[int, int], ...]) -> list[np.ndarray]:
    """Images that are filled with their number; sizes (height, width) in turn."""
    return [np.full((*sizes[i % len(sizes)], 3), i, np.uint8) for i in range(count)]


@pytest.mark.parametrize(("count", "sizes"), [(23, ((4, 4), (4, 6), (8, 2))), (9, ((4, 4),)), (0, ((4, 4),))])
def test_sizes_in_turn_make_full_batches(count: int, sizes: tuple[tuple[int, int], ...]) -> None:
    found = list(batches_by_size(_numbered(count, sizes), batch_size=4))
    assert sorted(place for places, _ in found for place in places) == list(range(count))
    for places, batch in found:
        assert (batch.amin((1, 2, 3)).tolist(), batch.amax((1, 2, 3)).tolist()) == (places, places)
        assert (batch.dtype, batch.shape[1]) == (torch.uint8, 3)
    # All but the last of each size are full.
    assert sum(len(places) < 4 for places, _ in found) <= len(sizes)


def test_many_sizes_do_not_pile_up() -> None:
    taken = 0

    def read() -> Iterator[np.ndarray]:
        nonlocal taken
        for i in range(100):
            taken += 1
            yield np.zeros((4, 4 + i, 3), np.uint8)

    given = 0
    for places, _ in batches_by_size(read(), batch_size=4):
        assert taken - given <= 16
        given += len(places)
    assert given == 100


class _Means(nn.Module):
    """A feature network that can be followed by hand, and that counts its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.counts.append(len(images))
        return images.float().mean((2, 3))


def test_features_come_in_the_order_of_the_images(tmp_path: Path) -> None:
    for i, image in enumerate(_numbered(40, ((8, 8), (8, 12), (12, 8)))):
        Image.fromarray(image).save(tmp_path / f"{i:03}.png")
    network = _Means()
    features = features_of(open_folder(tmp_path), network, "none", batch_size=8)
    assert features[:, 0].tolist() == list(range(40))
    assert sorted(network.counts) == [5, 5, 6, 8, 8, 8]
