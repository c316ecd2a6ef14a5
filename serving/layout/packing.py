"""Packing of a batch: the positions of its patches at each level of a model.

A batch is one tensor [patches, channels, side, side], channels-last in memory, so that it is also the packed tokens
[patches * side * side, channels] of all images. Two orders of these tokens exist:

`image`  a patch is one position (of the model's smallest unit), so the tokens of an image are in raster order and the
         images of a resolution are a view: regrouping them copies nothing. After down-sampling there are fewer patches.
`patch`  patches of the layout's size (PatchedServe 4.1). Down-sampling keeps their number and shortens their sides.

In patch order a packing may be padded to a `Bucket`, so that passes over many mixes of sizes have the same shapes:
dummy rows come last, and the last of them owns the padding patches, which have no neighbours.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ...data.errors import UsageError
from ...kernels.patch import patch_join, patch_split
from .bucket import Bucket
from .device_tables import Tables, index_tensors, padded_tables, to_device
from .patch_layout import PatchLayout, References, Size, every_size, patch_size_of, pixels_of

Order = Literal["image", "patch"]
BucketOf = Callable[[int, int, int], Bucket]
"""(number of patches, number of rows, bound for the patches of a row) -> the bucket that they are padded to."""
_KEPT = 16  # packings of recent batches; one of 16 guided requests of 128 to 256 px has 2.6 MB of indices


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of one resolution at one level.

    Attributes:
        rows, first_row: number of rows, and the first of them.
        height, width: size of each image, in tokens.
        start, end: range of their tokens.
        references: size of each reference of a row, whose tokens follow those of its image.
    """

    rows: int
    first_row: int
    height: int
    width: int
    start: int
    end: int
    references: References = ()

    @property
    def row_slice(self) -> slice:
        return slice(self.first_row, self.first_row + self.rows)


@dataclass(slots=True, eq=False)
class Level:
    """One resolution level of a model (0: the latents; each further one halves the sides).

    Attributes:
        index: number of halvings.
        side: side of a patch in the tensors of this level.
        grain: tokens on a side of a patch; less than `side` only where a token covers several latent pixels (SD3).
        groups: rows by resolution, in order, without dummies.
        num_rows: number of rows.
        num_patches: number of patches, P.
        row_index: (P,) row of each patch.
        neighbours: (P, 8) as in `PatchLayout`; None in image order.
        num_tokens: number of tokens of all rows.
        num_padding: number of tokens of the dummies among them, which come last.
        starts: of a padded packing, (rows + 1,) the first patch of each row, and the end of the last.
        longest: of a padded packing, a bound for the number of tokens of a row.
    """

    index: int
    side: int
    grain: int
    groups: tuple[Group, ...]
    num_rows: int
    num_patches: int
    row_index: Tensor
    neighbours: Tensor | None
    starts: Tensor | None = None
    longest: int = 0
    num_tokens: int = field(init=False)
    num_padding: int = field(init=False)
    _tables: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_tokens = self.num_patches * self.grain**2
        self.num_padding = self.num_tokens - self.groups[-1].end

    @property
    def row_tokens(self) -> Tensor:
        """(rows, 1) number of tokens of each row, float32."""
        if "row_tokens" not in self._tables:
            counts = [float(group.height * group.width) for group in self.groups for _ in range(group.rows)]
            counts += [0.0] * (self.num_rows - len(counts))
            counts[-1] += self.num_padding
            self._tables["row_tokens"] = to_device(torch.tensor(counts), self.row_index.device)[:, None]
        return self._tables["row_tokens"]

    def windows(self, stride: int) -> Tensor:
        """Return, in image order, the 9 tokens that each output of a 3 x 3 convolution with padding 1 reads,
        (outputs * 9,).

        Taps go row by row. Taps beyond the edge of the image read token P, a row of zeros after the last token.
        """
        name = f"windows{stride}"
        if name not in self._tables:
            self._tables[name] = to_device(self._build_windows(stride), self.row_index.device)
        return self._tables[name]

    def sources_of(self, finer: "Level") -> Tensor:
        """Return, in image order, the token of this level that nearest up-sampling copies to each token of `finer`."""
        if "sources" not in self._tables:
            parts = []
            for here, there in zip(self.groups, finer.groups, strict=True):
                number = torch.arange(here.height * here.width, dtype=torch.float64)
                image = number.view(1, 1, here.height, here.width)
                # torch's own interpolation of the token numbers is used, so that odd sizes agree with it.
                taken = torch.nn.functional.interpolate(image, size=(there.height, there.width), mode="nearest")
                rows = torch.arange(here.rows)[:, None] * (here.height * here.width) + here.start
                parts.append((rows + taken.long().view(1, -1)).flatten())
            self._tables["sources"] = to_device(torch.cat(parts), self.row_index.device)
        return self._tables["sources"]

    def _build_windows(self, stride: int) -> Tensor:
        parts = []
        for group in self.groups:
            height, width = group.height, group.width
            padded = np.full((height + 2, width + 2), -1, dtype=np.int64)
            padded[1:-1, 1:-1] = np.arange(height * width).reshape(height, width)
            taps = np.lib.stride_tricks.sliding_window_view(padded, (3, 3))[::stride, ::stride].reshape(1, -1)
            starts = (np.arange(group.rows) * (height * width) + group.start)[:, None]
            parts.append(np.where(taps < 0, self.num_patches, taps + starts).reshape(-1))
        return torch.from_numpy(np.concatenate(parts))


@dataclass(slots=True, eq=False)
class Packing:
    """Positions of all rows of a batch, which are sorted by resolution. Build it with `pack_rows`.

    Attributes:
        order: order of the tokens, `image` or `patch`.
        layout: patch layout of the rows, without dummies.
        sizes: (height, width) of the latents of each row, without dummies.
        references: sizes of the references of each row; empty if no row has any.
        levels: levels of the model, from the latents down.
        kernels: one of `kernels.launch.KERNELS`, for cutting and joining patches.
        bucket: what the packing is padded to; None without padding.
        starts: first patch of each row in `sizes`, then the end of the last.
        num_dummies: number of dummy rows.
        largest: see `pack_rows`.
    """

    order: Order
    layout: PatchLayout
    sizes: tuple[Size, ...]
    references: tuple[References, ...]
    levels: tuple[Level, ...]
    kernels: str
    bucket: Bucket | None = None
    largest: int = 0
    starts: list[int] = field(init=False)
    num_dummies: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_dummies = self.num_rows - len(self.sizes)
        area = self.levels[0].side ** 2
        others = self.references or [()] * len(self.sizes)
        rows = (pixels_of((size, *own)) // area for size, own in zip(self.sizes, others, strict=True))
        self.starts = np.cumsum([0, *rows]).tolist()

    @property
    def num_rows(self) -> int:
        """Number of rows, with dummies."""
        return self.levels[0].num_rows

    @property
    def num_patches(self) -> int:
        """Number of patches of latents, with padding."""
        return self.levels[0].num_patches

    @property
    def row_index(self) -> Tensor:
        """(P,) row of each patch of latents."""
        return self.levels[0].row_index

    @property
    def value_rows(self) -> Tensor:
        """(rows,) the row whose values (text, adapters) each row has: its own, or for a dummy the last one's."""
        return torch.arange(self.num_rows, device=self.row_index.device).clamp(max=len(self.sizes) - 1)

    @property
    def tables(self) -> Tables:
        """Tables that padded passes read: `row_index`, `neighbours` and `starts`, the same at all levels."""
        finest = self.levels[0]
        assert finest.neighbours is not None
        assert finest.starts is not None, "only padded packings have tables that passes may read elsewhere"
        return finest.row_index, finest.neighbours, finest.starts

    def reading(self, tables: Tables) -> "Packing":
        """Return the same packing with its `tables` in other memory."""
        found = copy(self)
        found.levels = tuple(map(copy, self.levels))
        for level in found.levels:
            level.row_index, level.neighbours, level.starts = tables
        return found

    def of_rows(self, rows: Sequence[int], *, is_padded: bool = False) -> "Packing":
        """Return the packing of only these rows, ascending: a batch of their own, cut in the same way.

        `is_padded`: whether to pad it to its bucket, in patch order.
        """
        finest, size = self.levels[0], self.layout.patch_size
        device, unit = finest.row_index.device, finest.side // finest.grain
        sizes = tuple(self.sizes[row] for row in rows)
        references = tuple(self.references[row] for row in rows) if self.references else ()
        options = unit, device, self.kernels, is_padded, Bucket.of, self.largest
        return _pack_rows(sizes, references, self.order, size, len(self.levels), *options)

    def pack(self, images: Sequence[Tensor]) -> Tensor:
        """Cut images [channels, height, width], one per row or the references of one, into patches [P, channels, side,
        side].
        """
        return patch_split([image[None] for image in images], self.levels[0].side, kernels=self.kernels)

    def unpack(self, patches: Tensor, row: int) -> Tensor:
        """Return a copy of the image [channels, height, width] of a row."""
        side, (height, width) = self.levels[0].side, self.sizes[row]
        rows, columns = height // side, width // side
        own = patches[self.starts[row] :][: rows * columns]
        return patch_join(own, rows, columns, kernels=self.kernels)[0].contiguous()


class WholeImages:
    """Packing of rows of one resolution that keeps each image whole, for plain diffusers."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.num_rows = self.num_patches = num_rows
        self.starts = list(range(num_rows + 1))
        self.row_index = torch.arange(num_rows, device=device)

    def pack(self, images: Sequence[Tensor]) -> Tensor:
        """One image [channels, height, width] per row -> [rows, channels, height, width]."""
        return torch.stack(tuple(images))

    def unpack(self, images: Tensor, row: int) -> Tensor:
        """Return a copy of the image of a row."""
        return images[row].clone()


def pack_rows(
    sizes: Sequence[Size],
    references: Sequence[References] = (),
    *,
    order: Order,
    patch_size: int | None,
    num_levels: int,
    unit: int,
    device: torch.device,
    kernels: str = "auto",
    is_padded: bool = False,
    bucket_of: BucketOf = Bucket.of,
    largest: int = 0,
) -> Packing:
    """Return the packing of these rows. Recent packings are cached.

    Args:
        sizes: (height, width) of each row's latents, sorted as `PatchLayout` sorts (fewest pixels, height, width).
        references: sizes of the references of each row, in latents; empty if no row has any.
        order, num_levels, device, kernels: as in `Packing` and its levels.
        patch_size: side of a patch in latent pixels; None for the largest that divides all sides.
        unit: side, in latent pixels, of the smallest unit that the model distinguishes (SD3: its patch size).
        is_padded: whether to pad it to its bucket, in patch order.
        bucket_of: returns the bucket.
        largest: largest number of latent pixels that most rows of such batches have, so that buckets differ less; 0 if
            it is unknown.

    Raises:
        UsageError: if the patch size does not divide a side, or is too small for the model's levels.
    """
    own = tuple(references) if any(references) else ()
    wanted = patch_size_of([*sizes, *every_size(own)]) if patch_size is None else patch_size
    options = unit, device, kernels, is_padded, bucket_of, largest
    return _pack_rows(tuple(sizes), own, order, wanted, num_levels, *options)


def check_patch_size(patch_size: int, sizes: Sequence[tuple[int, int]], num_levels: int, unit: int) -> None:
    """Refuse a patch size that does not suit a model with these levels, or that does not divide a size.

    Raises:
        UsageError: the patch size is refused; the message lists the allowed ones.
    """
    multiple = unit << (num_levels - 1)
    common = patch_size_of(sizes)
    if patch_size < 1 or patch_size % multiple or common % patch_size:
        allowed = [size for size in range(multiple, common + 1, multiple) if common % size == 0]
        named = ", ".join(str(size) for size in allowed) or "none; use --order image"
        raise UsageError(
            f"patch size {patch_size} does not fit: it must divide every latent side (common divisor {common}) and be "
            f"a multiple of {multiple} for this model; allowed here: {named}"
        )


@lru_cache(maxsize=_KEPT)
def _pack_rows(
    sizes: tuple[Size, ...],
    references: tuple[References, ...],
    order: Order,
    patch_size: int,
    num_levels: int,
    unit: int,
    device: torch.device,
    kernels: str,
    is_padded: bool,
    bucket_of: BucketOf,
    largest: int,
) -> Packing:
    if order == "patch":
        check_patch_size(patch_size, [*sizes, *every_size(references)], num_levels, unit)
    layout = PatchLayout.build(sizes, patch_size, references)
    assert (layout.order == np.arange(len(sizes))).all(), "rows must come sorted by resolution"
    if order == "image":
        assert not is_padded
        levels = tuple(_image_level(layout, index, unit, device) for index in range(num_levels))
        return Packing(order, layout, sizes, references, levels, kernels, largest=largest)
    most = max(largest, int(np.diff(layout.request_offset).max()) * patch_size**2)
    bucket = bucket_of(layout.num_patches, len(sizes), -(-most // patch_size**2)) if is_padded else None
    tables = (*index_tensors(layout, device), None) if bucket is None else padded_tables(layout, device, bucket)
    levels = tuple(_patch_level(layout, bucket, tables, index, unit) for index in range(num_levels))
    return Packing(order, layout, sizes, references, levels, kernels, bucket, largest)


def _patch_level(
    layout: PatchLayout, bucket: Bucket | None, tables: tuple[Tensor, Tensor, Tensor | None], index: int, unit: int
) -> Level:
    side, (row_index, neighbours, starts) = layout.patch_size >> index, tables
    shrink, grain = unit << index, side // unit
    groups = _groups(layout, lambda side: side // shrink)
    num_rows, longest = groups[-1].row_slice.stop, 0
    if bucket is not None:
        num_rows, longest = bucket.num_rows, bucket.longest * grain**2
    return Level(index, side, grain, groups, num_rows, len(row_index), row_index, neighbours, starts, longest)


def _image_level(layout: PatchLayout, index: int, unit: int, device: torch.device) -> Level:
    # A convolution of stride 2 rounds up.
    groups = _groups(layout, lambda side: -(-side // (unit << index)))
    lengths = [(group.end - group.start) // group.rows for group in groups for _ in range(group.rows)]
    row_index = to_device(torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)), device)
    # Latents of a model whose smallest unit is larger than a pixel (SD3) are in patches of that side.
    return Level(index, unit if index == 0 else 1, 1, groups, len(lengths), len(row_index), row_index, None)


def _groups(layout: PatchLayout, in_tokens: Callable[[int], int]) -> tuple[Group, ...]:
    """Return the groups of a level, one for each resolution; `in_tokens` maps sides in latents to tokens."""
    groups, start, ranges = [], 0, pairwise(layout.resolution_offset.tolist())
    for size, references, (first_row, end_row) in zip(layout.resolutions, layout.references, ranges, strict=True):
        (height, width), *others = ((in_tokens(high), in_tokens(wide)) for high, wide in (size, *references))
        end = start + (end_row - first_row) * pixels_of([(height, width), *others])
        groups.append(Group(end_row - first_row, first_row, height, width, start, end, tuple(others)))
        start = end
    return tuple(groups)
