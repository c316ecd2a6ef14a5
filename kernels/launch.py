"""Shared functions of all kernels: device capabilities, dispatch, kernels that compile on first use, and tile sizes.

triton is imported only when the first Triton kernel is launched, so that every module of this folder can be imported
without triton.
"""

import functools
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

KERNELS = ("auto", "torch", "triton")
"""Choices of every dispatcher's `kernels`: "auto" is Triton for CUDA tensors and torch for all others."""

COMPILE_OPTIONS = {"enable_fp_fusion": True}
"""Options of compilation, set explicitly because the default is on until triton 3.9 and off from 3.10."""

_TILE = 4096
"""Elements of one Triton program: 32 registers of each of its 128 threads."""


def is_triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def use_triton(kernels: str, device: torch.device) -> bool:
    """Decide whether a dispatcher launches its Triton kernel on tensors of `device`.

    Raises:
        ValueError: `kernels` is not one of `KERNELS`, or it is "triton" and the tensors are not on a CUDA device (and
            triton's interpreter, TRITON_INTERPRET=1, is not on).
        ModuleNotFoundError: triton is needed and not installed.
    """
    if kernels not in KERNELS:
        raise ValueError(f"kernels is {kernels!r}, but it must be one of {', '.join(KERNELS)}")
    if kernels == "torch" or (kernels == "auto" and device.type != "cuda"):
        return False
    if not is_triton_installed():
        raise ModuleNotFoundError("triton is not installed; install it with: pip install 'psctl[gpu]'", name="triton")
    if device.type != "cuda":
        from triton import knobs

        if not knobs.runtime.interpret:
            raise ValueError(f"kernels is 'triton', but the tensors are on {device.type}; Triton kernels need CUDA")
    return True


def has_fast_bfloat16(device: torch.device) -> bool:
    """Return whether a device has instructions for bfloat16. Other devices compute it up to ten times slower."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    can = torch.cpu.get_capabilities()
    return bool(can.get("amx_bf16", False) or can.get("avx512_bf16", False))


class TritonKernel:
    """Decorator of a Triton kernel that is compiled when it is first launched.

    Inside the kernel, `tl` is `triton.language`, which the module imports for type checkers only. The module begins
    with `from __future__ import annotations`, so that the annotation `tl.constexpr` is not evaluated at import. (A
    quoted annotation would be a constant to the compiler but not to triton's interpreter.)
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    @functools.cached_property
    def jit(self) -> Any:
        """The kernel as `triton.jit` returns it."""
        import triton
        import triton.language

        # A kernel's names resolve in its module, where an import at the top would require triton.
        self._function.__globals__["tl"] = triton.language
        return triton.jit(self._function)

    def launch(self, grid: tuple[int, ...], device: torch.device, *arguments: Any, **constants: Any) -> None:
        """Run the kernel on `device`; a grid with a zero does nothing."""
        if 0 in grid:
            return
        current: AbstractContextManager[Any] = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with current:
            self.jit[grid](*arguments, **constants, **COMPILE_OPTIONS)


def tile(num_pixels: int, num_channels: int, size: int = _TILE) -> tuple[int, int]:
    """Return the size (pixels, channels) of a tile of up to `size` elements; both are powers of two.

    It has up to 128 channels, which are adjacent in memory: the largest number of those that leave the fewest lanes
    idle (320 channels are five times 64). Pixels fill the tile.
    """
    fitting = [min(block, power_of_two(num_channels)) for block in (128, 64, 32)]
    block_channels = min(fitting, key=lambda block: (ceil_div(num_channels, block) * block, -block))
    return min(size // block_channels, power_of_two(num_pixels)), block_channels


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is not smaller than `count`; 1 for zero."""
    return 1 << max(count - 1, 0).bit_length()


def ceil_div(count: int, size: int) -> int:
    return -(-count // size)


def empty_channels_last(like: torch.Tensor, num: int, channels: int, height: int, width: int) -> torch.Tensor:
    """Return an uninitialised (num, channels, height, width) tensor whose memory is (num, height, width, channels)."""
    return like.new_empty((num, height, width, channels)).permute(0, 3, 1, 2)


def check_patches(x: torch.Tensor) -> None:
    """Raise ValueError unless `x` is (patches, channels, height, width) with no empty patch."""
    if x.dim() != 4 or 0 in x.shape[1:]:
        raise ValueError(f"x has shape {tuple(x.shape)}, but it must be (patches, channels, height, width)")


def check_floating(x: torch.Tensor) -> None:
    """Raise ValueError unless `x` has a dtype that is computed in float32."""
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"x is {x.dtype}, but it must be float32, float16 or bfloat16")


def check_index(name: str, index: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise ValueError unless `index` holds integers in this shape on this device. Its values are not checked, because
    that would synchronize with the device."""
    if tuple(index.shape) != shape or index.dtype not in (torch.int32, torch.int64) or index.device != device:
        raise ValueError(
            f"{name} is {tuple(index.shape)} {index.dtype} on {index.device}, "
            f"but it must be {shape} of int32 or int64 on {device}"
        )


def check_halo(halo: int, height: int, width: int) -> None:
    """Raise ValueError unless a border of this width comes from adjacent patches alone."""
    if not 1 <= halo <= min(height, width):
        raise ValueError(f"halo is {halo}, but it must be from 1 to {min(height, width)} for patches {height}x{width}")
