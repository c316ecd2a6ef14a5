"""Samplers by their names in options. No torch."""

from collections.abc import Mapping
from typing import Any, Literal

SamplerName = Literal[
    "ddim",
    "ddpm",
    "deis",
    "dpm++",
    "dpm++-sde",
    "dpm++-singlestep",
    "euler",
    "euler-ancestral",
    "heun",
    "kdpm2",
    "kdpm2-ancestral",
    "lcm",
    "lms",
    "pndm",
    "tcd",
    "unipc",
]

SCHEDULERS: Mapping[SamplerName, tuple[str, Mapping[str, Any]]] = {
    "ddim": ("DDIMScheduler", {"clip_sample": False}),
    "ddpm": ("DDPMScheduler", {"clip_sample": False}),
    "deis": ("DEISMultistepScheduler", {}),
    "dpm++": ("DPMSolverMultistepScheduler", {}),
    "dpm++-sde": ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
    "dpm++-singlestep": ("DPMSolverSinglestepScheduler", {"lower_order_final": True}),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler-ancestral": ("EulerAncestralDiscreteScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}),
    "kdpm2": ("KDPM2DiscreteScheduler", {}),
    "kdpm2-ancestral": ("KDPM2AncestralDiscreteScheduler", {}),
    "lcm": ("LCMScheduler", {}),
    "lms": ("LMSDiscreteScheduler", {}),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}),
    "tcd": ("TCDScheduler", {}),
    "unipc": ("UniPCMultistepScheduler", {}),
}
"""diffusers' scheduler of each, with its options in addition to those of the scheduler that it replaces."""
