"""Positions of patches (serving/layout/packing.py), against plain slices and torch's own unfold and interpolate."""

import re
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from patchedserve.data.errors import UsageError
from patchedserve.serving.layout.packing import Level, Order, Packing, WholeImages, pack_rows
from patchedserve.serving.patched.tokens import images_of, repeated, to_patches, to_tokens, tokens_of

Size = tuple[int, int]

EVEN: list[Size] = [(8, 8), (8, 16), (16, 8), (16, 8), (16, 16), (24, 16)]
ODD: list[Size] = [(1, 3), (2, 2), (5, 4), (4, 6), (15, 18), (15, 18), (17, 16)]
# sizes, order, patch size, unit, levels
CASES = [
    (EVEN, "image", None, 1, 4),
    (EVEN, "image", None, 2, 1),
    (ODD, "image", None, 1, 4),
    ([(16, 16)], "image", None, 1, 3),
    ([(1, 1), (1, 1)], "image", None, 1, 3),
    (EVEN, "patch", None, 1, 4),
    (EVEN, "patch", 4, 1, 3),
    (EVEN, "patch", 2, 1, 1),
    (EVEN, "patch", 8, 2, 1),
    (EVEN, "patch", 2, 2, 1),
    ([(24, 48), (24, 48)], "patch", 24, 1, 3),
]
CASE_IDS = [f"{order}{patch or ''}-unit{unit}-{len(sizes)}rows" for sizes, order, patch, unit, _ in CASES]
all_cases = pytest.mark.parametrize(("sizes", "order", "patch_size", "unit", "num_levels"), CASES, ids=CASE_IDS)


def pack(sizes: list[Size], order: Order, patch_size: int | None, unit: int, num_levels: int) -> Packing:
    return pack_rows(
        sizes, order=order, patch_size=patch_size, num_levels=num_levels, unit=unit, device=torch.device("cpu")
    )


def draw_images(sizes: Sequence[Size], channels: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(channels, *size, generator=generator) for size in sizes]


def cut(image: Tensor, side: int) -> list[Tensor]:
    """Return the patches [channels, side, side] of one image, row by row."""
    _, height, width = image.shape
    return [
        image[:, top : top + side, left : left + side]
        for top in range(0, height, side)
        for left in range(0, width, side)
    ]


def halved(images: Sequence[Tensor], level: Level, unit: int) -> list[Tensor]:
    """Return the pixels that a stride of 2 per level keeps, and one pixel of every unit, as for SD3's tokens."""
    step = unit << level.index
    return [image[:, ::step, ::step] for image in images]


def cut_tokens(images: Sequence[Tensor], level: Level) -> Tensor:
    """Return the tokens of a level, cut out of its images one by one."""
    patches = [patch for image in images for patch in cut(image, level.grain)]
    return torch.cat([patch.flatten(1).T for patch in patches])


@all_cases
def test_unpack_is_the_inverse_of_pack(
    sizes: list[Size], order: Order, patch_size: int | None, unit: int, num_levels: int
) -> None:
    packing = pack(sizes, order, patch_size, unit, num_levels)
    images = draw_images(sizes)
    patches = packing.pack(images)
    side = packing.levels[0].side
    assert torch.equal(patches, torch.stack([patch for image in images for patch in cut(image, side)]))
    assert patches.is_contiguous(memory_format=torch.channels_last)
    assert len(patches) == packing.levels[0].num_patches == packing.starts[-1]
    for row, image in enumerate(images):
        unpacked = packing.unpack(patches, row)
        assert torch.equal(unpacked, image)
        unpacked.zero_()
    assert torch.equal(packing.unpack(patches, 0), images[0]), "unpacked images are copies"
    # A model's output need not be channels-last.
    assert torch.equal(packing.unpack(patches.contiguous(), len(sizes) - 1), images[-1])


def test_packing_of_whole_images() -> None:
    images = draw_images([(16, 8)] * 3)
    packing = WholeImages(3, torch.device("cpu"))
    packed = packing.pack(images)
    assert (packing.starts, packing.row_index.tolist()) == ([0, 1, 2, 3], [0, 1, 2])
    for row, image in enumerate(images):
        unpacked = packing.unpack(packed, row)
        assert torch.equal(unpacked, image)
        assert unpacked.data_ptr() != packed[row].data_ptr()


@all_cases
def test_packing_levels(sizes: list[Size], order: Order, patch_size: int | None, unit: int, num_levels: int) -> None:
    packing = pack(sizes, order, patch_size, unit, num_levels)
    images = draw_images(sizes)
    assert packing.num_rows == len(sizes)
    assert len(packing.levels) == num_levels
    for index, level in enumerate(packing.levels):
        assert level.index == index
        level_images = halved(images, level, unit)
        tokens = cut_tokens(level_images, level)
        row_of_token = torch.cat([torch.full((image[0].numel(),), row) for row, image in enumerate(level_images)])
        assert level.num_tokens == len(tokens) == level.num_patches * level.grain**2
        assert torch.equal(level.row_index.repeat_interleave(level.grain**2), row_of_token)
        assert level.row_tokens.tolist() == [[image[0].numel()] for image in level_images]
        assert level.row_tokens.dtype == torch.float32
        if order == "patch":
            assert level.neighbours is not None
            assert level.neighbours.tolist() == packing.layout.neighbours.tolist()
            assert level.num_patches == packing.layout.num_patches
            assert level.side == packing.layout.patch_size >> index == level.grain * unit
        else:
            assert level.neighbours is None
            assert level.grain == 1
            assert level.side == (unit if index == 0 else 1)

        # Sizes that differ may be equal after down-sampling; their groups stay apart.
        assert len(level.groups) == len(set(sizes))
        found = images_of(tokens, level)
        for image, expected in zip((image for images in found for image in images), level_images, strict=True):
            assert torch.equal(image, expected)
        assert torch.equal(tokens_of(found, level), tokens)
        for group in level.groups:
            first, last = group.first_row, group.first_row + group.rows
            assert torch.equal(tokens[group.start : group.end], cut_tokens(level_images[first:last], level))
            assert {image.shape[1:] for image in level_images[first:last]} == {(group.height, group.width)}


def test_image_order_regroups_without_copies() -> None:
    level = pack(EVEN, "image", None, 1, 1).levels[0]
    tokens = torch.zeros(level.num_tokens, 3)
    places = {image.untyped_storage().data_ptr() for image in images_of(tokens, level)}
    assert places == {tokens.untyped_storage().data_ptr()}


def test_sizes_without_a_common_divisor_cost_no_more_memory() -> None:
    """The case is 1000 and 1024 px in a batch of SDXL, image order: their largest common patch is one latent pixel."""
    peaks = []
    for side in (128, 125):
        tracemalloc.start()
        packing = pack_rows(
            [(side, side)] * 4 + [(128, 128)] * 4,
            order="image",
            patch_size=None,
            num_levels=3,
            unit=1,
            device=torch.device("cpu"),
        )
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert packing.levels[0].num_tokens == 4 * side**2 + 4 * 128**2
        assert "neighbours" not in vars(packing.layout)
    assert peaks[1] < 1.1 * peaks[0]


def test_tokens_and_patches_are_views_of_each_other() -> None:
    packing = pack(EVEN, "patch", 4, 1, 3)
    patches = packing.pack(draw_images(EVEN))
    tokens = to_tokens(patches)
    assert torch.equal(tokens, cut_tokens(draw_images(EVEN), packing.levels[0]))
    assert torch.equal(to_patches(tokens, 4), patches)
    assert tokens.data_ptr() == to_patches(tokens, 4).data_ptr() == patches.data_ptr()


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("sizes", [EVEN, ODD, [(1, 1)], [(9, 7)]], ids=["even", "odd", "pixel", "one"])
def test_windows_equal_unfold(sizes: list[Size], stride: int) -> None:
    packing = pack(sizes, "image", None, 1, 2)
    images = draw_images(sizes)
    level = packing.levels[0]
    padded = F.pad(cut_tokens(images, level), (0, 0, 0, 1))
    windows = level.windows(stride)
    assert windows is level.windows(stride), "tables are built once"
    found = padded[windows].view(-1, 9, 3)
    unfolded = [F.unfold(image[None], 3, padding=1, stride=stride)[0] for image in images]
    expected = torch.cat([columns.view(3, 9, -1).permute(2, 1, 0) for columns in unfolded])
    assert torch.equal(found, expected)
    assert len(found) == packing.levels[stride - 1].num_tokens


@pytest.mark.parametrize("sizes", [EVEN, ODD, [(1, 1)], [(9, 7)]], ids=["even", "odd", "pixel", "one"])
def test_interpolation_sources_equal_interpolate(sizes: list[Size]) -> None:
    packing = pack(sizes, "image", None, 1, 4)
    for finer, level in zip(packing.levels, packing.levels[1:], strict=False):
        images = halved(draw_images(sizes), level, 1)
        targets = halved(draw_images(sizes), finer, 1)
        upsampled = [
            F.interpolate(image[None], size=target.shape[1:], mode="nearest")[0]
            for image, target in zip(images, targets, strict=True)
        ]
        sources = level.sources_of(finer)
        assert sources is level.sources_of(finer), "tables are built once"
        assert torch.equal(cut_tokens(images, level)[sources], cut_tokens(upsampled, finer))


def test_recent_packings_are_cached() -> None:
    assert pack(EVEN, "image", None, 1, 3) is pack(list(EVEN), "image", None, 1, 3)
    assert pack(EVEN, "image", None, 1, 3) is not pack(EVEN, "patch", None, 1, 3)
    # The default is the largest patch that divides all sides.
    assert pack(EVEN, "patch", None, 1, 3) is pack(EVEN, "patch", 8, 1, 3)


@pytest.mark.parametrize(
    ("sizes", "patch_size", "unit", "num_levels", "message"),
    [
        (EVEN, 12, 1, 3, "patch size 12 does not fit: .* (common divisor 8) .* multiple of 4 .* allowed here: 4, 8"),
        (EVEN, 4, 1, 4, "patch size 4 does not fit: .* (common divisor 8) .* multiple of 8 .* allowed here: 8"),
        (EVEN, 16, 1, 3, "patch size 16 does not fit: .* allowed here: 4, 8"),
        (EVEN, 0, 1, 3, "patch size 0 does not fit: .* allowed here: 4, 8"),
        (EVEN, -8, 1, 3, "patch size -8 does not fit: .* allowed here: 4, 8"),
        (EVEN, 1, 2, 1, "patch size 1 does not fit: .* multiple of 2 for this model; allowed here: 2, 4, 8"),
        ([(20, 28)], None, 1, 4, "patch size 4 does not fit: .* allowed here: none; use --order image"),
        ([(15, 18)], None, 1, 3, "patch size 3 does not fit: .* allowed here: none; use --order image"),
        ([(15, 18)], 4, 1, 3, "patch size 4 does not fit: .* allowed here: none; use --order image"),
    ],
)
def test_patch_size_that_does_not_divide_is_refused(
    sizes: list[Size], patch_size: int | None, unit: int, num_levels: int, message: str
) -> None:
    pattern = ".*".join(re.escape(part) for part in message.split(".*"))
    with pytest.raises(UsageError, match=pattern) as refusal:
        pack(sizes, "patch", patch_size, unit, num_levels)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("order", ["image", "patch"])
def test_empty_batch_is_refused(order: Order) -> None:
    with pytest.raises(UsageError, match="latent sizes are empty"):
        pack([], order, None, 1, 3)


def test_unsorted_rows_are_refused() -> None:
    with pytest.raises(AssertionError, match="sorted by resolution"):
        pack([(16, 16), (8, 8)], "image", None, 1, 3)


@pytest.mark.parametrize(("order", "unit"), [("image", 2), ("patch", 2), ("patch", 1)])
def test_tokens_of_references_follow_those_of_their_image(order: Order, unit: int) -> None:
    sizes, references = [(8, 8), (8, 8), (8, 8), (16, 8)], [(), (), ((8, 16), (8, 8)), ((8, 16), (8, 8))]
    packing = pack_rows(
        sizes, references, order=order, patch_size=None, num_levels=1, unit=unit, device=torch.device("cpu")
    )
    level = packing.levels[0]
    areas = [8 * 8, 8 * 8, 8 * 8 + 8 * 24, 16 * 8 + 8 * 24]
    assert [(group.rows, group.first_row) for group in level.groups] == [(2, 0), (1, 2), (1, 3)]
    assert [group.end - group.start for group in level.groups] == [
        area // unit**2 for area in (2 * areas[0], *areas[2:])
    ]
    ends = [end // level.side**2 for end in (0, 64, 128, 384, 704)]
    assert packing.starts == ends
    assert level.row_index.bincount().tolist() == [last - first for first, last in pairwise(ends)]
    images = [[draw_images([size])[0], *draw_images(own)] for size, own in zip(sizes, references, strict=True)]
    patches = torch.cat([packing.pack(own) for own in images])
    for row, (image, *_) in enumerate(images):
        assert torch.equal(packing.unpack(patches, row), image)
    if level.neighbours is not None:
        is_image = torch.cat(
            [
                torch.arange(last - first) < height * width // level.side**2
                for (height, width), (first, last) in zip(sizes, pairwise(ends), strict=True)
            ]
        )
        assert (level.neighbours[~is_image] == -1).all()
        assert is_image[level.neighbours[level.neighbours >= 0]].all()

    def numbered(number: int) -> Callable[[int, int], Tensor]:
        """Return a table with the number of the image and the place of each token in it."""
        return lambda height, width: torch.stack(
            [torch.full((height * width,), float(number)), torch.arange(height * width, dtype=torch.float32)], 1
        )

    found = repeated(level, numbered(0), of_references=lambda number: numbered(number + 1))
    rows = [(size, *own) for size, own in zip(sizes, references, strict=True)]
    expected = [
        patch.flatten(1).T
        for row in rows
        for number, (height, width) in enumerate((high // unit, wide // unit) for high, wide in row)
        for patch in cut(numbered(number)(height, width).T.reshape(2, height, width), level.grain)
    ]
    assert torch.equal(found, torch.cat(expected))
    some = packing.of_rows([1, 2])
    assert (some.sizes, some.references) == (((8, 8), (8, 8)), ((), ((8, 16), (8, 8))))
