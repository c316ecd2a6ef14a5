"""For how long a GPU computes, whatever the processor that tells it what to do takes meanwhile."""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from patchedserve.serving.core.timing import synchronize


def kernel_s(work: Callable[[], object], device: torch.device) -> float | None:
    """Seconds for which kernels run, all streams together and copies left out; None on a CPU."""
    if device.type != "cuda":
        work()
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        synchronize(device)
    found = profiler.key_averages()
    return sum(each.self_device_time_total for each in found if not each.key.startswith(("Mem", "Activity"))) / 1e6
