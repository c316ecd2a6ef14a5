"""The tensors of a patch layout, as the kernels read them, on the device of the model."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from ..data.errors import MissingExtraError, UsageError
from ..kernels.launch import KERNELS, is_triton_installed, use_triton
from .layout import PatchLayout


def check_kernels(kernels: str, device: torch.device) -> None:
    """Check a user's choice of kernels once, at start, rather than at the first step.

    (`kernels` is the lowest floor and cannot raise the errors of `data.errors` itself.)

    Raises:
        UsageError: `kernels` is not one of `KERNELS`, or it is "triton" and the device is none that triton runs on.
        MissingExtraError: `kernels` is "triton", and triton is not installed.
    """
    if kernels not in KERNELS:
        raise UsageError(f"kernels is {kernels!r}, but it must be one of {', '.join(KERNELS)}")
    if kernels == "triton" and not is_triton_installed():
        raise MissingExtraError("triton", "gpu")
    try:
        use_triton(kernels, device)
    except ValueError as error:
        raise UsageError(f"{error}; use --kernels torch or auto") from error


@dataclass(frozen=True, slots=True, eq=False)
class PatchTensors:
    """What changes hands per patch or request, as int64 tensors on one device; see `PatchLayout` for the meaning.

    The offsets of resolutions stay in the layout: they cut tensors into slices, which is the host's work.

    Attributes:
        order: (n,).
        request_offset: (n + 1,).
        request_index: (P,).
        row, col: (P,).
        neighbours: (P, 8).
        num_requests: n, for kernels that cannot ask the device without waiting for it.
    """

    order: torch.Tensor
    request_offset: torch.Tensor
    request_index: torch.Tensor
    row: torch.Tensor
    col: torch.Tensor
    neighbours: torch.Tensor
    num_requests: int

    @classmethod
    def of(cls, layout: PatchLayout, device: torch.device | str) -> Self:
        """Copy the layout to `device`, all arrays in one transfer."""
        arrays = (
            *(layout.order, layout.request_offset, layout.request_index),
            *(layout.row, layout.col, layout.neighbours.reshape(-1)),
        )
        # Concatenating copies, so the tensors do not share the layout's read-only memory.
        packed = torch.from_numpy(np.concatenate(arrays)).to(device)
        order, request_offset, request_index, row, col, neighbours = packed.split([len(array) for array in arrays])
        return cls(order, request_offset, request_index, row, col, neighbours.view(-1, 8), layout.num_requests)
