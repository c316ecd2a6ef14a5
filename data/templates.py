"""Kinds and contents of the records of templates (InstGenIE section 3.1)."""

import re
from typing import Literal, get_args

TemplateKind = Literal["noised", "trajectory"]
"""Source of a record: any image, noised at each step, or the generation that drew the image."""
TEMPLATE_KINDS: tuple[TemplateKind, ...] = get_args(TemplateKind)

Keep = Literal["outputs", "kv", "all"]
"""Content of a record: outputs of transformer blocks (figure 5); keys and values of attention to the image, and outputs
of stacks of such blocks (figure 7); or all that operators with context read.
"""
KEEPS: tuple[Keep, ...] = get_args(Keep)

LoadPlan = Literal["optimal", "paper", "strawman", "none"]
"""Which units of a pass read a record: those of the fastest plan, those of InstGenIE's Algorithm 1, all, or none."""
LOAD_PLANS: tuple[LoadPlan, ...] = get_args(LoadPlan)

_UP_TO_LAST_NUMBER = re.compile(r".*\.\d+(?=\.|$)")


def unit_of(operator: str) -> str:
    """Return the unit of a model that an operator belongs to, by name: a resnet, a resampler or a transformer block of
    diffusers. An operator in none of these is its own unit. All that one unit reads of a record is loaded together.
    """
    found = _UP_TO_LAST_NUMBER.match(operator)
    return operator if found is None else found[0]
