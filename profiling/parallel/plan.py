"""Plan of a count: which model, for which images, on how many devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...data.errors import UsageError
from ...data.models.published import PUBLISHED, published_config
from ...data.resolution import RESOLUTION_MULTIPLE, Resolution
from ...serving.models.defaults import read_json
from ...serving.models.loading import resolve_model
from ...serving.parallel.cost import Call, Cost
from ...serving.parallel.latency_model import Link
from ...serving.parallel.strips import Strips

TEXT_LENGTH: Mapping[str, int] = {"UNet2DConditionModel": 77, "SD3Transformer2DModel": 77 + 256}
"""Number of text tokens by class of the model: those of CLIP, followed by those of T5 where the model has it."""


def read_config(spec: str) -> dict[str, Any]:
    """Return the configuration that a user names: one of `PUBLISHED`, a JSON file, or a model that `resolve_model`
    finds.

    Raises:
        UsageError: the name is none of these.
        RunError: the file is damaged.
    """
    if spec in PUBLISHED:
        return published_config(spec)
    path = Path(spec).expanduser()
    if path.is_file():
        return read_json(path)
    try:
        folder = resolve_model(spec)
    except UsageError as error:
        raise UsageError(f"--config {spec} is none of {', '.join(PUBLISHED)}, and no model either: {error}") from None
    found = [file for name in ("unet", "transformer") if (file := folder / name / "config.json").is_file()]
    if not found:
        raise UsageError(f"--config {spec}: neither unet/config.json nor transformer/config.json is in {folder}")
    return read_json(found[0])


@dataclass(frozen=True, slots=True)
class AccountingPlan:
    """Model, images and numbers of devices to count.

    Attributes:
        cost: cost of the model.
        text_length: number of text tokens.
        resolutions: resolutions of the images.
        num_ranks: numbers of devices, each more than one.
        link: link between devices.
        is_paper_model: whether DistriFusion's figures are of this model.
    """

    cost: Cost
    text_length: int
    resolutions: Sequence[Resolution]
    num_ranks: Sequence[int]
    link: Link
    is_paper_model: bool

    def __post_init__(self) -> None:
        for resolution in self.resolutions:
            try:
                self.strips(resolution, max(self.num_ranks, default=1))
            except UsageError as error:
                raise UsageError(f"resolution {resolution}: {error}") from None

    def call(self, resolution: Resolution, *, rows: int = 2) -> Call:
        """Return the call for an image; with guidance it has two rows."""
        width, height = (side // RESOLUTION_MULTIPLE for side in resolution)
        return Call(height, width, self.text_length, rows)

    def strips(self, resolution: Resolution, count: int) -> Strips:
        """Return `count` even strips of an image."""
        return Strips.of(self.call(resolution).height, self.cost.levels.unit, (1.0,) * count)

    def naive(self, resolution: Resolution, count: int) -> list[Call]:
        """Return the calls of devices that each draw their strip as a separate image."""
        whole = self.call(resolution)
        return [Call(height, whole.width, whole.text_length) for height in self.strips(resolution, count).heights(1)]

    def calls(self) -> list[Call]:
        """Return all distinct calls: of whole images, and of strips as separate images."""
        every = (self.naive(size, count) for size in self.resolutions for count in (1, *self.num_ranks))
        return list(dict.fromkeys(call for calls in every for call in calls))
