"""The text of a batch, and what the patch engine leaves out of it."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..core.denoise_batch import join_conditioning
from ..core.denoiser import Conditions
from ..core.prepared import PreparedRequest


def conditions_of(
    requests: Sequence[PreparedRequest], conditions: Conditions, *, shortens: bool
) -> tuple[dict[str, Any], int]:
    """The conditions of all rows of the requests, named as the model does, and how often their last text token counts
    (see `without_repeats`; without `shortens` text is left as it is).
    """
    conditioning, repeats = join_conditioning(requests), 1
    if shortens:
        conditioning["text"], repeats = without_repeats(conditioning["text"])
    return conditions(conditioning), repeats


def without_repeats(text: Tensor) -> tuple[Tensor, int]:
    """Text [rows, length, width] without the equal tokens at the end of all rows but the first, and how many it is.

    SD3 feeds as many zero tokens as its third text encoder would have given where there is none.
    """
    is_same = (text[:, 1:] == text[:, :-1]).all(-1)
    # Counted from the end until the first difference.
    run = is_same.flip(1).long().cumprod(1).sum(1)
    repeated = int(run.min()) if text.shape[1] > 1 else 0
    return text[:, : text.shape[1] - repeated].contiguous(), repeated + 1
