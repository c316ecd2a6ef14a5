"""Share of the machine's matrix peak that a step reaches: operations are counted, the peak is measured."""

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from ...serving.core.timing import synchronize

_SIDE = {"cpu": 2048, "cuda": 8192}
_MIN_S = 0.3
_MAX_PRODUCTS = 50


@cache
def matrix_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of the fastest of several products of large square matrices.

    A multiply-add is two operations. A CPU uses torch's current number of threads.
    """
    side = _SIDE[device.type]
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out, times = torch.empty(side, side, device=device, dtype=dtype), [0.0]
    while len(times) < 4 or (sum(times) < _MIN_S and len(times) <= _MAX_PRODUCTS):
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * side**3 / min(times[2:])


def count_operations(work: Callable[[], object]) -> int:
    """Return the operations of all matrix products, convolutions and attentions in `work`, which runs once, eagerly."""
    # torch counts attention on CUDA only.
    counted: dict[Any, Any] = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _count_attention}
    with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False, custom_mapping=counted) as counter:
        work()
    return counter.get_total_flops()


def _count_attention(query: Any, key: Any, value: Any, *_: object, **__: object) -> int:
    return sdpa_flop_count(query, key, value)
