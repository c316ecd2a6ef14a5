"""What the record is of that an edit reads (InstGenIE section 3.1)."""

from typing import Literal, get_args

TemplateKind = Literal["noised", "trajectory"]
"""The image, noised at each step, as any image can be; or the generation that has drawn it."""
TEMPLATE_KINDS: tuple[TemplateKind, ...] = get_args(TemplateKind)
