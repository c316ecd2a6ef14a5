"""Tables of a patch layout on a device."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .bucket import Bucket
from .patch_layout import PatchLayout

Tables = tuple[Tensor, Tensor, Tensor]
"""Row of each patch, its neighbours and the first patch of each row, see `Packing.tables`."""


def to_device(table: Tensor, device: torch.device | str) -> Tensor:
    """Return a table of the host on a device. A GPU copies it in the order of its work, and the host does not wait."""
    if torch.device(device).type != "cuda":
        return table.to(device)
    return table.pin_memory().to(device, non_blocking=True)


def all_to_device(tables: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Return tables of the host on a device, which a GPU copies in one transfer, as `to_device` does."""
    if torch.device(device).type != "cuda":
        return [table.to(device) for table in tables]
    parts = [table.contiguous().flatten().view(torch.uint8) for table in tables]
    # Elements of every dtype begin at multiples of their size.
    lengths = [-(-len(part) // 8) * 8 for part in parts]
    padded = [F.pad(part, (0, length - len(part))) for part, length in zip(parts, lengths, strict=True)]
    placed = to_device(torch.cat(padded), device).split(lengths)
    return [
        found[: len(part)].view(table.dtype).view(table.shape)
        for found, part, table in zip(placed, parts, tables, strict=True)
    ]


def index_tensors(layout: PatchLayout, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Copy the tables for kernels to the device: `request_index` (P,), `neighbours` (P, 8), int64; one transfer."""
    request_index, flat = _transferred([layout.request_index, layout.neighbours.reshape(-1)], device)
    return request_index, flat.view(-1, 8)


def padded_tables(layout: PatchLayout, device: torch.device | str, bucket: Bucket) -> Tables:
    """Copy the tables of a packing that is padded to a bucket to the device (`Packing.tables`), in one transfer."""
    padding = bucket.num_patches - layout.num_patches
    index = np.pad(layout.request_index, (0, padding), constant_values=bucket.num_rows - 1)
    neighbours = np.pad(layout.neighbours.reshape(-1), (0, 8 * padding), constant_values=-1)
    starts = np.searchsorted(index, np.arange(bucket.num_rows + 1))
    row_index, flat, row_starts = _transferred([index, neighbours, starts], device)
    return row_index, flat.view(-1, 8), row_starts


def _transferred(tables: Sequence[np.ndarray], device: torch.device | str) -> Sequence[Tensor]:
    # Concatenating copies, so the tensors do not share the layout's read-only memory.
    return to_device(torch.from_numpy(np.concatenate(tables)), device).split([len(table) for table in tables])
