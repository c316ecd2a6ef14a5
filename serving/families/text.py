"""Text with masks of its valid tokens, as rows of one batch."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def join_texts(texts: Sequence[Tensor], masks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Texts [rows, length, channels] and their masks [rows, length] of any lengths, one after another, as long as the
    longest; what is added is no valid token.
    """
    longest = max(mask.shape[1] for mask in masks)
    return (
        torch.cat([F.pad(text, (0, 0, 0, longest - text.shape[1])) for text in texts]),
        torch.cat([F.pad(mask, (0, longest - mask.shape[1])) for mask in masks]),
    )
