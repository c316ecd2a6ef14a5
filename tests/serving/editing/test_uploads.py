"""Tensors of a record packed into one piece of memory; tests/gpu covers the copies to the GPU."""

import pytest
import torch

from patchedserve.data.errors import RunError
from patchedserve.serving.editing.uploads import LoadedUnit, PackedRows


def test_packed_tensors_are_equal() -> None:
    rows = {
        0: {"a": torch.randn(3, 5), "b": torch.randn(2, 7, dtype=torch.float64).to(torch.bfloat16)},
        1: {"a": torch.randn(1, 5)[:, ::2], "c": torch.arange(4), "d": torch.empty(0, 3)},
    }
    packed = PackedRows(rows, is_pinned=False)
    copied = LoadedUnit(packed.rows(packed.memory.clone()))
    packed.memory.zero_()
    for row, seen in rows.items():
        for name, tensor in seen.items():
            found = copied.take(row, name)
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor)
            assert found.data_ptr() % 16 == copied.rows[0]["a"].data_ptr() % 16


def test_empty_record_can_be_packed() -> None:
    assert PackedRows({}, is_pinned=False).rows() == {}


def test_allocation_failure_gives_a_one_line_error() -> None:
    huge = torch.zeros(1).expand(1 << 50)
    with pytest.raises(RunError, match=r"MB of a template's record find no memory that a GPU reads: .*"):
        PackedRows({0: {"a": huge}}, is_pinned=False)
