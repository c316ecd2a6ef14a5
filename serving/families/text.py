"""Text with masks of valid tokens: encoding without padding, and joining of rows into a batch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def join_texts(texts: Sequence[Tensor], masks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Concatenate texts [rows, length, channels] and masks [rows, length] of any lengths along rows.

    All are padded to the longest length, with tokens that the masks mark as not valid.
    """
    longest = max(mask.shape[1] for mask in masks)
    return (
        torch.cat([F.pad(text, (0, 0, 0, longest - text.shape[1])) for text in texts]),
        torch.cat([F.pad(mask, (0, longest - mask.shape[1])) for mask in masks]),
    )


@contextmanager
def own_length(encoder: nn.Module) -> Iterator[None]:
    """Make a text encoder skip the padding and return zeros for it, until the context ends.

    The encoder must be called with a mask that excludes the padding, which must follow the text, so that states of the
    text do not depend on its amount. The pipeline must not use the states of the padding.
    """
    added = 0

    def cut(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        nonlocal added
        mask = kwargs["attention_mask"]
        length = int(mask.sum(-1).max())
        added = mask.shape[-1] - length

        def short(value: Any) -> Any:
            return value[:, :length] if isinstance(value, Tensor) and value.shape == mask.shape else value

        return tuple(map(short, args)), {name: short(value) for name, value in kwargs.items()}

    def pad(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        padded: dict[str, Any] = {"last_hidden_state": _padded(output["last_hidden_state"], added)}
        if (states := output.get("hidden_states")) is not None:
            padded["hidden_states"] = _PaddedStates(states, added)
        return type(output)(**dict(output) | padded)

    hooks = [
        encoder.register_forward_pre_hook(cut, with_kwargs=True),
        encoder.register_forward_hook(pad, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _PaddedStates(Sequence[Tensor]):
    """Hidden states of all layers, each padded when it is read."""

    def __init__(self, states: Sequence[Tensor], count: int) -> None:
        self._states, self._count = states, count

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, place: Any) -> Any:
        return _padded(self._states[place], self._count)


def _padded(states: Tensor, count: int) -> Tensor:
    return F.pad(states, (0, 0, 0, count))
