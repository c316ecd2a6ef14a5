"""Options for drawing one image on several devices. No torch."""

import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from ...data.errors import UsageError

Mode = Literal["auto", "sync", "displaced", "naive"]
NormMode = Literal["corrected", "sync", "stale", "separate"]
Choice = Literal["auto", "on", "off"]
TextMode = Literal["auto", "replicate", "split"]
DecodeMode = Literal["whole", "strips"]
Backend = Literal["auto", "gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class NormOptions:
    """Statistics that GroupNorm uses for displaced rows (DistriFusion section 4, figure 8).

    Attributes:
        mode: `corrected`: statistics of all strips in the previous call, corrected by the change in the rank's own
            strip. `sync`: current statistics of all strips, for which ranks wait. `stale`: current statistics of the
            rank's own strip with those of the others from the previous call. `separate`: statistics of the rank's own
            strip alone.
        guard: share of the own strip's variance below which the corrected variance is not used. At 0, as in the paper,
            images of small strips break (`psctl eval parallel`, figure 8).
    """

    mode: NormMode = "corrected"
    guard: float = 0.25

    def __post_init__(self) -> None:
        _check_choices(self, {"mode": ("--gn", NormMode)})
        if not 0 <= self.guard < 1:
            raise UsageError(f"guard is {self.guard}, but it must be a share from 0 to 1")


@dataclass(frozen=True, slots=True)
class ParallelOptions:
    """Options for drawing one image on several devices.

    Attributes:
        ranks: number of ranks: "3", or "virtual:3" for threads of this process of which one runs at a time.
        mode: `sync`: every rank waits for the others, and images are exact. `displaced`: after `warmup` + 1 calls of
            the model, ranks use what the others had in the previous call. `naive`: the unmodified model on strips of
            rows and strips of columns, in turn (DistriFusion section 5.1). `auto`: displaced if it is expected to pay.
        norms: options of GroupNorm.
        warmup: number of calls after the first in which a request waits for all ranks.
        cfg_split: whether half of the ranks take the rows without the text, if a call has both kinds; `auto`: if the
            number of ranks is even.
        shares: shares of the ranks in an image, separated by commas; None for equal shares.
        text: whether every rank computes the whole text stream of a model that has one, or a part of it.
        from_pixels: number of pixels below which an image is drawn whole by one rank; "auto": an image is drawn whole
            if the step, with its other images, then ends sooner according to measurements at the start.
        may_use_fewer: whether images that are too low for all ranks are drawn by fewer, instead of being refused.
        decode: whether rank 0 alone decodes images, or all ranks do so in strips.
        backend: transport of tensors between processes. `auto`: shared memory on one machine, otherwise gloo. `nccl`:
            as auto, but tensors of leaves go from GPU to GPU.
        devices: devices of the ranks, separated by commas; None for the model's device, or one GPU each on GPUs.
        timeout_s: longest time that ranks may keep each other waiting in a call.
        memory_mb: most memory that a rank uses for tensors of the others in displaced calls; beyond it, calls are
            synchronous.

    Raises:
        UsageError: if a value is not allowed.
    """

    ranks: str = "1"
    mode: Mode = "auto"
    norms: NormOptions = field(default_factory=NormOptions)
    warmup: int = 4
    cfg_split: Choice = "auto"
    shares: str | None = None
    text: TextMode = "auto"
    from_pixels: str = "0"
    may_use_fewer: bool = False
    decode: DecodeMode = "whole"
    backend: Backend = "auto"
    devices: str | None = None
    timeout_s: float = 60.0
    memory_mb: int = 8192

    def __post_init__(self) -> None:
        if not re.fullmatch(r"(virtual:)?[1-9]\d{0,2}", self.ranks):
            raise UsageError(f"--parallel is {self.ranks!r}, but it must be a number of ranks, as 2 or virtual:2")
        _check_choices(
            self,
            {
                "mode": ("--parallel-mode", Mode),
                "cfg_split": ("--cfg-split", Choice),
                "text": ("--parallel-text", TextMode),
                "decode": ("--parallel-decode", DecodeMode),
                "backend": ("--parallel-backend", Backend),
            },
        )
        for name, value, least in (
            ("warmup", self.warmup, 0),
            ("memory", self.memory_mb, 1),
        ):
            if value < least:
                raise UsageError(f"--parallel-{name} is {value}, but it must be {least} or more")
        if not re.fullmatch(r"auto|\d{1,12}", self.from_pixels):
            raise UsageError(f"--parallel-from is {self.from_pixels!r}, but it must be a number of pixels, or auto")
        if self.is_virtual and self.backend != "auto":
            raise UsageError(f"--parallel-backend {self.backend} is for processes, but --parallel is {self.ranks}")
        if self.divides_by_time and self.mode not in ("auto", "sync"):
            raise UsageError(
                "--parallel-from auto draws an image now in strips, now whole, which is exact with --parallel-mode "
                f"sync only, not {self.mode}: try a number of pixels"
            )
        if not 0 < self.timeout_s < float("inf"):
            raise UsageError(f"--parallel-timeout is {self.timeout_s}, but it must be a positive number of seconds")
        names = self.device_names
        if names is not None and not all(re.fullmatch(r"cpu|cuda(:\d+)?", name) for name in names):
            raise UsageError(f"--parallel-devices is {self.devices!r}, but each must be cpu, cuda or cuda:N")
        if names is not None and len(names) != self.count:
            raise UsageError(f"--parallel-devices names {len(names)}, but there are {self.count} ranks")
        if len(self.weights) != self.count:
            raise UsageError(f"--parallel-shares are {len(self.weights)}, but there are {self.count} ranks")

    @property
    def is_virtual(self) -> bool:
        """Whether the ranks are threads of one process."""
        return self.ranks.startswith("virtual:")

    @property
    def count(self) -> int:
        """Number of ranks."""
        return int(self.ranks.removeprefix("virtual:"))

    @property
    def is_on(self) -> bool:
        """Whether there is more than one rank, virtual or not."""
        return self.count > 1

    @property
    def divides_by_time(self) -> bool:
        """Whether each step decides, from measured times, which images are drawn in strips."""
        return self.from_pixels == "auto"

    @property
    def min_pixels(self) -> int:
        """Smallest number of pixels of images that are drawn in strips; 0 if measured times decide."""
        return 0 if self.divides_by_time else int(self.from_pixels)

    @property
    def device_names(self) -> list[str] | None:
        """Names of the given devices; None if none are given."""
        return None if self.devices is None else [name.strip() for name in self.devices.split(",")]

    @property
    def weights(self) -> tuple[float, ...]:
        """Share of every rank in an image, not normalised. Raises UsageError if a share is not a positive number."""
        if self.shares is None:
            return (1.0,) * self.count
        try:
            weights = tuple(float(share) for share in self.shares.split(","))
        except ValueError:
            weights = (0.0,)
        if not all(0 < weight < float("inf") for weight in weights):
            raise UsageError(f"--parallel-shares are {self.shares!r}, but they must be positive numbers, as 2,1")
        return weights

    def identity(self) -> dict[str, Any]:
        """Return the options that affect the resulting images."""
        names = ("mode", "norms", "warmup", "cfg_split", "shares", "text", "from_pixels", "decode")
        found = asdict(self)
        return {"ranks": self.count, **{name: found[name] for name in names}}

    def splits_guidance(self, count: int) -> bool:
        """Return whether half of `count` ranks take the rows without the text."""
        return self.cfg_split != "off" and count % 2 == 0


def _check_choices(options: object, fields: dict[str, tuple[str, object]]) -> None:
    for name, (flag, allowed) in fields.items():
        if getattr(options, name) not in get_args(allowed):
            raise UsageError(
                f"{flag} is {getattr(options, name)!r}, but it must be one of {', '.join(get_args(allowed))}"
            )
