"""Choice of the convolution strategy of a layer: the faster one in the measured batch most like the present one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..layout.packing import Level
from .context import Strategy
from .leaves import PatchedConv

_MAX_CHOSEN = 4096
"""Most choices that are cached; the number of tokens differs between mixes of sizes."""


@dataclass(frozen=True, slots=True)
class StrategyTiming:
    """Times of a convolution of a shape in one batch.

    Attributes:
        shape: shape of the convolution, see `PatchedConv.shape_key`.
        resolutions, tokens: number of resolutions and of output tokens of the batch.
        stitch_us, regroup_us: median times in microseconds.
    """

    shape: str
    resolutions: int
    tokens: int
    stitch_us: float
    regroup_us: float

    def distance(self, resolutions: int, tokens: int) -> float:
        """Return the distance of another batch: 1 for every doubling of tokens or of resolutions."""
        return abs(math.log2(tokens / self.tokens)) + abs(math.log2(resolutions / self.resolutions))


@dataclass(slots=True)
class StrategyTable:
    """Measured times of convolutions. Shapes that were not measured use `regroup`."""

    points: Sequence[StrategyTiming] = ()
    _chosen: dict[tuple[str, int, int], Strategy] = field(default_factory=dict)

    def choose(self, conv: PatchedConv, level: Level, out_level: Level) -> Strategy:
        """Return the strategy for a convolution from one level to another."""
        key = shape, *batch = (conv.shape_key(level.side), len(out_level.groups), out_level.num_tokens)
        if key not in self._chosen:
            points = [point for point in self.points if point.shape == shape]
            nearest = min(points, key=lambda point: point.distance(*batch), default=None)
            is_stitched = nearest is not None and nearest.stitch_us < nearest.regroup_us
            if len(self._chosen) >= _MAX_CHOSEN:
                self._chosen.clear()
            self._chosen[key] = "stitch" if is_stitched else "regroup"
        return self._chosen[key]
