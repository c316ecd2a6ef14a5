"""Measurement of both convolution strategies at the start, for every shape (channels, stride, side of a patch)."""

from collections.abc import Sequence
from functools import partial

import torch

from ...kernels.launch import use_triton
from ..core.kept import load_or_measure
from ..core.progress import OnProgress, no_progress
from ..core.stepper import Tuning
from ..core.timing import medians_us
from ..layout.packing import Level
from ..layout.patch_layout import by_size
from .context import Strategy
from .leaves import PatchedConv, PatchedGroupNorm
from .patched_model import PatchedModel
from .strategy import StrategyTable, StrategyTiming

MEASURED_ROWS = (2, 6, 16)
"""Rows of every resolution in the measured batches: one, three and eight guided requests."""
_STRATEGIES: tuple[Strategy, Strategy] = ("stitch", "regroup")


def strategy_table(model: PatchedModel, target: Tuning) -> StrategyTable:
    """Return the table of this model for batches of the target's latent sizes, see `load_or_measure`."""
    circumstances = target.circumstances(model) | {
        "order": model.order,
        "patch_size": model.patch_size,
        "kernels": "triton" if use_triton(model.context.kernels, model.device) else "torch",
    }
    return StrategyTable(
        load_or_measure(
            target.folder,
            "convolutions",
            circumstances,
            StrategyTiming,
            lambda: measure(model, target.sizes, target.on_progress),
        )
    )


@torch.inference_mode()
def measure(
    model: PatchedModel,
    sizes: Sequence[tuple[int, int]],
    on_progress: OnProgress = no_progress,
) -> list[StrategyTiming]:
    """Time both strategies of every convolution shape on batches of all these latent sizes together."""
    distinct = sorted(set(sizes), key=by_size)
    if len(distinct) < 2:
        return []  # one resolution needs no patches
    points: dict[tuple[str, int, int], StrategyTiming] = {}
    choices = [distinct] if len(distinct) == 2 else [distinct, [distinct[0], distinct[-1]]]
    batches = [(chosen, rows) for chosen in choices for rows in MEASURED_ROWS]
    for number, (chosen, rows) in enumerate(batches):
        on_progress("tuning", number, len(batches))
        packing = model.pack([size for size in chosen for _ in range(rows)])
        model.begin(packing)
        for conv, index in model.convolutions:
            level, out_level = packing.levels[index], packing.levels[index + conv.stride - 1]
            key = conv.shape_key(level.side), len(out_level.groups), out_level.num_tokens
            if key not in points:
                points[key] = StrategyTiming(*key, **_time_both(model, conv, level, out_level))
    return list(points.values())


def _time_both(model: PatchedModel, conv: PatchedConv, level: Level, out_level: Level) -> dict[str, float]:
    shape = level.num_patches, level.side, level.side, conv.conv.in_channels
    x = torch.zeros(shape, device=model.device, dtype=model.dtype).permute(0, 3, 1, 2)
    norm = model.swap.norms.get(conv)
    if norm is None or level.neighbours is None:
        runs = {f"{name}_us": partial(conv.run, x, level, out_level, name) for name in _STRATEGIES}
    else:
        # One kernel for norm, SiLU and stitching replaces separate norm and stitching.
        runs = {f"{name}_us": partial(_norm_and_conv, model, norm, conv, x, level, name) for name in _STRATEGIES}
    return medians_us(runs, model.device)


def _norm_and_conv(
    model: PatchedModel, norm: PatchedGroupNorm, conv: PatchedConv, x: torch.Tensor, level: Level, strategy: Strategy
) -> torch.Tensor:
    context = model.context
    choose = context.choose
    context.choose = lambda *_: strategy
    context.begin_pass(level=level)
    try:
        return conv(norm(x))
    finally:
        context.choose = choose
        context.begin_pass()
