"""Which two models a cascade is of: `emoji-xl:4,emoji-xl:50`. No torch."""

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
"""Whose image: a heavy one that starts from the light one is another image than one that starts from noise."""
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
"""Here, because the command line reads them, and its help must not wait for scipy: see `systems`."""
ENGINE = EngineOptions(stages="threads")
"""Of both models: where they are profiled, and in workers, each of which has one processor."""
_WITH_STEPS = re.compile(r"(?P<model>.+):(?P<steps>\d+)")


@dataclass(frozen=True, slots=True)
class LegSpec:
    """A model of a cascade, and how many steps it takes.

    Attributes:
        model: name, path or hub id.
        num_steps: of every image; None for the model's own number.
    """

    model: str
    num_steps: int | None = None

    def __str__(self) -> str:
        return self.model if self.num_steps is None else f"{self.model}:{self.num_steps}"

    def steps_of(self, defaults: ModelDefaults) -> int:
        """How many steps its images take."""
        return defaults.num_inference_steps if self.num_steps is None else self.num_steps


def parse_cascade(text: str) -> dict[Leg, LegSpec]:
    """Two models with a comma between, light first, each with `:STEPS` behind it where it does not take its own number.

    Raises UsageError: they are not two, not different, or a number of steps is 0.
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
    """As the user writes it, which names its part of the workspace."""
    return ",".join(str(specs[leg]) for leg in LEGS)
