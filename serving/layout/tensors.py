"""The tensors of a patch layout, as the kernels read them, on the device of the model."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from ...data.errors import MissingExtraError, UsageError
from ...kernels.launch import KERNELS, is_triton_installed, use_triton
from .patch_layout import PatchLayout


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
    except ModuleNotFoundError as error:
        raise MissingExtraError("triton", "gpu") from error
    except ValueError as error:
        raise UsageError(f"{error}; use --kernels torch or auto") from error


@dataclass(frozen=True, slots=True, eq=False)
class PatchTensors:
    """What the kernels read of a layout, as int64 tensors on one device; see `PatchLayout` for the meaning.

    The rest stays in the layout: offsets cut tensors into slices, which is the host's work.

    Attributes:
        request_index: (P,).
        neighbours: (P, 8).
    """

    request_index: torch.Tensor
    neighbours: torch.Tensor

    @classmethod
    def of(cls, layout: PatchLayout, device: torch.device | str) -> Self:
        """Copy the layout to `device` in one transfer."""
        # Concatenating copies, so the tensors do not share the layout's read-only memory.
        packed = torch.from_numpy(np.concatenate([layout.request_index, layout.neighbours.reshape(-1)])).to(device)
        request_index, neighbours = packed.split([layout.num_patches, 8 * layout.num_patches])
        return cls(request_index, neighbours.view(-1, 8))
