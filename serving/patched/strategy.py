"""Which way of convolving a layer uses: measured at start, not guessed.

Every convolution of a shape (channels, stride, side of a patch) is timed both ways on mixed batches of a few sizes. A
batch that comes later uses what won in the measured batch that is most like it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...kernels.launch import use_triton
from ..core.timing import medians_us
from ..layout.patch_layout import by_size
from . import kept

if TYPE_CHECKING:
    from ..layout.packing import Level
    from .leaves import PatchedConv, PatchedGroupNorm, Strategy
    from .patched_model import PatchedModel

MEASURED_ROWS = (2, 6, 16)
"""Rows of every resolution in the batches that are measured: one, three and eight guided requests."""


@dataclass(frozen=True, slots=True)
class Point:
    """One convolution shape in one batch: how many resolutions and output tokens, and the two times in us."""

    groups: int
    tokens: int
    stitch_us: float
    regroup_us: float

    def distance(self, groups: int, tokens: int) -> float:
        """How unlike another batch is: one for every doubling of tokens or of resolutions."""
        return abs(math.log2(tokens / self.tokens)) + abs(math.log2(groups / self.groups))


@dataclass(slots=True)
class StrategyTable:
    """What was measured, by shape. What was not measured regroups."""

    points: dict[str, list[Point]] = field(default_factory=dict)
    _chosen: dict[tuple[str, int, int], "Strategy"] = field(default_factory=dict)

    def choose(self, conv: "PatchedConv", level: "Level", out_level: "Level") -> "Strategy":
        """Return the strategy for a convolution from one level to another."""
        key = (conv.shape_key(level.side), len(out_level.groups), out_level.num_tokens)
        chosen = self._chosen.get(key)
        if chosen is None:
            chosen = self._chosen[key] = self._look_up(*key)
        return chosen

    def _look_up(self, shape: str, groups: int, tokens: int) -> "Strategy":
        points = self.points.get(shape)
        if not points:
            return "regroup"
        nearest = min(points, key=lambda point: point.distance(groups, tokens))
        return "stitch" if nearest.stitch_us < nearest.regroup_us else "regroup"

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                "shape": shape,
                "resolutions": point.groups,
                "tokens": point.tokens,
                "stitch_us": round(point.stitch_us, 1),
                "regroup_us": round(point.regroup_us, 1),
            }
            for shape, points in sorted(self.points.items())
            for point in points
        ]

    @classmethod
    def from_json(cls, rows: list[dict[str, Any]]) -> "StrategyTable":
        table = cls()
        for row in rows:
            point = Point(row["resolutions"], row["tokens"], row["stitch_us"], row["regroup_us"])
            table.points.setdefault(row["shape"], []).append(point)
        return table


def strategy_table(
    model: "PatchedModel", sizes: Sequence[tuple[int, int]], folder: Path, *, fingerprint: str
) -> StrategyTable:
    """The table of this model for batches of these latent sizes, from `folder` if it was measured there before.

    Args:
        model: what will run; its choice of strategy is not changed.
        sizes: (height, width) of the latents of the served resolutions.
        folder: where tables are kept, one JSON file for each set of circumstances.
        fingerprint: of the model's files.

    Raises:
        RunError: if the table's file is damaged.
    """
    context = circumstances_of(model, sizes, fingerprint)
    return kept.load_or_measure(
        folder, "convolutions", context, lambda: measure(model, sizes).to_json(), StrategyTable.from_json
    )


def circumstances_of(model: "PatchedModel", sizes: Sequence[tuple[int, int]], fingerprint: str) -> dict[str, Any]:
    """What the times of a model's operators depend on."""
    return {
        "fingerprint": fingerprint,
        "sizes": sorted([list(size) for size in set(sizes)]),
        "order": model.order,
        "patch_size": model.patch_size,
        "kernels": "triton" if use_triton(model.context.kernels, model.device) else "torch",
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


@torch.inference_mode()
def measure(model: "PatchedModel", sizes: Sequence[tuple[int, int]]) -> StrategyTable:
    """Time both strategies of every convolution shape on batches of all these latent sizes together."""
    distinct = sorted(set(sizes), key=by_size)
    table = StrategyTable()
    if len(distinct) < 2:
        return table  # one resolution needs no patches
    choices = [distinct] if len(distinct) == 2 else [distinct, [distinct[0], distinct[-1]]]
    for chosen in choices:
        for rows in MEASURED_ROWS:
            packing = model.pack([size for size in chosen for _ in range(rows)])
            model.begin(packing)
            for conv, index in model.convolutions:
                level, out_level = packing.levels[index], packing.levels[index + conv.stride - 1]
                shape = conv.shape_key(level.side)
                points = table.points.setdefault(shape, [])
                groups, tokens = len(out_level.groups), out_level.num_tokens
                if any((point.groups, point.tokens) == (groups, tokens) for point in points):
                    continue
                points.append(Point(groups, tokens, *_time_both(model, conv, level, out_level)))
    return table


def _time_both(model: "PatchedModel", conv: "PatchedConv", level: "Level", out_level: "Level") -> tuple[float, float]:
    x = torch.zeros(
        level.num_patches, level.side, level.side, conv.conv.in_channels, device=model.device, dtype=model.dtype
    ).permute(0, 3, 1, 2)
    norm = model.swap.norms.get(conv)
    if norm is None or level.neighbours is None:
        runs = {name: partial(conv.run, x, level, out_level, name) for name in ("stitch", "regroup")}
    else:
        # The kernel of norm, SiLU and stitching takes the place of a norm and of stitching by itself.
        runs = {name: partial(_norm_and_conv, model, norm, conv, x, level, name) for name in ("stitch", "regroup")}
    times = medians_us(runs, model.device)
    return times["stitch"], times["regroup"]


def _norm_and_conv(
    model: "PatchedModel", norm: "PatchedGroupNorm", conv: "PatchedConv", x: torch.Tensor, level: "Level", name: str
) -> torch.Tensor:
    context = model.context
    choose, context.choose, context.level = context.choose, lambda *_: name, level  # type: ignore[assignment,return-value]
    try:
        return conv(norm(x))
    finally:
        context.choose, context.level, context.is_activated, context.is_padded = choose, None, False, False
