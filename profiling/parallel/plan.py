"""What is counted: which model, for which images, on how many devices."""

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
"""Tokens of the text, by class of the model: CLIP's, and T5's behind them."""


def read_config(spec: str) -> dict[str, Any]:
    """The configuration that a user names: one of `PUBLISHED`, a JSON file, or a model as `resolve_model` finds it.

    Raises:
        UsageError: there is no such thing.
        RunError: it is damaged.
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
class Plan:
    """What is counted.

    Attributes:
        cost: of the model.
        text_length: tokens of the text.
        resolutions: of images.
        num_ranks: numbers of devices, more than one.
        link: between devices.
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
        """A call for an image; with guidance it has two rows."""
        width, height = (side // RESOLUTION_MULTIPLE for side in resolution)
        return Call(height, width, self.text_length, rows)

    def strips(self, resolution: Resolution, count: int) -> Strips:
        """Even ones."""
        return Strips.of(self.call(resolution).height, self.cost.levels.unit, (1.0,) * count)

    def naive(self, resolution: Resolution, count: int) -> list[Call]:
        """Calls of devices of which each draws its strip as an image of its own."""
        whole = self.call(resolution)
        return [Call(height, whole.width, whole.text_length) for height in self.strips(resolution, count).heights(1)]

    def calls(self) -> list[Call]:
        """All different ones: of whole images, and of strips as images of their own."""
        every = (self.naive(size, count) for size in self.resolutions for count in (1, *self.num_ranks))
        return list(dict.fromkeys(call for calls in every for call in calls))
