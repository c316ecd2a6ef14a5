"""What records of templates hold. No torch."""

from typing import Literal, get_args

Keep = Literal["outputs", "kv", "all"]
"""What transformer blocks give (InstGenIE figure 5); keys and values of attention to the image, and what stacks of such
blocks give (figure 7); or all that operators with context read.
"""
KEEPS: tuple[Keep, ...] = get_args(Keep)
