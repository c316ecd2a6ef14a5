"""How much is measured in a full run, and in a smoke run. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """What all exhibits of a run share.

    Attributes:
        num_steps: denoising steps of every request.
        profile_prompts: requests of the block profile, and of the search for a schedule of the cache.
        combinations, repeats: of the latency profile.
    """

    num_steps: int = 50
    profile_prompts: int = 48
    combinations: int = 300
    repeats: int = 5


FULL = Scale()
QUICK = Scale(num_steps=24, profile_prompts=6, combinations=14, repeats=1)
