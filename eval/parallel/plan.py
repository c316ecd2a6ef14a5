"""Sets of images for DistriFusion's comparisons, and the paper's claims about them. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from ...data.errors import UsageError
from ...serving.parallel.options import NormMode, NormOptions, ParallelOptions
from ..compare.paired import PairedResult

Part = Literal["table1", "fig7", "fig8"]
PARTS: tuple[Part, ...] = get_args(Part)
WARMUPS = (0, 1, 2, 4)
FEW_STEPS = 10
"""Number of steps in figure 7."""
_NEAR = 1.1
_MAX_FID = 8.0


@dataclass(frozen=True, slots=True)
class ParallelSetting:
    """Settings with which a set is drawn.

    Attributes:
        name: name of the set.
        options: options of the ranks; None for the original.
        few_steps: whether the set is drawn in `FEW_STEPS` steps of DPM-Solver++ (figure 7).
    """

    name: str
    options: ParallelOptions | None
    few_steps: bool = False

    @property
    def original(self) -> str:
        """Name of the set that this one is compared with."""
        return name_of_original(few_steps=self.few_steps)


@dataclass(frozen=True, slots=True)
class Claim:
    """Claim of the paper about two sets.

    Attributes:
        text: the claim in words.
        metric: `psnr`, `lpips` or `fid_to_first` to the original, or `fid` to real images.
        worse, better: names of the sets; `worse` is the original if the claim is about a loss.
        kind: `better` if it is better beyond the interval; `no worse` if the interval is not entirely on the worse
            side; `near` if it is at most a tenth worse; `within` if its FID is at most 8 above.
    """

    text: str
    metric: str
    worse: str
    better: str
    kind: Literal["better", "no worse", "near", "within"] = "better"

    def holds(self, found: PairedResult) -> bool:
        """Return whether the claim holds, given the paired difference of the better set from the worse one."""
        if self.kind == "near":
            return found.second <= _NEAR * found.first
        if self.kind == "within":
            return found.difference <= _MAX_FID
        if found.low is None or found.high is None:
            return False
        is_higher = self.metric == "psnr"
        if self.kind == "no worse":
            return found.high >= 0 if is_higher else found.low <= 0
        return found.low > 0 if is_higher else found.high < 0


def name_of_original(*, few_steps: bool = False) -> str:
    """Return the name of the set of one device."""
    return f"original, {FEW_STEPS} steps" if few_steps else "original"


def _displaced(count: int) -> str:
    return f"displaced, n = {count}"


def _naive(count: int) -> str:
    return f"naive, n = {count}"


def _warm(warmup: int) -> str:
    return f"warm-up {warmup}, {FEW_STEPS} steps"


def _norm(mode: str, count: int) -> str:
    return _displaced(count) if mode == "corrected" else f"{mode} GroupNorm, n = {count}"


_UNGUARDED = "unguarded"
"""Corrected GroupNorm as in equation 2, which trusts every variance that is not negative."""


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """Sets to draw, and claims about them.

    Attributes:
        num_ranks: numbers of ranks of table 1, ascending; figures 7 and 8 use the largest.
        parts: parts of the paper.
        warmup: warm-up steps of all sets but those of figure 7.

    Raises:
        UsageError: these are not numbers of two ranks or more, or there is no such part.
    """

    num_ranks: tuple[int, ...] = (2, 4, 8)
    parts: tuple[Part, ...] = PARTS
    warmup: int = 4

    def __post_init__(self) -> None:
        if not self.num_ranks or min(self.num_ranks) < 2 or sorted(set(self.num_ranks)) != list(self.num_ranks):
            raise UsageError(f"--num-ranks are {self.num_ranks}, but they must be rising numbers of 2 or more")
        if not self.parts or not set(self.parts) <= set(PARTS):
            raise UsageError(f"--parts are {self.parts}, but they must be some of {', '.join(PARTS)}")

    def settings(self) -> list[ParallelSetting]:
        """Return all sets, each once, the original first."""
        return list({setting.name: setting for setting in self._settings()}.values())

    def _settings(self) -> Iterator[ParallelSetting]:
        if set(self.parts) != {"fig7"}:
            yield ParallelSetting(name_of_original(), None)
        most = self.num_ranks[-1]
        if "table1" in self.parts:
            for count in self.num_ranks:
                yield ParallelSetting(_displaced(count), self._options(count))
                yield ParallelSetting(_naive(count), ParallelOptions(f"virtual:{count}", mode="naive", cfg_split="off"))
        if "fig8" in self.parts:
            for mode in get_args(NormMode):
                yield ParallelSetting(_norm(mode, most), self._options(most, NormOptions(mode)))
            yield ParallelSetting(_norm(_UNGUARDED, most), self._options(most, NormOptions(guard=0.0)))
        if "fig7" in self.parts:
            yield ParallelSetting(name_of_original(few_steps=True), None, few_steps=True)
            for warmup in WARMUPS:
                yield ParallelSetting(_warm(warmup), self._options(most, warmup=warmup), few_steps=True)

    def _options(self, count: int, norms: NormOptions | None = None, warmup: int | None = None) -> ParallelOptions:
        return ParallelOptions(
            f"virtual:{count}",
            mode="displaced",
            norms=norms or NormOptions(),
            warmup=self.warmup if warmup is None else warmup,
            cfg_split="off",
        )

    def claims(self) -> list[Claim]:
        """Return the paper's claims about the sets."""
        return list(self._claims())

    def _claims(self) -> Iterator[Claim]:
        if "table1" in self.parts:
            for count in self.num_ranks:
                for metric in ("psnr", "lpips", "fid_to_first"):
                    text = f"table 1: displaced is nearer to the original than naive, n = {count}"
                    yield Claim(text, metric, _naive(count), _displaced(count))
                text = f"table 1: FID to real images within 8 of the original's, n = {count}"
                yield Claim(text, "fid", name_of_original(), _displaced(count), "within")
            for fewer, more in pairwise(self.num_ranks):
                for metric in ("psnr", "lpips"):
                    text = f"table 1: n = {more} is further from the original than n = {fewer}"
                    yield Claim(text, metric, _displaced(more), _displaced(fewer))
        if "fig7" in self.parts:
            for shorter, longer in pairwise(WARMUPS):
                text = f"figure 7: LPIPS falls from a warm-up of {shorter} to {longer}"
                yield Claim(text, "lpips", _warm(shorter), _warm(longer))
        if "fig8" in self.parts:
            for mode in ("corrected", _UNGUARDED):
                yield from self._claims_of_norms(mode)

    def _claims_of_norms(self, mode: str) -> Iterator[Claim]:
        corrected, sync = (_norm(each, self.num_ranks[-1]) for each in (mode, "sync"))
        for worse in ("stale", "separate"):
            text = f"figure 8: {mode} is better than {worse}"
            yield Claim(text, "lpips", _norm(worse, self.num_ranks[-1]), corrected)
        yield Claim(f"figure 8: sync is no worse than {mode}", "lpips", corrected, sync, "no worse")
        yield Claim(f"figure 8: {mode} is within 10 % of sync", "lpips", sync, corrected, "near")


def parse_ranks(text: str) -> tuple[int, ...]:
    """Parse comma-separated numbers of ranks. Raises UsageError."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--num-ranks is {text!r}, but it must be whole numbers with commas between") from None


def parse_parts(text: str) -> tuple[Part, ...]:
    """Parse comma-separated names of parts. Raises UsageError."""
    found: Sequence[str] = [part.strip() for part in text.split(",")]
    if unknown := [part for part in found if part not in PARTS]:
        raise UsageError(f"--parts names {unknown[0]!r}, but they must be some of {', '.join(PARTS)}")
    return tuple(part for part in PARTS if part in found)
