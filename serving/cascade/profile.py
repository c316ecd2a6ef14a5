"""What is known of a cascade's models on one machine: what `psctl profile cascade` measures, and its file. No torch.

DiffServe section 3.3: e_i(b), how long a batch of b requests takes, and T_i(b), how many requests a worker draws a
second in batches of b. Both are measured for each resolution, as a worker's batches are of one (run to completion); a
mix of resolutions has the harmonic mean of their T_i(b), weighted by their shares.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ...data.errors import UsageError
from ...data.files import write_json
from ...data.resolution import Resolution, parse
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
    """Times of one model for one resolution; those by batch size in the order of `LegProfile.batch_sizes`.

    Attributes:
        latency_s: e(b), from a batch's arrival at an idle worker to its last image, scored if it is light.
        throughput: T(b), requests a second where batches follow each other.
        step_s: one step of a batch, with nothing beside it.
        prepare_s, postprocess_s: the other stages of one request; the latter with its score.
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
        num_steps: of every image.
        guidance_scale: of every image.
        batch_sizes: that were measured, ascending.
        sizes: by resolution, as in "128x128".
        switch_s: how long a worker is away that changes to this model, which lies in memory.
        load_s: how long it takes where the model has to be loaded first, warm-up included.
        score_s: what the discriminator takes for one image; 0 of the heavy model.
        facts: what it was measured on.
        strength: below 1, images start from others that are noised so far; see `LegModel`.

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
            _ = ModelTimes(
                self.batch_sizes, times.throughput, {name: times.latency_s, f"steps of {name}": times.step_s}
            )

    def batches(self, weights: Mapping[str, float]) -> ModelTimes:
        """e(b) and T(b) for a mix of resolutions; weights need not sum up to 1.

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
        """What an image alone takes of each resolution, relative to their mean."""
        seconds = {name: 1 / times.throughput[0] for name, times in self.sizes.items()}
        mean = sum(seconds.values()) / len(seconds)
        return {name: each / mean for name, each in seconds.items()}

    def costs_of(self, names: Sequence[str]) -> list[float]:
        """`costs` of images of these resolutions. Raises UsageError: one was not profiled."""
        self.require(names)
        costs = self.costs()
        return [costs[name] for name in names]

    def model(self, weights: Mapping[str, float]) -> CascadeModel:
        """The model as the simulator takes it. Raises as `batches`."""
        batches = self.batches(weights)
        sizes = {parse(name): self.sizes[name] for name in weights}
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

    def to_json(self) -> dict[str, Any]:
        """For the file."""
        return {
            "num_steps": self.num_steps,
            "guidance_scale": self.guidance_scale,
            "batch_sizes": list(self.batch_sizes),
            "sizes": {
                name: {
                    "latency_s": list(times.latency_s),
                    "throughput": list(times.throughput),
                    "step_s": list(times.step_s),
                    "prepare_s": times.prepare_s,
                    "postprocess_s": times.postprocess_s,
                }
                for name, times in self.sizes.items()
            },
            "switch_s": self.switch_s,
            "load_s": self.load_s,
            "score_s": self.score_s,
            "facts": self.facts.to_json(),
            "strength": self.strength,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Raises KeyError, TypeError or ValueError if it is not what `to_json` gives."""
        sizes = {
            str(parse(name)): SizeTimes(
                tuple(each["latency_s"]),
                tuple(each["throughput"]),
                tuple(each["step_s"]),
                each["prepare_s"],
                each["postprocess_s"],
            )
            for name, each in data["sizes"].items()
        }
        found = cls(
            data["num_steps"],
            data["guidance_scale"],
            tuple(data["batch_sizes"]),
            sizes,
            data["switch_s"],
            data["load_s"],
            data["score_s"],
            RunFacts.from_json(data["facts"]),
            data.get("strength", 1.0),
        )
        numbers = [number for each in sizes.values() for number in (each.prepare_s, each.postprocess_s)]
        numbers += [found.switch_s, found.load_s, found.score_s]
        if not all(0 <= number < math.inf for number in numbers):
            raise ValueError("a time is negative, or no number")
        if not 0 < found.strength <= 1:
            raise ValueError(f"strength is {found.strength!r}")
        return found


@dataclass(frozen=True, slots=True)
class CascadeProfile:
    """Both models.

    Attributes:
        legs: light and heavy.
        discriminator: checksum of the discriminator's file, whose time is in the light model's.
        reused: the heavy model where it starts from light images; None where that was not measured.
    """

    legs: Mapping[Leg, LegProfile]
    discriminator: str
    reused: LegProfile | None = None

    def serving(self, *, reuses_light: bool) -> Mapping[Leg, LegProfile]:
        """Both models as they serve. Raises UsageError: reuse was not measured."""
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
        """That both models were profiled for, from small to large."""
        both = set(self.legs["light"].sizes) & set(self.legs["heavy"].sizes)
        return tuple(sorted(map(parse, both), key=lambda size: (size.pixels, size)))

    def standalone_s(self, resolution: Resolution) -> float:
        """e(1) of the heavy model: what SLOs are multiples of. Raises UsageError: it was not profiled."""
        heavy = self.legs["heavy"]
        heavy.require([str(resolution)])
        return heavy.sizes[str(resolution)].latency_s[heavy.batch_sizes.index(1)]

    def save(self, path: Path) -> None:
        """Write it, atomically. Raises OSError."""
        content = {"kind": KIND, "version": VERSION, "discriminator": self.discriminator}
        known: Mapping[Side, LegProfile | None] = {**self.legs, "reused": self.reused}
        write_json(path, content | {side: each.to_json() for side, each in known.items() if each is not None})


def read_profile(path: Path) -> CascadeProfile:
    """Read what `CascadeProfile.save` has written.

    Raises UsageError: there is no such file, or it is damaged, or something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"{path}: there is no such file; psctl profile cascade writes it") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read as the profile of a cascade ({error})") from error
    if not isinstance(content, dict) or content.get("kind") != KIND or content.get("version") != VERSION:
        raise UsageError(f"{path}: is not the profile of a cascade, version {VERSION}")
    try:
        found: dict[Side, LegProfile] = {
            side: LegProfile.from_json(content[side]) for side in SIDES if side in LEGS or side in content
        }
        if any(each.batch_sizes[0] != 1 for each in found.values()):
            raise ValueError("batches of one request are missing")
        return CascadeProfile({leg: found[leg] for leg in LEGS}, content["discriminator"], found.get("reused"))
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: the profile of a cascade is damaged ({error}); measure it again") from error
