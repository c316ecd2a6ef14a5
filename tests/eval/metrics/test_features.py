"""Grouping of a set's images for the feature network."""

import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from patchedserve.data.datasets.folders import open_folder
from patchedserve.data.datasets.registry import open_dataset
from patchedserve.data.datasets.sampling import Sample, sample_pairs
from patchedserve.eval.measurer import Measurer
from patchedserve.eval.metrics.features import features_of
from patchedserve.eval.metrics.images import batches_by_size
from patchedserve.eval.metrics.judges import Judges
from patchedserve.eval.metrics.psnr import psnr
from patchedserve.eval.metrics.ssim import ssim
from patchedserve.eval.sets.image_sets import MappedImages

from ...support.eval_cases import Means, numbered_images


@pytest.mark.parametrize(("count", "sizes"), [(23, ((4, 4), (4, 6), (8, 2))), (9, ((4, 4),)), (0, ((4, 4),))])
def test_alternating_sizes_fill_batches(count: int, sizes: tuple[tuple[int, int], ...]) -> None:
    found = list(batches_by_size(enumerate(numbered_images(count, sizes)), batch_size=4))
    assert sorted(place for places, _ in found for place in places) == list(range(count))
    for places, batch in found:
        assert (batch.amin((1, 2, 3)).tolist(), batch.amax((1, 2, 3)).tolist()) == (places, places)
        assert (batch.dtype, batch.shape[1]) == (torch.uint8, 3)
    # All batches except the last of each size are full.
    assert sum(len(places) < 4 for places, _ in found) <= len(sizes)


def test_many_sizes_keep_buffers_bounded() -> None:
    taken = 0

    def read() -> Iterator[np.ndarray]:
        nonlocal taken
        for i in range(100):
            taken += 1
            yield np.zeros((4, 4 + i, 3), np.uint8)

    given = 0
    for places, _ in batches_by_size(enumerate(read()), batch_size=4):
        assert taken - given <= 16
        given += len(places)
    assert given == 100


def test_features_keep_image_order(tmp_path: Path) -> None:
    for i, image in enumerate(numbered_images(40, ((8, 8), (8, 12), (12, 8)))):
        Image.fromarray(image).save(tmp_path / f"{i:03}.png")
    network = Means()
    features = features_of(open_folder(tmp_path), network, "none", batch_size=8)
    assert features[:, 0].tolist() == list(range(40))
    assert sorted(network.counts) == [5, 5, 6, 8, 8, 8]


def test_table_is_read_in_one_pass_and_features_keep_sample_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers = [io.BytesIO() for _ in range(90)]
    for buffer, image in zip(buffers, numbered_images(90, ((16, 16), (16, 24), (24, 16))), strict=True):
        Image.fromarray(image).save(buffer, "png")
    content = {"id": [f"{i}" for i in range(90)], "text": [f"picture {i}" for i in range(90)]}
    content["image"] = [buffer.getvalue() for buffer in buffers]  # type: ignore[assignment]
    pq.write_table(pa.table(content), tmp_path / "x.parquet", row_group_size=45)
    sample = sample_pairs(open_dataset(f"parquet:{tmp_path}"), 90)
    assert list(sample.ids) != list(sample.reading_order)
    started: list[int] = []
    original = pq.ParquetFile.iter_batches

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        started.extend(kwargs["row_groups"])
        return original(self, *args, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counting)
    features = features_of(sample, Means(), "none", batch_size=8, workers=1)
    assert features[:, 0].tolist() == [float(image_id) for image_id in sample.ids]
    assert started == [0, 1]
    # The same holds for pairs, whose values are in the order of the sample.
    started.clear()
    _, values, _ = Measurer(Judges()).pairs(("psnr",), _brighter(sample), sample)
    assert list(values["psnr"]) == list(sample.ids)
    assert values["psnr"]["7"] == pytest.approx(20 * math.log10(255 / 3))
    # Two threads may overtake each other within a batch of rows without starting the file again.
    assert started == [0, 1]


def _brighter(sample: Sample) -> MappedImages:
    """Return the images of a sample, each three levels brighter."""
    return MappedImages(
        "brighter",
        sample.ids,
        sample.ids,
        lambda image_id: sample.open_image(image_id).point(lambda level: level + 3),
        sample.content,
    )


def test_pairs_of_alternating_sizes_are_measured_in_full_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, level in (("a", 0), ("b", 5)):
        (tmp_path / folder).mkdir()
        for i, image in enumerate(numbered_images(40, ((16, 16), (16, 24)))):
            Image.fromarray(image + np.uint8(level)).save(tmp_path / folder / f"{i:03}.png")
    counts: list[int] = []

    def counting(images: torch.Tensor, references: torch.Tensor) -> torch.Tensor:
        counts.append(len(images))
        return ssim(images, references)

    monkeypatch.setattr("patchedserve.eval.metrics.measure.ssim", counting)
    one, other = (open_folder(tmp_path / name) for name in "ab")
    _, values, _ = Measurer(Judges()).pairs(("ssim", "psnr"), one, other)
    assert sorted(counts) == [4, 4, 16, 16]
    assert list(values["ssim"]) == list(one.ids)
    for name in one.ids:
        assert values["psnr"][name] == psnr(one.open_image(name), other.open_image(name))
