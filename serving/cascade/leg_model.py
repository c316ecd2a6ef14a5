"""A model of a cascade, as plans and workers need to know it. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass

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
    """

    num_steps: int
    guidance_scale: float
    batches: ModelTimes

    def batch_s(self, resolution: Resolution, size: int) -> float:
        """e(b) of a batch of so many, as long as the next larger one that was profiled."""
        index = next((place for place, each in enumerate(self.batches.batch_sizes) if each >= size), -1)
        return self.batches.latency_s[str(resolution)][index]


def policy_for(leg: Leg | None, models: Mapping[Leg, LegModel]) -> Policy:
    """Who joins the batch of a worker that serves a model, or both at once."""
    if leg is None:
        return SharedPolicy({model.num_steps: model.batch_s for model in models.values()})
    return CascadePolicy(models[leg].batch_s)
