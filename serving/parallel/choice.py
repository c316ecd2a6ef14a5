"""Choice between synchronous and displaced calls, from the latency model and a measured link."""

import statistics
import time
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from .group import Communicator, Message
from .latency_model import Link, ParallelLatency

MIN_SAVED = 0.1
"""Share of a synchronous step that displaced calls must save."""
_ROUNDS = 7
"""Number of swaps measured. The first one waits for the other rank to begin."""


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """Mode in which ranks call the model, and the reason for it."""

    mode: Literal["sync", "displaced"]
    reason: str


def choose(latency: ParallelLatency, num_ranks: int, num_bytes: int) -> ModeChoice:
    """Choose the mode from the number of bytes that a rank receives in a call."""
    saved = latency.displaced_saves(num_ranks, num_bytes)
    step_ms = 1e3 * latency.step_s("sync", num_ranks, num_bytes)
    reason = f"displaced calls are expected to save {saved:.0%} of {step_ms:.3g} ms"
    return ModeChoice("displaced" if saved > MIN_SAVED else "sync", reason)


def measure_link(end: Communicator, num_exchanges: int, large: Tensor, displaced_share: float) -> Link:
    """Measure how long two ranks take to swap small and large tensors, as leaves do.

    Args:
        end: end of rank 0, while the other ranks follow.
        num_exchanges: number of times that ranks wait for each other in a call.
        large: tensor that takes much longer to swap than an empty one.
        displaced_share: as in `Link`.
    """
    small_s, large_s = (_swap_s(end, tensor) for tensor in (large[:1], large))
    return Link(num_exchanges * small_s, large.nbytes / max(large_s - small_s, 1e-9), displaced_share)


def swap_often(end: Communicator, rank: int, tensor: Tensor) -> list[float]:
    """Swap a tensor with a rank that does the same, `_ROUNDS` times; return the seconds of each swap."""
    taken = []
    for _ in range(_ROUNDS):
        start_s = time.perf_counter()
        end.swap({rank: tensor}, {rank: tensor.shape}, tensor.dtype).wait()
        taken.append(time.perf_counter() - start_s)
    return taken


def _swap_s(end: Communicator, tensor: Tensor) -> float:
    end.send(1, Message("swap", {}, {"tensor": tensor}))
    return statistics.median(swap_often(end, 1, tensor))
