"""The patch layout against loops over single patches, and its tensors."""

import subprocess
import sys
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from patchedserve.data.errors import MissingExtraError, UsageError
from patchedserve.serving.layout.device_tables import index_tensors
from patchedserve.serving.layout.patch_layout import DIRECTIONS, PatchLayout, patch_size_of
from patchedserve.serving.models.build import check_kernels

from ...support.layout_check import check_layout

Sizes = list[tuple[int, int]]


def _by_hand(sizes: Sizes, patch_size: int) -> dict[str, Any]:
    """Return the layout's attributes, computed with dictionaries and loops."""
    order = sorted(range(len(sizes)), key=lambda i: (sizes[i][0] * sizes[i][1], *sizes[i]))
    patch_at: dict[tuple[int, int, int], int] = {}
    request_offset, resolutions = [0], []
    resolution_offset, resolution_patch_offset = [], []
    for place, request in enumerate(order):
        if not resolutions or resolutions[-1] != sizes[request]:
            resolutions.append(sizes[request])
            resolution_offset.append(place)
            resolution_patch_offset.append(len(patch_at))
        for row in range(sizes[request][0] // patch_size):
            for col in range(sizes[request][1] // patch_size):
                patch_at[place, row, col] = len(patch_at)
        request_offset.append(len(patch_at))
    return {
        "patch_size": patch_size,
        "order": order,
        "resolutions": tuple(resolutions),
        "references": ((),) * len(resolutions),
        "resolution_offset": [*resolution_offset, len(sizes)],
        "resolution_patch_offset": [*resolution_patch_offset, len(patch_at)],
        "request_offset": request_offset,
        "grid": [(sizes[request][0] // patch_size, sizes[request][1] // patch_size) for request in order],
        "request_index": [place for place, _, _ in patch_at],
        "row": [row for _, row, _ in patch_at],
        "col": [col for _, _, col in patch_at],
        "neighbours": [
            [patch_at.get((place, row + down, col + right), -1) for down, right in DIRECTIONS]
            for place, row, col in patch_at
        ],
    }


def _random_mix(seed: int) -> tuple[Sizes, int]:
    """Return the latent sizes of up to 12 requests with up to 4 resolutions, and the patch size."""
    generator = np.random.default_rng(seed)
    patch_size = int(generator.integers(1, 9))
    served = (generator.integers(1, 6, size=(int(generator.integers(1, 5)), 2)) * patch_size).tolist()
    picks = generator.integers(len(served), size=int(generator.integers(1, 13)))
    return [(served[i][0], served[i][1]) for i in picks], patch_size


OF_PATCHES = {"request_index", "row", "col", "neighbours"}
"""Attributes that are computed on first access."""


@pytest.mark.parametrize("seed", range(60))
def test_random_mixes(seed: int) -> None:
    sizes, patch_size = _random_mix(seed)
    layout = PatchLayout.build(sizes, patch_size)
    check_layout(layout)
    expected = _by_hand(sizes, patch_size)
    assert expected.keys() == {field.name for field in fields(layout)} | OF_PATCHES
    for name, value in expected.items():
        found = getattr(layout, name)
        if isinstance(found, np.ndarray):
            assert found.dtype == np.int64
            assert found.tolist() == np.array(value).tolist(), name
        else:
            assert found == value, name
    assert layout.num_patches == len(expected["row"])
    assert len(layout.order) == len(sizes)
    assert len(layout.resolutions) == len(set(sizes))


def test_example_of_the_docstring() -> None:
    layout = PatchLayout.build([(16, 16), (8, 24), (8, 8), (16, 16)], 8)
    assert layout.order.tolist() == [2, 1, 0, 3]
    assert layout.resolutions == ((8, 8), (8, 24), (16, 16))
    assert layout.resolution_offset.tolist() == [0, 1, 2, 4]
    assert layout.resolution_patch_offset.tolist() == [0, 1, 4, 12]
    assert layout.request_offset.tolist() == [0, 1, 4, 8, 12]
    assert layout.neighbours[2].tolist() == [-1, -1, -1, 1, 3, -1, -1, -1]
    assert layout.neighbours[7].tolist() == [4, 5, -1, 6, -1, -1, -1, -1]


def test_neighbours_are_independent_of_the_level() -> None:
    sizes = [(32, 16), (16, 16), (32, 16)]
    full, half = PatchLayout.build(sizes, 8), PatchLayout.build([(h // 2, w // 2) for h, w in sizes], 4)
    assert np.array_equal(full.neighbours, half.neighbours)
    assert np.array_equal(full.request_offset, half.request_offset)


def test_layout_is_read_only() -> None:
    layout = PatchLayout.build([(8, 8)], 4)
    with pytest.raises(ValueError, match="read-only"):
        layout.neighbours[0, 0] = 5
    with pytest.raises(AttributeError):
        layout.patch_size = 2  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("order", 0, 0, "order is not a permutation"),
        ("resolution_offset", 1, 0, "resolution_offset does not rise"),
        ("resolution_patch_offset", 1, 2, "resolution_patch_offset contradicts"),
        ("request_offset", 1, 2, "request_offset contradicts grid"),
        ("grid", (0, 0), 2, "grid and patch_size do not make the resolutions"),
        ("request_index", 0, 1, "request_index contradicts"),
        ("row", 1, 1, "row and col contradict"),
        ("col", 1, 7, "outside the grid"),
        ("neighbours", (1, 4), 3, "does not lie there"),
        ("neighbours", (1, 4), -1, "not -1 exactly at the image edge"),
        ("neighbours", (1, 4), 99, "names a patch that is not there"),
        ("neighbours", (1, 4), -2, "not -1 exactly at the image edge"),
        ("neighbours", (1, 0), 0, "not -1 exactly at the image edge"),
    ],
)
def test_check_finds_every_inconsistency(name: str, index: Any, value: int, message: str) -> None:
    layout = PatchLayout.build([(8, 8), (4, 4)], 4)
    broken = getattr(layout, name).copy()
    broken[index] = value
    for each in OF_PATCHES:
        getattr(layout, each)  # computed before anything is broken
    vars(layout)[name] = broken
    with pytest.raises(RuntimeError, match=message):
        check_layout(layout)


def test_patch_size_is_the_greatest_common_divisor() -> None:
    assert patch_size_of([(16, 16), (24, 24), (32, 32)]) == 8
    assert patch_size_of([(16, 32), (20, 28)]) == 4
    assert patch_size_of([(7, 5)]) == 1
    with pytest.raises(UsageError, match="latent sizes are empty"):
        patch_size_of([])


def test_patch_size_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^patch size 8 does not divide the latent size 20x32 \(height x width\); "):
        PatchLayout.build([(16, 16), (20, 32)], 8)
    with pytest.raises(UsageError, match=r"allowed for these requests: 1, 2, 4$"):
        PatchLayout.build([(16, 16), (20, 32)], 8)


@pytest.mark.parametrize("patch_size", [0, -4, 4.0])
def test_invalid_patch_size_is_refused(patch_size: Any) -> None:
    with pytest.raises(UsageError, match=f"patch size is {patch_size}, but it must be one of 1, 2, 4, 8$"):
        PatchLayout.build([(8, 8)], patch_size)


@pytest.mark.parametrize("sizes", [[(8, 0)], [(-8, 8)], [(8.0, 8.0)], [(8, 8, 8)], [8, 8]])
def test_invalid_sizes_are_refused(sizes: Any) -> None:
    with pytest.raises(UsageError, match=r"each must be \(height, width\), positive integers"):
        PatchLayout.build(sizes, 8)


def test_no_requests() -> None:
    with pytest.raises(UsageError, match="latent sizes are empty"):
        PatchLayout.build([], 8)


def test_layout_needs_no_torch() -> None:
    code = "import sys; import patchedserve.serving.layout.patch_layout; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tensors_equal_the_layout() -> None:
    layout = PatchLayout.build([(8, 8), (4, 4), (8, 12)], 4)
    for name, tensor in zip(("request_index", "neighbours"), index_tensors(layout, "cpu"), strict=True):
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
        assert tensor.tolist() == getattr(layout, name).tolist()


CPU = torch.device("cpu")


def test_kernel_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernels in ("auto", "torch"):
        check_kernels(kernels, CPU)
    with pytest.raises(UsageError, match="kernels is 'cuda', but it must be one of auto, torch, triton"):
        check_kernels("cuda", CPU)
    with pytest.raises(UsageError, match="Triton kernels need CUDA; use --kernels torch or auto"):
        check_kernels("triton", CPU)
    monkeypatch.setitem(sys.modules, "triton", None)
    check_kernels("auto", CPU)
    with pytest.raises(
        MissingExtraError, match=r"triton is not installed; install it with: pip install 'psctl\[gpu\]'"
    ):
        check_kernels("triton", CPU)
