"""Small sets of captioned images in the real formats, with emoji scenes as their images."""

import io
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from patchedserve.data.datasets.base import CaptionDataset, CaptionEntry
from patchedserve.data.emoji.dataset import EmojiDataset
from patchedserve.data.resolution import Resolution


@cache
def scene_image(index: int, width: int = 32, height: int = 24) -> Image.Image:
    """Return scene number `index`, drawn small."""
    return EmojiDataset(Resolution(width, height), 1000, "heldout").image(index)


def coco_content(num_images: int = 6, captions_each: int = 3) -> dict[str, Any]:
    """Return the content of a captions_*.json of 2017: ids are 100, 101 and so on, sizes 32x24."""
    ids = range(100, 100 + num_images)
    captions = [
        {"image_id": image_id, "id": 1000 + 10 * image_id + k, "caption": f"Caption {k} of image {image_id}."}
        for k in range(captions_each)
        for image_id in ids
    ]
    return {
        "info": {"description": "COCO 2017 Dataset", "version": "1.0", "year": 2017},
        "licenses": [{"url": "http://example.org/", "id": 1, "name": "none"}],
        "images": [
            {"license": 1, "file_name": f"{i:012d}.jpg", "height": 24, "width": 32, "id": i, "flickr_url": ""}
            for i in ids
        ],
        "annotations": captions,
    }


def write_coco(root: Path, content: Mapping[str, Any] | None = None, split: str = "val2017") -> Path:
    """Write `annotations/captions_SPLIT.json` and the images of its list below `root`, and return `root`."""
    content = coco_content() if content is None else content
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    (root / "annotations" / f"captions_{split}.json").write_text(json.dumps(content))
    images = root / split
    images.mkdir(exist_ok=True)
    for number, record in enumerate(content["images"]):
        scene_image(number).save(images / record["file_name"], quality=95)
    return root


def diffusiondb_rows(part: int, num_images: int = 4) -> list[dict[str, Any]]:
    """Return rows as in metadata.parquet: scores of image k are 0.1 k, the last image is blurred (2.0), and the account
    of every second one was deleted.
    """
    return [
        {
            "image_name": f"{part:08x}-0000-4000-8000-{k:012x}.png",
            "prompt": f"geodesic landscape {k}, part {part}, tadao ando, 4 k, ",
            "part_id": part,
            "seed": 1000 * part + k,
            "step": 50,
            "cfg": 7.0,
            "sampler": 8,
            "width": 32,
            "height": 24,
            "user_name": "deleted_account" if k % 2 else "0123456789abcdef",
            "timestamp": datetime(2022, 8, 11, 9, k, tzinfo=UTC),
            "image_nsfw": 2.0 if k == num_images - 1 else 0.1 * k,
            "prompt_nsfw": 0.01,
        }
        for k in range(num_images)
    ]


METADATA_SCHEMA = pa.schema(
    {
        "image_name": pa.string(),
        "prompt": pa.string(),
        "part_id": pa.uint16(),
        "seed": pa.uint32(),
        "step": pa.uint16(),
        "cfg": pa.float32(),
        "sampler": pa.uint8(),
        "width": pa.uint16(),
        "height": pa.uint16(),
        "user_name": pa.string(),
        "timestamp": pa.timestamp("us", "UTC"),
        "image_nsfw": pa.float32(),
        "prompt_nsfw": pa.float32(),
    }
)


def part_content(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content of a part's JSON file."""
    return {
        row["image_name"]: {"p": row["prompt"], "se": row["seed"], "c": row["cfg"], "st": row["step"], "sa": "k_lms"}
        for row in rows
    }


def write_diffusiondb(root: Path, parts: Sequence[int] = (1, 2), *, below: str = "images") -> Path:
    """Write parts with PNG images and a metadata.parquet that also lists a part which is not on disk."""
    for part in parts:
        folder = root / below / f"part-{part:06d}"
        folder.mkdir(parents=True)
        rows = diffusiondb_rows(part)
        (folder / f"part-{part:06d}.json").write_text(json.dumps(part_content(rows), indent=1))
        for number, row in enumerate(rows):
            scene_image(number).save(folder / row["image_name"])
    listed = [row for part in (*parts, max(parts) + 1) for row in diffusiondb_rows(part)]
    pq.write_table(pa.Table.from_pylist(listed, METADATA_SCHEMA), root / "metadata.parquet")
    return root


def encoded(image: Image.Image, image_format: str = "PNG", **options: Any) -> bytes:
    """Return the bytes of an image file."""
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def by_id(dataset: CaptionDataset) -> dict[str, CaptionEntry]:
    entries = list(dataset.entries())
    found = {entry.id: entry for entry in entries}
    assert len(found) == len(entries)
    return found


def problems(dataset: CaptionDataset) -> dict[str, str]:
    return {entry.id: entry.problem for entry in dataset.entries() if entry.problem is not None}


def location_of(entry: CaptionEntry) -> str:
    assert entry.location is not None
    return entry.location


def assert_shows(dataset: CaptionDataset, entry: CaptionEntry, scene: int) -> None:
    """Check that the entry's image is the scene, exactly or as a JPEG."""
    location = location_of(entry)
    image = dataset.open_image(location)
    assert image.mode == "RGB"
    assert image.size == (32, 24)
    difference = np.abs(np.asarray(image).astype(int) - np.asarray(scene_image(scene)).astype(int)).mean()
    assert difference < (8 if dataset.content(location).startswith(b"\xff\xd8") else 0.001)


def one_line(error: pytest.ExceptionInfo[Any]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)
