"""How several devices draw one image. No torch."""

from dataclasses import dataclass
from typing import Literal, get_args

from ...data.errors import UsageError

Mode = Literal["sync", "displaced"]
NormMode = Literal["corrected", "sync", "stale", "separate"]


@dataclass(frozen=True, slots=True)
class NormOptions:
    """What GroupNorm of displaced rows goes by (DistriFusion section 4, figure 8).

    Attributes:
        mode: `corrected`: what all strips had in the call before, corrected by the own strip's change. `sync`: waits
            for all. `stale`: the own strip's as it is, of the others as they were. `separate`: the own strip's alone.
        bessel: multiplies the variance by N / (N - 1), as the authors' code does; for comparisons only.
        guard: share of the own strip's variance below which the corrected one is not trusted.
    """

    mode: NormMode = "corrected"
    bessel: bool = False
    guard: float = 0.0

    def __post_init__(self) -> None:
        if self.mode not in get_args(NormMode):
            raise UsageError(f"--gn is {self.mode!r}, but it must be one of {', '.join(get_args(NormMode))}")
        if not 0 <= self.guard < 1:
            raise UsageError(f"guard is {self.guard}, but it must be a share from 0 to 1")


@dataclass(frozen=True, slots=True)
class ParallelOptions:
    """How several devices draw one image.

    Attributes:
        mode: `sync`: every rank waits for the others, and images are exact. `displaced`: after `warmup` + 1 calls of
            the model, ranks go by what the others had in the call before.
        norms: see there.
        warmup: calls after the first in which a request waits for all.
        splits_guidance: whether half of the ranks take the rows without the text, where a call has both.
        shares: of the ranks in an image; None for even ones.
    """

    mode: Mode = "sync"
    norms: NormOptions = NormOptions()
    warmup: int = 4
    splits_guidance: bool = False
    shares: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise UsageError(f"--parallel-mode is {self.mode!r}, but it must be one of {', '.join(get_args(Mode))}")
        if self.warmup < 0:
            raise UsageError(f"--parallel-warmup is {self.warmup}, but it must be 0 or more")
        if self.shares is not None and not all(0 < share < float("inf") for share in self.shares):
            raise UsageError(f"--parallel-shares are {self.shares}, but all must be positive")
