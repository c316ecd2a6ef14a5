"""The text of a batch, and the parts of it that the patch engine leaves out."""

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor
from torch.nn import functional as F

from ..core.denoise_batch import join_conditioning
from ..core.denoiser import Conditions
from ..core.prepared import PreparedRequest

Shorten = Literal["repeats", "padding"] | None
TEXT_MULTIPLE = 64
"""Masked text of padded batches is padded to a multiple of this, so that fewer passes differ in its length."""
_MASKED = "text", "mask"


def conditions_of(
    requests: Sequence[PreparedRequest], conditions: Conditions, *, shorten: Shorten, multiple: int = 1
) -> tuple[dict[str, Any], int]:
    """Return the model's conditions for all rows of the requests, and how often their last text token counts.

    Args:
        requests: requests of the batch.
        conditions: see `Conditions`.
        shorten: which part of the text is left out: equal tokens (see `without_repeats`), or padding of all rows.
        multiple: number to a multiple of which text without this padding is padded.
    """
    conditioning, repeats = join_conditioning(requests), 1
    if shorten is None:
        return conditions(conditioning), repeats
    for prepared in requests:
        count_tokens(prepared, shorten)
    longest = max(prepared.text_tokens or 0 for prepared in requests)
    if shorten == "repeats":
        text = conditioning["text"]
        conditioning["text"], repeats = text[:, :longest].contiguous(), text.shape[1] - longest + 1
    else:
        conditioning |= {name: _of_length(conditioning[name], -(-longest // multiple) * multiple) for name in _MASKED}
    return conditions(conditioning), repeats


def count_tokens(prepared: PreparedRequest, shorten: Shorten) -> None:
    """Set the number of text tokens of a request without the part that may be left out. Waits for the device once."""
    if prepared.text_tokens is not None or shorten is None:
        return
    if shorten == "repeats":
        text, _ = without_repeats(prepared.conditioning["text"])
        prepared.text_tokens = text.shape[1]
    else:
        prepared.text_tokens = int(prepared.conditioning["mask"].any(0).nonzero().max()) + 1


def _of_length(values: Tensor, length: int) -> Tensor:
    """[rows, any length, ...] -> [rows, length, ...], cut or padded with zeros at the end."""
    missing = length - values.shape[1]
    return values[:, :length] if missing <= 0 else F.pad(values, (0, 0) * (values.dim() - 2) + (0, missing))


def without_repeats(text: Tensor) -> tuple[Tensor, int]:
    """Merge equal tokens at the end of text [rows, length, width]; return the text and the count of its last token.

    Without its third text encoder, SD3 pads the text with as many zero tokens as the encoder would return.
    """
    is_same = (text[:, 1:] == text[:, :-1]).all(-1)
    # Counted from the end until the first difference.
    run = is_same.flip(1).long().cumprod(1).sum(1)
    repeated = int(run.min()) if text.shape[1] > 1 else 0
    return text[:, : text.shape[1] - repeated].contiguous(), repeated + 1
