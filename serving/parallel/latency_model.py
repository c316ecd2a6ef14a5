"""Step latency on several devices, from the latency without communication and a model of the link. No torch.

Source: fitted to DistriFusion's table 2 (8 A100s); its table 1 and figure 6 are held out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import linear_regression
from typing import Literal

from ...data.errors import UsageError

Waiting = Literal["nocomm", "sync", "displaced"]


@dataclass(frozen=True, slots=True)
class Link:
    """Cost of communication between ranks.

    Attributes:
        sync_s: seconds that every synchronous step waits, regardless of the bytes sent.
        bytes_per_s: bytes that a device receives per second.
        displaced_share: share of this time that a displaced step still takes, as NCCL's kernels use the same cores.
    """

    sync_s: float = 0.010
    bytes_per_s: float = 185e9
    displaced_share: float = 0.45

    def __post_init__(self) -> None:
        if not 0 <= self.sync_s < float("inf"):
            raise UsageError(f"--sync-ms is {1e3 * self.sync_s:g}, but it must be 0 or more")
        if not 0 < self.bytes_per_s < float("inf"):
            raise UsageError(f"--bandwidth is {self.bytes_per_s / 1e9:g} GB/s, but it must be positive")
        if not 0 <= self.displaced_share <= 1:
            raise UsageError(f"--displaced-share is {self.displaced_share:g}, but it must be a share from 0 to 1")

    def waiting_s(self, waiting: Waiting, num_ranks: int, num_bytes: float) -> float:
        """Return the seconds that communication adds to a step in which a device receives `num_bytes`."""
        if waiting == "nocomm" or num_ranks == 1:
            return 0.0
        waited_s = self.sync_s + num_bytes / self.bytes_per_s
        return waited_s if waiting == "sync" else self.displaced_share * waited_s


@dataclass(frozen=True, slots=True)
class ParallelLatency:
    """Latency of a step of one batch on n devices: a + b / n, plus the cost of communication.

    Attributes:
        serial_s: a, the part that every device repeats.
        shared_s: b, the part that devices share.
        link: link between the devices.
    """

    serial_s: float
    shared_s: float
    link: Link = Link()

    @classmethod
    def fit(cls, nocomm_s: Mapping[int, float], link: Link | None = None) -> "ParallelLatency":
        """Fit a and b to step latencies without communication, by number of devices; by least squares if more than two.

        Raises:
            UsageError: fewer than two numbers of devices were measured.
        """
        if len(nocomm_s) < 2:
            raise UsageError(f"steps were measured on {len(nocomm_s)} number of devices, but it must be two or more")
        line = linear_regression([1 / count for count in nocomm_s], list(nocomm_s.values()))
        return cls(line.intercept, line.slope, link or Link())

    def step_s(self, waiting: Waiting, num_ranks: int, num_bytes: float) -> float:
        """Return the seconds of a step in which a device receives `num_bytes`."""
        return self.serial_s + self.shared_s / num_ranks + self.link.waiting_s(waiting, num_ranks, num_bytes)

    def displaced_saves(self, num_ranks: int, num_bytes: float) -> float:
        """Return the share of a `sync` step that `displaced` saves."""
        return 1 - self.step_s("displaced", num_ranks, num_bytes) / self.step_s("sync", num_ranks, num_bytes)
