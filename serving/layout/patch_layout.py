"""The patch layout: the position of every patch of a batch of mixed resolutions (PatchedServe section 4.1).

This is the paper's Offset Based Compression. Requests are sorted by resolution and their patches are stored one after
the other, row by row. Offsets mark where each request and each resolution begins; tables hold the request and the
neighbours of every patch. Nothing here depends on the level of the U-Net: down-sampling only shortens the side of a
patch. No torch.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ...data.errors import UsageError

Integers = NDArray[np.int64]
Size = tuple[int, int]
"""Height and width."""
References = tuple[Size, ...]
"""Sizes of the references of a request, images that the model sees beside the one that it draws."""

DIRECTIONS = ((-1, -1), (-1, 0), (-1, 1), (0, -1), (0, 1), (1, -1), (1, 0), (1, 1))
"""(rows down, columns right) of the eight neighbours, in the order of their column in `PatchLayout.neighbours`: NW, N,
NE, W, E, SW, S, SE. The opposite of direction k is direction 7 - k."""

_DOWN, _RIGHT = np.array(DIRECTIONS, dtype=np.int64).T


def patch_size_of(latent_sizes: Sequence[tuple[int, int]]) -> int:
    """Return the largest patch size that divides every side: the greatest common divisor of all (height, width).

    Raises:
        UsageError: there is no size, or a side is not a positive whole number.
    """
    return math.gcd(*(int(side) for side in _checked_sizes(latent_sizes).flat))


@dataclass(frozen=True, eq=False)
class PatchLayout:
    """The patches of all active requests, as one list. Built once per change of the active set; read-only.

    n requests, m resolutions, P patches. Requests below are numbered in sorted order; `order` maps this to the given
    order. Tables with an entry per patch are computed on first use: image order never uses them, and sizes without a
    common divisor have as many patches as positions. Patches of a request's references follow those of its image;
    requests with other references count as another resolution.

    Attributes:
        patch_size: side of a patch in latent pixels.
        order: (n,) request indices as given to `build`, sorted by resolution (fewest pixels first, then height, then
            width); requests of one resolution keep their given order.
        resolutions: m latent sizes (height, width) in sorted order.
        references: the references of each resolution.
        resolution_offset: (m + 1,) the first request of each resolution, then n.
        resolution_patch_offset: (m + 1,) the first patch of each resolution, then P.
        request_offset: (n + 1,) the first patch of each request, then P.
        grid: (n, 2) rows and columns of patches of each request's image.
    """

    patch_size: int
    order: Integers
    resolutions: tuple[Size, ...]
    references: tuple[References, ...]
    resolution_offset: Integers
    resolution_patch_offset: Integers
    request_offset: Integers
    grid: Integers

    @classmethod
    def build(
        cls, latent_sizes: Sequence[Size], patch_size: int, references: Sequence[References] | None = None
    ) -> Self:
        """Lay out the patches of requests with these latent sizes.

        Args:
            latent_sizes: (height, width) of the latent of each active request.
            patch_size: side of a patch in latent pixels; it must divide every side, as `patch_size_of` does.
            references: the references of each request, in latents; None if there are none.

        Raises:
            UsageError: there is no size, a side is not a positive whole number, or the patch size does not divide it.
        """
        others: Sequence[References] = references or [()] * len(latent_sizes)
        given = _checked_sizes(latent_sizes)
        _check_patch_size(patch_size, _checked_sizes([*latent_sizes, *every_size(others)]))

        shapes: list[tuple[Size, References]] = [
            ((height, width), own) for (height, width), own in zip(given.tolist(), others, strict=True)
        ]
        order = np.array(sorted(range(len(shapes)), key=lambda index: by_size(*shapes[index])), dtype=np.int64)
        shapes = [shapes[index] for index in order]
        firsts = [index for index, shape in enumerate(shapes) if index == 0 or shape != shapes[index - 1]]
        resolution_offset = np.array([*firsts, len(shapes)], dtype=np.int64)

        grid = given[order] // patch_size
        num_patches = grid[:, 0] * grid[:, 1]
        num_patches += np.array([pixels_of(own) // patch_size**2 for _, own in shapes], dtype=np.int64)
        request_offset = np.zeros(len(shapes) + 1, dtype=np.int64)
        np.cumsum(num_patches, out=request_offset[1:])

        layout = cls(
            patch_size=patch_size,
            order=order,
            resolutions=tuple(shapes[first][0] for first in firsts),
            references=tuple(shapes[first][1] for first in firsts),
            resolution_offset=resolution_offset,
            resolution_patch_offset=request_offset[resolution_offset],
            request_offset=request_offset,
            grid=grid,
        )
        for each in fields(layout):
            if isinstance(array := getattr(layout, each.name), np.ndarray):
                array.flags.writeable = False
        return layout

    @property
    def num_patches(self) -> int:
        return int(self.request_offset[-1])

    @cached_property
    def request_index(self) -> Integers:
        """(P,) the request of each patch; never decreases."""
        return _read_only(np.repeat(np.arange(len(self.grid)), np.diff(self.request_offset)))

    @cached_property
    def row(self) -> Integers:
        """(P,) the row of each patch in the grid of its request."""
        return _read_only(self._place // self._grid_cols)

    @cached_property
    def col(self) -> Integers:
        """(P,) the column of each patch in the grid of its request."""
        return _read_only(self._place % self._grid_cols)

    @cached_property
    def neighbours(self) -> Integers:
        """(P, 8) the patches around each patch in the order of `DIRECTIONS`; -1 beyond the edge of the image. Patches
        of references have none.
        """
        rows, cols = self.grid[self.request_index].T
        # Eight candidates for each patch; a step down is one row of patches, a step right is one patch.
        neighbour_row = self.row[:, None] + _DOWN
        neighbour_col = self.col[:, None] + _RIGHT
        is_inside = (neighbour_row >= 0) & (neighbour_row < rows[:, None])
        is_inside &= (neighbour_col >= 0) & (neighbour_col < cols[:, None])
        is_inside &= (self.row < rows)[:, None]
        steps = _DOWN * cols[:, None] + _RIGHT
        return _read_only(np.where(is_inside, np.arange(self.num_patches)[:, None] + steps, -1))

    @property
    def _place(self) -> Integers:
        """(P,) number of each patch in its request."""
        return np.arange(self.num_patches) - self.request_offset[self.request_index]

    @property
    def _grid_cols(self) -> Integers:
        """(P,) number of columns in the grid of each patch's request."""
        return self.grid[self.request_index, 1]


def by_size(size: Size, references: References = ()) -> tuple[int, ...]:
    """Sort key of latent sizes (height, width): fewest pixels first, then height, then width, then references."""
    return (size[0] * size[1], *size, *(side for each in references for side in each))


def every_size(references: Iterable[References]) -> list[Size]:
    """Return the sizes of all references of some requests."""
    return [size for own in references for size in own]


def pixels_of(sizes: Iterable[Size]) -> int:
    """Return the number of latent pixels of these sizes."""
    return sum(height * width for height, width in sizes)


def _read_only(array: Integers) -> Integers:
    array.flags.writeable = False
    return array


def _checked_sizes(latent_sizes: Sequence[tuple[int, int]]) -> Integers:
    """Return the sizes as an (n, 2) array."""
    if len(latent_sizes) == 0:
        raise UsageError("latent sizes are empty, but a patch layout needs at least one request")
    sizes = np.array(latent_sizes)
    if sizes.shape[1:] != (2,) or sizes.dtype.kind not in "iu" or bool((sizes <= 0).any()):
        raise UsageError(f"latent sizes are {list(latent_sizes)}, but each must be (height, width), positive integers")
    return sizes.astype(np.int64, copy=False)


def _check_patch_size(patch_size: int, sizes: Integers) -> None:
    if isinstance(patch_size, int) and patch_size > 0 and not (sizes % patch_size).any():
        return
    common = math.gcd(*(int(side) for side in sizes.flat))
    allowed = ", ".join(str(divisor) for divisor in range(1, common + 1) if common % divisor == 0)
    if not isinstance(patch_size, int) or patch_size <= 0:
        raise UsageError(f"patch size is {patch_size!r}, but it must be one of {allowed}")
    height, width = sizes[(sizes % patch_size).any(axis=1)][0].tolist()
    raise UsageError(
        f"patch size {patch_size} does not divide the latent size {height}x{width} (height x width); "
        f"allowed for these requests: {allowed}"
    )
