"""Sets of text-image pairs that tests draw samples from."""

import json
from pathlib import Path
from typing import Any

from patchedserve.data.datasets.base import CaptionDataset
from patchedserve.data.datasets.registry import open_dataset

from .caption_sets import coco_content, write_coco


def twenty_of_coco(root: Path) -> CaptionDataset:
    """Write a data set in COCO's format with 20 images."""
    return open_dataset(f"coco:{write_coco(root, coco_content(20))}")


def captions_file(path: Path, count: int = 30) -> CaptionDataset:
    """Write a data set of captions only."""
    path.write_text("".join(json.dumps({"id": i, "caption": f"caption {i}"}) + "\n" for i in range(count)))
    return open_dataset(f"captions:{path}")


def coco_path(dataset: Any, image_id: str) -> Path:
    """Return the file of an image of `twenty_of_coco`."""
    return dataset.root / f"{int(image_id):012d}.jpg"
