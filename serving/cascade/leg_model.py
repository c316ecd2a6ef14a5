"""Parameters of a cascade's model for plans and workers, and the policy of a worker. No torch."""

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
    """Parameters of a cascade's model for plans and workers.

    Attributes:
        num_steps, guidance_scale: number of steps and guidance scale of its images.
        batches: e(b) and T(b); for the light model they include scoring.
        strength: noise strength of the heavy model. Below 1, deferred requests start from their light image with this
            strength of noise (DiffServe section 5, "reuse"), and take that share of the steps.
    """

    num_steps: int
    guidance_scale: float
    batches: ModelTimes
    strength: float = field(default=1.0, kw_only=True)

    @property
    def num_taken(self) -> int:
        """Number of steps that a deferred request takes."""
        return steps_taken(self.num_steps, self.strength)

    def batch_s(self, resolution: Resolution, size: int) -> float:
        """Return e(b) for a batch of `size` requests: that of the next larger profiled size, or else the largest."""
        index = next((place for place, each in enumerate(self.batches.batch_sizes) if each >= size), -1)
        return self.batches.latency_s[str(resolution)][index]


def policy_for(leg: Leg | None, models: Mapping[Leg, LegModel]) -> Policy:
    """Return the policy of a worker that serves this model, or both at once (None)."""
    if leg is None:
        counts = ((each, count) for each in models.values() for count in (each.num_steps, each.num_taken))
        return SharedPolicy({count: each.batch_s for each, count in counts})
    return CascadePolicy(models[leg].batch_s)
