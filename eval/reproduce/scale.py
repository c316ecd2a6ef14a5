"""Extent of the measurements in a full run and in a smoke run. This module imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """Settings that all exhibits of a run share.

    Attributes:
        num_steps: number of denoising steps of every request.
        profile_prompts: number of requests in the block profile, and in the search for a cache schedule.
        combinations, repeats: number of combinations in the latency profile, and of repeats of each.
    """

    num_steps: int = 50
    profile_prompts: int = 48
    combinations: int = 300
    repeats: int = 5


FULL = Scale()
QUICK = Scale(num_steps=24, profile_prompts=6, combinations=14, repeats=1)
