"""Published mixes of sizes and steps, and the fitting of their sizes to those of a model. No torch."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..resolution import Resolution


@dataclass(frozen=True, slots=True)
class Workload:
    """A mix of requests.

    Attributes:
        sizes: sizes of images in pixels.
        steps: number of denoising steps of the requests of each size.
        weights: share of the requests of each size.
        native: the size that models of this workload were trained for.
    """

    sizes: tuple[Resolution, ...]
    steps: tuple[int, ...]
    weights: tuple[float, ...]
    native: Resolution

    def sizes_on(self, served: Sequence[Resolution], own: Resolution) -> tuple[Resolution, ...]:
        """Return the size to serve for each of `sizes`: the same if all are served, else as `fit_sizes` maps them."""
        if {*self.sizes} <= {*served}:
            return self.sizes
        fitted = fit_sizes(self.sizes, served, own, self.native)
        return tuple(fitted[size] for size in self.sizes)


DATASET_C = Workload(
    tuple(Resolution(side, side) for side in (512, 768, 1024, 1536)),
    (20, 20, 25, 35),
    (0.15, 0.25, 0.45, 0.15),
    Resolution(1024, 1024),
)
"""Dataset C of vllm-omni's benchmarks of diffusion models (`benchmarks/diffusion/performance_dashboard`)."""

DIFFUSIONDB_NATIVE = Resolution(512, 512)
"""Size that the models of DiffusionDB (Stable Diffusion 1.x) were trained for."""


def fit_sizes(
    sizes: Iterable[Resolution], served: Sequence[Resolution], own: Resolution, native: Resolution
) -> dict[Resolution, Resolution]:
    """Map the sizes of a workload to served ones.

    Each is scaled by the ratio of the sides of `own` and `native`, and becomes the served size of the nearest aspect
    ratio and area: the one with the smallest sum of |ln(aspect ratio / aspect ratio)| and |ln(area / area)|, the
    smaller one of two that are equally near.

    Args:
        sizes: sizes of the workload.
        served: sizes that are served, at least one.
        own: size that the served model was trained for.
        native: size that models of the workload were trained for.

    Returns:
        The served size for each of `sizes`.
    """
    log_scale = math.log(own.pixels / native.pixels)

    def distance(size: Resolution, other: Resolution) -> float:
        aspect = math.log(size.width / size.height) - math.log(other.width / other.height)
        return abs(aspect) + abs(math.log(size.pixels) + log_scale - math.log(other.pixels))

    ranked = sorted(served, key=lambda each: each.pixels)
    return {size: min(ranked, key=lambda other: distance(size, other)) for size in sizes}
