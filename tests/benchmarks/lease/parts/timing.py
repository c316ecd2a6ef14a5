"""Times of single operations, and the device memory in use after them."""

import time
from collections.abc import Callable

import torch

from patchedserve.serving.core.timing import synchronize

_LEAST_S = 0.05
_MOST_RUNS = 200


def mean_ms(work: Callable[[], object], device: torch.device) -> float:
    """Return the mean time of the runs that fit into a twentieth of a second, after two that are not counted."""
    for _ in range(2):
        work()
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    count = min(_MOST_RUNS, max(1, round(_LEAST_S / max(1e-6, time.perf_counter() - start))))
    start = time.perf_counter()
    for _ in range(count):
        work()
    synchronize(device)
    return (time.perf_counter() - start) / count * 1e3


def once_ms(work: Callable[[], object], device: torch.device) -> float:
    """Return the time of one run."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def memory_mb(device: torch.device) -> tuple[float, float]:
    """Return allocated and reserved memory of the device in megabytes; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0, 0.0
    return torch.cuda.memory_allocated(device) / 1e6, torch.cuda.memory_reserved(device) / 1e6
