"""A small case for the Triton kernels; run as a module, it is the worker process of their test."""

import sys
from pathlib import Path

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor

from .patched_models import Row, Way, draw_rows, run_patched
from .random_models import small_unet


def triton_case() -> tuple[UNet2DConditionModel, list[Row]]:
    """Return a model and a batch of two resolutions, small enough for Triton's interpreter."""
    model = small_unet(seed=5)
    return model, draw_rows(model, [(8, 4), (8, 8), (4, 8)], seed=5)


def run_triton_case() -> list[Tensor]:
    """Run `triton_case` with the Triton kernels, which must run in the interpreter."""
    model, rows = triton_case()
    return run_patched(Way("patch", None, "stitch").build(model, kernels="triton"), rows)


def main() -> None:
    """Write the results of `triton_case` to a file. TRITON_INTERPRET=1 must be set before diffusers imports triton."""
    torch.save(run_triton_case(), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
