"""A synthetic profile of a cascade: steps of 50 ms and 80 ms, half as long again for each further request."""

from patchedserve.serving.cascade.legs import Leg
from patchedserve.serving.cascade.profile import CascadeProfile, LegProfile, SizeTimes

from .latency_tables import CIRCUMSTANCES


def leg(num_steps: int, batch_sizes: tuple[int, ...] = (1, 2, 4, 8)) -> LegProfile:
    """Return the profile of a model with this number of steps."""
    sizes = {}
    for name, step_s in (("64x64", 0.05), ("128x128", 0.08)):
        steps = tuple(step_s * (1 + 0.5 * (count - 1)) for count in batch_sizes)
        latency = tuple(num_steps * each for each in steps)
        rates = tuple(count / each for count, each in zip(batch_sizes, latency, strict=True))
        sizes[name] = SizeTimes(latency, rates, steps, 0.0, 0.0)
    return LegProfile(num_steps, 4.0, batch_sizes, sizes, 0.2, 2.0, 0.0, CIRCUMSTANCES)


def profile(light_steps: int = 2, heavy_steps: int = 40) -> CascadeProfile:
    """Return the profile of both models."""
    legs: dict[Leg, LegProfile] = {"light": leg(light_steps), "heavy": leg(heavy_steps)}
    return CascadeProfile(legs, "discriminator")
