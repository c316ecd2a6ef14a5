"""Invariants of a patch layout."""

import numpy as np

from patchedserve.serving.layout.patch_layout import DIRECTIONS, Integers, PatchLayout, by_size


def check_layout(layout: PatchLayout) -> None:
    """Check the invariants that readers of a layout rely on, independently of how `build` computes it.

    Raises:
        RuntimeError: the layout is inconsistent; the message says where.
    """
    requests = np.arange(len(layout.order))
    patches = np.arange(layout.num_patches)
    request_resolution = np.repeat(np.arange(len(layout.resolutions)), np.diff(layout.resolution_offset))
    _require(np.array_equal(np.sort(layout.order), requests), "order is not a permutation of the requests")
    _require(layout.resolutions == tuple(sorted(set(layout.resolutions), key=by_size)), "resolutions are not sorted")
    for name, offset, end in (
        ("resolution_offset", layout.resolution_offset, len(layout.order)),
        ("resolution_patch_offset", layout.resolution_patch_offset, layout.num_patches),
        ("request_offset", layout.request_offset, layout.num_patches),
    ):
        is_rising = offset[0] == 0 and offset[-1] == end and bool((np.diff(offset) > 0).all())
        _require(is_rising, f"{name} does not rise from 0 to {end}")
    sizes = np.array(layout.resolutions)[request_resolution]
    _require(np.array_equal(layout.grid * layout.patch_size, sizes), "grid and patch_size do not make the resolutions")
    _require(
        np.array_equal(np.diff(layout.request_offset), layout.grid.prod(axis=1)), "request_offset contradicts grid"
    )
    _require(
        np.array_equal(layout.request_offset[layout.resolution_offset], layout.resolution_patch_offset),
        "resolution_patch_offset contradicts request_offset",
    )
    found = np.searchsorted(layout.request_offset, patches, side="right") - 1
    _require(np.array_equal(layout.request_index, found), "request_index contradicts request_offset")
    rows, cols = layout.grid[layout.request_index].T
    is_in_grid = (layout.row >= 0) & (layout.row < rows) & (layout.col >= 0) & (layout.col < cols)
    _require(bool(is_in_grid.all()), "a patch lies outside the grid of its request")
    place = layout.request_offset[layout.request_index] + layout.row * cols + layout.col
    _require(np.array_equal(place, patches), "row and col contradict the order of the patches")
    _check_neighbours(layout, rows, cols)


def _check_neighbours(layout: PatchLayout, rows: Integers, cols: Integers) -> None:
    up, west = layout.row == 0, layout.col == 0
    low, east = layout.row == rows - 1, layout.col == cols - 1
    is_edge = np.stack([up | west, up, up | east, west, east, low | west, low, low | east], axis=1)
    is_right = np.where(is_edge, layout.neighbours == -1, layout.neighbours >= 0)
    _require(bool(is_right.all()), "neighbours is not -1 exactly at the image edge")
    _require(bool((layout.neighbours < layout.num_patches).all()), "neighbours names a patch that is not there")
    here, k = np.nonzero(~is_edge)
    down, right = np.array(DIRECTIONS).T
    there = layout.neighbours[here, k]
    _require(
        np.array_equal(layout.neighbours[there, 7 - k], here)
        and np.array_equal(layout.request_index[there], layout.request_index[here])
        and np.array_equal(layout.row[there], layout.row[here] + down[k])
        and np.array_equal(layout.col[there], layout.col[here] + right[k]),
        "neighbours names a patch that does not lie there",
    )


def _require(is_true: bool, otherwise: str) -> None:
    if not is_true:
        raise RuntimeError(f"patch layout is broken: {otherwise}")
