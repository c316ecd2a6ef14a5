"""Images of two servers for the same requests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...data.errors import RunError
from ...data.figures import read_figures, write_figures
from ...data.files import write_json
from ...serving.core.request_state import RequestRecord
from ..measurer import Measurer
from ..metrics.judges import Judges
from ..sets.generate import MANIFEST_FILE, ImageItem, Manifest
from .run import compare

METRICS = ("psnr", "ssim")
"""Distances that need no network."""


def add_images(summary: dict[str, Any], pairs: Sequence[tuple[RequestRecord, RequestRecord]]) -> list[str]:
    """Compare the images of two servers in pairs, add the result to that of their loads, and return warnings.

    The figures are `psnr` and `ssim` of the second server's images to the first's; `per_image` has the values of single
    images. Images that are damaged or have another size than their partner are omitted with a warning. Both folders of
    images receive a manifest, so that `psctl eval compare` reads them, too.

    Args:
        summary: result of `profiling.http.against.two_servers`.
        pairs: records of the requests that both servers have completed.

    Raises:
        RunError: a server has returned no image.
        UsageError: no pair of images can be compared.
    """
    servers = [str(each) for each in summary["servers"].values()]
    paths = [[record.image_path for record in side] for side in zip(*pairs, strict=True)]
    for server, own in zip(servers, paths, strict=True):
        if None in own:
            raise RunError(f"{server} answers without images, so there are none to compare")
    items = tuple(
        ImageItem(
            str(one.request_id), Path(str(path)).name, one.prompt, one.seed, one.resolution.width, one.resolution.height
        )
        for (one, _), path in zip(pairs, paths[0], strict=True)
    )
    folders = [Path(str(own[0])).parent for own in paths]
    for server, folder in zip(servers, folders, strict=True):
        write_json(folder / MANIFEST_FILE, Manifest(items, {"server": server}).to_json())
    first, second = folders
    found = compare(first, second, METRICS, Measurer(Judges(), max_bad=len(items)))
    write_figures(summary, read_figures(summary, first) | found.figures())
    summary["per_image"] = found.per_image
    return found.warnings
