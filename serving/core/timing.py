"""Waiting for a device, and timing alternatives on it."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch

_REPEATS = 7
_WARMUP = 2


def synchronize(device: torch.device) -> None:
    """Wait until the device has done its work; does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def finish_stream(device: torch.device) -> None:
    """Wait until all work that this thread has launched is done, before tensors go to a thread with another stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def medians_us(runs: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Return median times in microseconds, to a tenth, by name. Runs take turns, so that disturbances affect all."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(_WARMUP + _REPEATS):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            synchronize(device)
            if repeat >= _WARMUP:
                samples[name].append((time.perf_counter() - start) * 1e6)
    return {name: round(statistics.median(times), 1) for name, times in samples.items()}
