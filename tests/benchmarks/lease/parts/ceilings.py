"""Best times of the card: products, copies, attention, our kernels compared with torch's, and a captured graph."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from patchedserve.kernels.group_norm_stats import group_norm_stats
from patchedserve.kernels.group_norm_stitch import group_norm_silu_stitch
from patchedserve.kernels.halo import halo_gather
from patchedserve.profiling.steps.matrix_peak import matrix_peak
from patchedserve.serving.layout.device_tables import index_tensors
from patchedserve.serving.layout.patch_layout import PatchLayout

from ..context import Context, Row, Task
from .rehearsal import use_small_products
from .timing import mean_ms, memory_mb, once_ms

_COPY_BYTES = {"cuda": 4 << 30, "cpu": 32 << 20}
_GROUPS, _EPS = 32, 1e-5
_ATTENTIONS = (
    ("SDXL 1024 px, level 1", "sdxl", 2, 10, 4096, 64),
    ("SDXL 1024 px, level 2", "sdxl", 2, 20, 1024, 64),
    ("FLUX 1024 px", "flux-dev", 1, 24, 4608, 128),
)
"""Name, model, rows, heads, tokens, and width of a head."""


def ceilings(context: Context) -> Iterator[Row]:
    """Yield a row for each operation."""
    if context.scale.is_rehearsal:
        use_small_products()
    with torch.inference_mode():
        yield from context.measured([*_memory(context), *_attention(context), *_kernels(context), *_graph(context)])


def _memory(context: Context) -> Iterator[Task]:
    device = context.device
    for name in dict.fromkeys(["bfloat16", context.scale.dtype("sdxl")]):
        yield f"product, {name}", partial(_product, device, getattr(torch, name))

    def copy() -> Row:
        source = torch.empty(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        ms = mean_ms(lambda: target.copy_(source), device)
        return {"value": 2 * source.nbytes / ms / 1e6, "unit": "GB/s", "ms": ms}

    yield "copy on the device, read and written", copy


def _product(device: torch.device, dtype: torch.dtype) -> Row:
    return {"value": matrix_peak(device, dtype) / 1e12, "unit": "TFLOP/s", "ms": None}


def _attention(context: Context) -> Iterator[Task]:
    is_cuda = context.device.type == "cuda"
    backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "Flash": SDPBackend.FLASH_ATTENTION} if is_cuda else {}
    backends |= {"default": None}
    for name, model, rows, heads, tokens, width in _ATTENTIONS:
        if context.scale.is_rehearsal:
            tokens //= 64
        shape, dtype = (rows, heads, tokens, width), getattr(torch, context.scale.dtype(model))
        for backend, kind in backends.items():
            yield f"attention, {name}, {backend}", partial(_sdpa, context.device, shape, dtype, kind)
        if is_cuda:
            yield f"attention, {name}, varlen", partial(_varlen, context.device, shape, dtype)


def _attention_row(ms: float, shape: Sequence[int]) -> Row:
    rows, heads, tokens, width = shape
    return {"value": 4 * rows * heads * tokens**2 * width / ms / 1e9, "unit": "TFLOP/s", "ms": ms}


def _sdpa(device: torch.device, shape: Sequence[int], dtype: torch.dtype, backend: SDPBackend | None) -> Row:
    query, key, value = (torch.randn(*shape, device=device, dtype=dtype) for _ in range(3))
    with nullcontext() if backend is None else sdpa_kernel(backend):
        ms = mean_ms(lambda: F.scaled_dot_product_attention(query, key, value), device)
    return _attention_row(ms, shape)


def _varlen(device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> Row:
    """Measure attention over concatenated sequences, whose starts are data."""
    from torch.nn.attention.varlen import varlen_attn

    rows, heads, tokens, width = shape
    query, key, value = (torch.randn(rows * tokens, heads, width, device=device, dtype=dtype) for _ in range(3))
    starts = torch.arange(0, rows + 1, device=device, dtype=torch.int32) * tokens
    ms = mean_ms(lambda: varlen_attn(query, key, value, starts, starts, tokens, tokens), device)
    return _attention_row(ms, shape)


def _kernels(context: Context) -> Iterator[Task]:
    """Yield tasks for one image of the largest size and for one of each size, guided, at SDXL's first two levels."""
    device, dtype = context.device, getattr(torch, context.scale.dtype("sdxl"))
    sides, choices = context.scale.sides, ("triton", "torch") if device.type == "cuda" else ("torch",)
    for mix, chosen in (("L", sides[-1:]), ("SML", sides)):
        for level, channels in ((0, 320), (1, 640)):
            sizes = [(side // 8, side // 8) for side in chosen for _ in range(2)]
            layout = PatchLayout.build(sizes, 32 if not context.scale.is_rehearsal else 4)
            row_index, neighbours = index_tensors(layout, str(device))
            side = layout.patch_size >> level
            shape = (len(row_index), channels, side, side)
            calls = _calls(shape, dtype, device, row_index, neighbours, len(sizes))
            for name, call in calls.items():
                for kernels in choices:
                    label = f"{name}, {mix}, {'x'.join(map(str, shape))}, {kernels}"
                    yield label, partial(_kernel_row, call, kernels, device)


def _calls(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    row_index: Tensor,
    neighbours: Tensor,
    num_rows: int,
) -> dict[str, Callable[[str], tuple[Callable[[], Any], int]]]:
    """Return by name a function that makes a call for a choice of kernels, with the bytes that the call must move."""

    def patches() -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype).to(memory_format=torch.channels_last)

    def stats(kernels: str) -> tuple[Callable[[], Any], int]:
        x = patches()
        return partial(group_norm_stats, x, row_index, num_rows, _GROUPS, _EPS, kernels=kernels), x.nbytes

    def stitch(kernels: str) -> tuple[Callable[[], Any], int]:
        x, ones = patches(), torch.ones(shape[1], device=device, dtype=dtype)
        mean, rstd = torch.zeros(2, num_rows, _GROUPS, device=device)
        given = (x, mean, rstd, ones, ones, row_index, neighbours)
        return partial(group_norm_silu_stitch, *given, kernels=kernels), 2 * x.nbytes

    def halo(kernels: str) -> tuple[Callable[[], Any], int]:
        x = patches()
        return partial(halo_gather, x, neighbours, kernels=kernels), 2 * x.nbytes

    return {"statistics": stats, "norm and stitching": stitch, "stitching": halo}


def _kernel_row(call: Callable[[str], tuple[Callable[[], Any], int]], kernels: str, device: torch.device) -> Row:
    work, num_bytes = call(kernels)
    ms = mean_ms(work, device)
    return {"value": num_bytes / ms / 1e6, "unit": "GB/s", "ms": ms}


def _graph(context: Context) -> Iterator[Task]:
    """Yield tasks: time and bytes of recording 200 products, and of replaying them."""
    device, dtype = context.device, getattr(torch, context.scale.dtype("sdxl"))

    def recording() -> Row:
        side = 64 if context.scale.is_rehearsal else 1024
        weight, given = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))

        def work() -> Tensor:
            found = given
            for _ in range(200):
                found = torch.tanh(found @ weight)
            return found

        recorder = context.make_recorder(device)
        eager_ms, before = mean_ms(work, device), memory_mb(device)
        made: list[Any] = []
        record_ms = once_ms(lambda: made.extend(recorder(lambda _: work())), device)
        allocated, reserved = (now - old for now, old in zip(memory_mb(device), before, strict=True))
        context.notes["graph of 400 launches"] = {
            "eager_ms": eager_ms,
            "record_ms": record_ms,
            "replay_ms": mean_ms(made[0], device),
            "allocated_mb": allocated,
            "reserved_mb": reserved,
        }
        return {"value": reserved, "unit": "MB reserved", "ms": record_ms}

    yield "recording of 400 launches", recording
