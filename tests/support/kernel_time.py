"""Time for which a GPU computes, without the time of the CPU that launches its kernels."""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from patchedserve.serving.core.timing import synchronize


def kernel_s(work: Callable[[], object], device: torch.device) -> float | None:
    """Return the seconds for which kernels run, over all streams and without copies; None on a CPU."""
    if device.type != "cuda":
        work()
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        synchronize(device)
    found = profiler.key_averages()
    return sum(each.self_device_time_total for each in found if not each.key.startswith(("Mem", "Activity"))) / 1e6
