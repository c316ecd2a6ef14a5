"""What records of templates are of, and what they hold (InstGenIE section 3.1)."""

from typing import Literal, get_args

TemplateKind = Literal["noised", "trajectory"]
"""The image, noised at each step, as any image can be; or the generation that has drawn it."""
TEMPLATE_KINDS: tuple[TemplateKind, ...] = get_args(TemplateKind)

Keep = Literal["outputs", "kv", "all"]
"""What transformer blocks give (figure 5); keys and values of attention to the image, and what stacks of such blocks
give (figure 7); or all that operators with context read.
"""
KEEPS: tuple[Keep, ...] = get_args(Keep)
