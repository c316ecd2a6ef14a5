"""A model of a cascade, as plans and workers need to know it. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...data.requests import steps_taken
from ...data.resolution import Resolution
from ..scheduling.policies.base import Policy
from .legs import Leg
from .policy import CascadePolicy, SharedPolicy
from .problem import ModelTimes


@dataclass(frozen=True, slots=True)
class LegModel:
    """A model, as plans and workers need to know it.

    Attributes:
        num_steps, guidance_scale: of its images.
        batches: e(b) and T(b); of the light model with scoring.
        strength: of the heavy model, below 1: deferred requests start from their light image, which is noised so far
            (DiffServe section 5, "reuse"), and take that share of the steps.
    """

    num_steps: int
    guidance_scale: float
    batches: ModelTimes
    strength: float = field(default=1.0, kw_only=True)

    @property
    def num_taken(self) -> int:
        """Steps of a deferred request."""
        return steps_taken(self.num_steps, self.strength)

    def batch_s(self, resolution: Resolution, size: int) -> float:
        """e(b) of a batch of so many, as long as the next larger one that was profiled."""
        index = next((place for place, each in enumerate(self.batches.batch_sizes) if each >= size), -1)
        return self.batches.latency_s[str(resolution)][index]


def policy_for(leg: Leg | None, models: Mapping[Leg, LegModel]) -> Policy:
    """Who joins the batch of a worker that serves a model, or both at once."""
    if leg is None:
        counts = ((each, count) for each in models.values() for count in (each.num_steps, each.num_taken))
        return SharedPolicy({count: each.batch_s for each, count in counts})
    return CascadePolicy(models[leg].batch_s)
