"""Profile of a cascade's models on one machine, as `psctl profile cascade` measures it, and its file. No torch.

DiffServe section 3.3: e_i(b) is the time that a batch of b requests takes, and T_i(b) is the number of requests that a
worker draws a second in batches of b. Both are measured for each resolution, because each batch of a worker has one
resolution (run to completion); a mix of resolutions has the harmonic mean of their T_i(b), weighted by their shares.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ...data.errors import UsageError
from ...data.files import write_json
from ...data.parsing import parse
from ...data.records import read_json
from ...data.resolution import Resolution
from ...data.resolution import parse as parse_resolution
from ...data.run_facts import RunFacts
from ..scheduling.step_latency import TableLatency
from ..simulator.stage_times import StageTimes
from ..simulator.step_durations import SHARED, UNDISTURBED, ProfiledSteps, StepDurations
from .legs import LEGS, SIDES, Leg, Side
from .problem import ModelTimes
from .simulation import CascadeModel

KIND, VERSION = "psctl-cascade-profile", 1


@dataclass(frozen=True, slots=True)
class SizeTimes:
    """Times of one model for one resolution. Tuples are in the order of `LegProfile.batch_sizes`.

    Attributes:
        latency_s: e(b), from a batch's arrival at an idle worker to its last image, including the score of a light one.
        throughput: T(b), requests a second in consecutive batches.
        step_s: time of one step of a batch, with no other work on the worker.
        prepare_s, postprocess_s: times of the other stages for one request; the latter includes scoring.
    """

    latency_s: tuple[float, ...]
    throughput: tuple[float, ...]
    step_s: tuple[float, ...]
    prepare_s: float
    postprocess_s: float


@dataclass(frozen=True, slots=True)
class LegProfile:
    """One model of a cascade on one machine.

    Attributes:
        num_steps: number of steps of every image.
        guidance_scale: guidance scale of every image.
        batch_sizes: measured batch sizes, ascending.
        sizes: times by resolution, as in "128x128".
        switch_s: time that a worker is away while it switches to this model, with the model in memory.
        load_s: the same time if the model has to be loaded first, warm-up included.
        score_s: time of the discriminator for one image; 0 for the heavy model.
        facts: machine, model and settings of the measurement.
        strength: strength below 1 means that images start from noised light images; see `LegModel`.

    Raises:
        UsageError: a number is missing, or is not positive.
    """

    num_steps: int
    guidance_scale: float
    batch_sizes: tuple[int, ...]
    sizes: Mapping[str, SizeTimes]
    switch_s: float
    load_s: float
    score_s: float
    facts: RunFacts
    strength: float = 1.0

    def __post_init__(self) -> None:
        for name, times in self.sizes.items():
            _ = parse_resolution(name)
            _ = ModelTimes(
                self.batch_sizes, times.throughput, {name: times.latency_s, f"steps of {name}": times.step_s}
            )
        numbers = [number for each in self.sizes.values() for number in (each.prepare_s, each.postprocess_s)]
        if not all(0 <= number < math.inf for number in (*numbers, self.switch_s, self.load_s, self.score_s)):
            raise UsageError("a time is negative, or no number")
        if not 0 < self.strength <= 1:
            raise UsageError(f"strength is {self.strength!r}, but it must be above 0 and at most 1")

    def batches(self, weights: Mapping[str, float]) -> ModelTimes:
        """Return e(b) and T(b) for a mix of resolutions. Weights need not add up to 1.

        Raises UsageError: a resolution was not profiled.
        """
        self.require(weights)
        total = sum(weights.values())
        mixed = tuple(
            total / sum(weight / self.sizes[name].throughput[index] for name, weight in weights.items())
            for index in range(len(self.batch_sizes))
        )
        return ModelTimes(self.batch_sizes, mixed, {name: self.sizes[name].latency_s for name in weights})

    def costs(self) -> dict[str, float]:
        """Return the cost of an image of each resolution at batch size 1, relative to the mean over resolutions."""
        seconds = {name: 1 / times.throughput[0] for name, times in self.sizes.items()}
        mean = sum(seconds.values()) / len(seconds)
        return {name: each / mean for name, each in seconds.items()}

    def costs_of(self, names: Sequence[str]) -> list[float]:
        """Return the `costs` of images of these resolutions. Raises UsageError: one was not profiled."""
        self.require(names)
        costs = self.costs()
        return [costs[name] for name in names]

    def model(self, weights: Mapping[str, float]) -> CascadeModel:
        """Return the model for the simulator. Raises UsageError: a resolution was not profiled."""
        batches = self.batches(weights)
        sizes = {parse_resolution(name): self.sizes[name] for name in weights}
        steps = TableLatency(
            {
                (size,) * count: step_s
                for size, times in sizes.items()
                for count, step_s in zip(self.batch_sizes, times.step_s, strict=True)
            }
        )
        stages = StageTimes(
            {size: times.prepare_s for size, times in sizes.items()},
            {size: times.postprocess_s for size, times in sizes.items()},
        )
        # A worker on a CPU has one core for all stages.
        slowdown = SHARED if self.facts.device == "cpu" else UNDISTURBED
        durations = StepDurations(ProfiledSteps(steps), slowdown=slowdown)
        return CascadeModel(
            self.num_steps, self.guidance_scale, batches, durations, stages, self.switch_s, strength=self.strength
        )

    def require(self, names: Mapping[str, float] | Sequence[str]) -> None:
        """Raise UsageError unless all of these resolutions were profiled."""
        if missing := [name for name in names if name not in self.sizes]:
            raise UsageError(
                f"{', '.join(missing)} is not profiled for {self.facts.model}, only {', '.join(self.sizes)}: "
                "psctl profile cascade --resolutions ..."
            )


@dataclass(frozen=True, slots=True)
class CascadeProfile:
    """Profiles of both models of a cascade.

    Attributes:
        legs: profiles of the light and the heavy model.
        discriminator: checksum of the discriminator's file; its time is part of the light model's times.
        reused: profile of the heavy model when it starts from light images; None if not measured.
    """

    legs: Mapping[Leg, LegProfile]
    discriminator: str
    reused: LegProfile | None = None

    def serving(self, *, reuses_light: bool) -> Mapping[Leg, LegProfile]:
        """Return the profiles for serving, with or without reuse. Raises UsageError: reuse was not measured."""
        if not reuses_light:
            return self.legs
        if self.reused is None:
            raise UsageError(
                "--reuse-light: heavy images that start from light ones were not profiled: psctl profile cascade "
                "--reuse-light STRENGTH"
            )
        return {**self.legs, "heavy": self.reused}

    @property
    def resolutions(self) -> tuple[Resolution, ...]:
        """Resolutions that both models were profiled for, from small to large."""
        both = set(self.legs["light"].sizes) & set(self.legs["heavy"].sizes)
        return tuple(sorted(map(parse_resolution, both), key=lambda size: (size.pixels, size)))

    def standalone_s(self, resolution: Resolution) -> float:
        """Return e(1) of the heavy model, the unit of SLOs. Raises UsageError: the resolution was not profiled."""
        heavy = self.legs["heavy"]
        heavy.require([str(resolution)])
        return heavy.sizes[str(resolution)].latency_s[heavy.batch_sizes.index(1)]

    def save(self, path: Path) -> None:
        """Write the profile to a file, atomically. Raises OSError."""
        content = {"kind": KIND, "version": VERSION, "discriminator": self.discriminator}
        known: Mapping[Side, LegProfile | None] = {**self.legs, "reused": self.reused}
        write_json(path, content | {side: asdict(each) for side, each in known.items() if each is not None})


def read_profile(path: Path) -> CascadeProfile:
    """Read a profile that `CascadeProfile.save` has written.

    Raises UsageError: there is no such file, it is damaged, or it is not a profile of a cascade.
    """
    if not path.exists():
        raise UsageError(f"{path}: there is no such file; psctl profile cascade writes it")
    content = read_json(path, "the profile of a cascade")
    if content.get("kind") != KIND or content.get("version") != VERSION:
        raise UsageError(f"{path}: is not the profile of a cascade, version {VERSION}")
    where, remedy = f"{path}: the profile of a cascade is damaged", "measure it again"
    found: dict[Side, LegProfile] = {
        side: parse(LegProfile, content.get(side), f"{where}: {side}", remedy)
        for side in SIDES
        if side in LEGS or side in content
    }
    if any(each.batch_sizes[0] != 1 for each in found.values()):
        raise UsageError(f"{where}: batches of one request are missing; {remedy}")
    discriminator = parse(str, content.get("discriminator"), f"{where}: discriminator", remedy)
    return CascadeProfile({leg: found[leg] for leg in LEGS}, discriminator, found.get("reused"))
