"""What records of templates are of, and what they hold (InstGenIE section 3.1)."""

import re
from typing import Literal, get_args

TemplateKind = Literal["noised", "trajectory"]
"""The image, noised at each step, as any image can be; or the generation that has drawn it."""
TEMPLATE_KINDS: tuple[TemplateKind, ...] = get_args(TemplateKind)

Keep = Literal["outputs", "kv", "all"]
"""What transformer blocks give (figure 5); keys and values of attention to the image, and what stacks of such blocks
give (figure 7); or all that operators with context read.
"""
KEEPS: tuple[Keep, ...] = get_args(Keep)

LoadPlan = Literal["optimal", "paper", "strawman", "none"]
"""Which units of a pass read a record: those of the fastest plan, those of InstGenIE's Algorithm 1, all, or none."""
LOAD_PLANS: tuple[LoadPlan, ...] = get_args(LoadPlan)

_UP_TO_LAST_NUMBER = re.compile(r".*\.\d+(?=\.|$)")


def unit_of(operator: str) -> str:
    """The part of a model that an operator belongs to, by their names: a resnet, a resampler or a transformer block of
    diffusers; what stands in none is by itself. What one unit reads of a record is loaded together.
    """
    found = _UP_TO_LAST_NUMBER.match(operator)
    return operator if found is None else found[0]
