"""The two models of a cascade, written as in `emoji-xl:4,emoji-xl:50`. No torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from ...data.errors import UsageError
from ..models.defaults import ModelDefaults
from ..options import EngineOptions

Leg = Literal["light", "heavy"]
LEGS: tuple[Leg, Leg] = ("light", "heavy")
Side = Literal["light", "heavy", "reused"]
"""Origin of an image. `reused`: a heavy image that starts from the light one, and so differs from one from noise."""
SIDES: tuple[Side, ...] = get_args(Side)
CascadeSystemName = Literal[
    "diffserve",
    "diffserve-shared",
    "diffserve-static",
    "proteus",
    "clipper-light",
    "clipper-heavy",
    "diffserve-static-threshold",
    "diffserve-aimd",
    "diffserve-no-queue",
]
CASCADE_SYSTEM_NAMES: tuple[CascadeSystemName, ...] = get_args(CascadeSystemName)
"""Names of `systems.CASCADE_SYSTEMS`, defined here so that the help of the command line need not import scipy."""
ENGINE = EngineOptions(stages="threads")
"""Engine options of both models, in the profile and in workers, each of which has one core."""
_WITH_STEPS = re.compile(r"(?P<model>.+):(?P<steps>\d+)")


@dataclass(frozen=True, slots=True)
class LegSpec:
    """A model of a cascade, and its number of steps.

    Attributes:
        model: name, path or hub id.
        num_steps: number of steps of every image; None for the model's default.
    """

    model: str
    num_steps: int | None = None

    def __str__(self) -> str:
        return self.model if self.num_steps is None else f"{self.model}:{self.num_steps}"

    def steps_of(self, defaults: ModelDefaults) -> int:
        """Return the number of steps of its images."""
        return defaults.num_inference_steps if self.num_steps is None else self.num_steps


def parse_cascade(text: str) -> dict[Leg, LegSpec]:
    """Parse two models separated by a comma, light first, each with an optional `:STEPS` suffix.

    Raises UsageError: there are not two models, they do not differ, or a number of steps is not from 1 to 1000.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(parts):
        raise UsageError(
            f"--cascade is {text!r}, but it must be two models with a comma between, as emoji-xl:4,emoji-xl:50"
        )
    light, heavy = map(_parse, parts)
    if light == heavy:
        raise UsageError(f"--cascade is {text!r}, but light and heavy model must differ, at least in their steps")
    return {"light": light, "heavy": heavy}


def _parse(text: str) -> LegSpec:
    match = _WITH_STEPS.fullmatch(text)
    if match is None:
        return LegSpec(text)
    steps = int(match["steps"])
    if not 1 <= steps <= 1000:
        raise UsageError(f"--cascade gives {match['model']} {steps} steps, but they must be from 1 to 1000")
    return LegSpec(match["model"], steps)


def cascade_name(specs: Mapping[Leg, LegSpec]) -> str:
    """Return the cascade as users write it, which is also the name of its part of the workspace."""
    return ",".join(str(specs[leg]) for leg in LEGS)
