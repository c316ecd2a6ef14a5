"""Summary and plot of a block profile: how many patches change little between steps (PatchedServe figure 4)."""

from pathlib import Path
from typing import Any

import numpy as np

from ...data.parsing import parse
from ...data.tables.block_facts import BlockFacts
from ...data.tables.schemas import BLOCKS
from ...data.tables.streams import read_batches, read_facts
from .theme import add_wide_legend, new_figure, series_colours, style_axes, to_png

WHOLE_THRESHOLD = 0.1
"""Threshold for the change of whole blocks, as in figure 4 of the paper."""
THRESHOLDS = tuple(float(f"{value:.3g}") for value in np.geomspace(1e-4, 1.0, 41))
TABLE_THRESHOLD = 0.01


def summarize_block_changes(table: Path) -> dict[str, Any]:
    """Return shares of a profile's rows of lag 1, by resolution and by block. The table is read in pieces.

    Returns:
        `thresholds`, `by_resolution` (resolution -> share below each threshold), `by_block` (resolution -> block ->
        share below `table_threshold`), `blocks`, `num_rows` and `whole_blocks`. As in the paper, `whole_blocks` is the
        share of blocks (of one request and step) whose mean change over their patches is below `threshold`, by
        resolution, for the mean squared error (`mse`) and for the error `relative` to the mean square. Its `by_request`
        holds the shares of single requests, in their order.

    Raises:
        UsageError: the table is damaged.
    """
    facts = parse(BlockFacts, read_facts(table, BLOCKS), str(table))
    below: dict[str, np.ndarray] = {}
    counts: dict[str, np.ndarray] = {}
    num_rows = 0
    columns = ("width", "height", "block_index", "lag", "output_mse_normalised", "output_mse", "request_id", "step")
    sums: dict[str, list[np.ndarray]] = {}
    for batch in read_batches(table, BLOCKS, columns):
        num_rows += batch.num_rows
        width, height, block, lag, change, mse, request, step = (batch.column(name).to_numpy() for name in columns)
        for pair in np.unique(np.stack([width, height]), axis=1).T:
            chosen = (width == pair[0]) & (height == pair[1]) & (lag == 1) & (block < len(facts.blocks))
            name = f"{pair[0]}x{pair[1]}"
            below.setdefault(name, np.zeros((len(facts.blocks), len(THRESHOLDS))))
            counts.setdefault(name, np.zeros(len(facts.blocks)))
            np.add.at(below[name], block[chosen], change[chosen, None] < np.array(THRESHOLDS))
            np.add.at(counts[name], block[chosen], 1)
            wholes = np.stack([request[chosen], step[chosen], block[chosen]])
            sums.setdefault(name, []).append(
                _summed(wholes, np.stack([np.ones(chosen.sum()), mse[chosen], change[chosen]]))
            )
    names = sorted(below, key=lambda name: int(np.prod([int(side) for side in name.split("x")])))
    means = {name: _mean_of_blocks(np.concatenate(sums[name], 1)) for name in names}
    whole: dict[str, dict[str, float]] = {}
    by_request: dict[str, dict[str, list[float]]] = {}
    for place, kind in enumerate(("mse", "relative")):
        is_below = {name: (request, changes[place] < WHOLE_THRESHOLD) for name, (request, changes) in means.items()}
        whole[kind] = {name: float(below.mean()) for name, (_, below) in is_below.items()}
        by_request[kind] = {
            name: [float(below[request == each].mean()) for each in np.unique(request)]
            for name, (request, below) in is_below.items()
        }
    place = int(np.argmin(np.abs(np.array(THRESHOLDS) - TABLE_THRESHOLD)))
    return {
        "thresholds": list(THRESHOLDS),
        "table_threshold": THRESHOLDS[place],
        "blocks": list(facts.blocks),
        "num_rows": num_rows,
        "whole_blocks": {"threshold": WHOLE_THRESHOLD, "shares": whole, "by_request": by_request},
        "by_resolution": {name: (below[name].sum(0) / counts[name].sum()).tolist() for name in names},
        "by_block": {
            name: dict(zip(facts.blocks, (below[name][:, place] / counts[name]).tolist(), strict=True))
            for name in names
        },
    }


def _summed(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Sum the values (k, n) of equal keys (3, n). Returns (3 + k, groups), the keys above the sums."""
    groups, place = np.unique(keys, axis=1, return_inverse=True)
    return np.concatenate([groups, [np.bincount(place.ravel(), row, groups.shape[1]) for row in values]])


def _mean_of_blocks(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return requests (n,) and changes (2, n) of the blocks of all requests and steps, from the sums of the table's
    pieces that `_summed` returned.
    """
    request, _, _, count, *changes = _summed(sums[:3], sums[3:])
    return request, np.stack(changes) / count


def plot_block_changes(result: dict[str, Any]) -> bytes:
    """Plot the summary as a PNG: shares by threshold, and by block at one threshold."""
    figure = new_figure(10.5, 4.0)
    left, right = figure.subplots(1, 2, width_ratios=(5, 6))
    colours = series_colours(list(result["by_resolution"]))
    for name, shares in result["by_resolution"].items():
        left.plot(result["thresholds"], shares, label=name, color=colours[name])
    style_axes(
        left,
        "Patches that hardly change in a step",
        "threshold of the relative mean squared change (log scale)",
        "share below it, all blocks",
        grid_axis="both",
    )
    left.set_xscale("log")
    left.set_ylim(0, 1)
    add_wide_legend(figure, left)
    width = 0.8 / len(result["by_block"])
    for index, (name, shares) in enumerate(result["by_block"].items()):
        places = np.arange(len(shares)) + (index - (len(result["by_block"]) - 1) / 2) * width
        right.bar(places, list(shares.values()), width * 0.92, color=colours[name])
    title = f"The same by block, at {result['table_threshold']:g}"
    style_axes(right, title, "block, in the order of a step")
    right.set_xticks(np.arange(len(result["blocks"])), result["blocks"], rotation=30, ha="right")
    right.set_ylim(0, 1)
    return to_png(figure)
