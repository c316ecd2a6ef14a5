"""What the patch engine leaves out of the text of a batch."""

from torch import Tensor


def without_repeats(text: Tensor) -> tuple[Tensor, int]:
    """Text [rows, length, width] without the equal tokens at the end of all rows but the first, and how many it is.

    SD3 feeds as many zero tokens as its third text encoder would have given where there is none.
    """
    is_same = (text[:, 1:] == text[:, :-1]).all(-1)
    # Counted from the end until the first difference.
    run = is_same.flip(1).long().cumprod(1).sum(1)
    repeated = int(run.min()) if text.shape[1] > 1 else 0
    return text[:, : text.shape[1] - repeated].contiguous(), repeated + 1
