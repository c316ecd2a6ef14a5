"""Peaks of GPUs, from their makers' data sheets. This module imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from ...data.errors import UsageError


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU.

    Attributes:
        name: name on the command line.
        flops: dense 16-bit floating-point operations per second, accumulated in float32.
        bandwidth: bytes per second of its memory.
    """

    name: str
    flops: float
    bandwidth: float


_ALL = (
    Card("l4", 121e12, 0.3e12),
    Card("a10", 125e12, 0.6e12),
    Card("l40s", 362e12, 0.864e12),
    Card("rtx4090", 165e12, 1.008e12),
    Card("a100", 312e12, 2.039e12),
    Card("h100", 989e12, 3.35e12),
    Card("h200", 989e12, 4.8e12),
    Card("b200", 2250e12, 8.0e12),
)
CARDS: Mapping[str, Card] = {card.name: card for card in _ALL}


def card_of(name: str) -> Card:
    """Return a GPU by name. Raises UsageError for unknown names."""
    if name not in CARDS:
        raise UsageError(f"--predict is {name!r}, but it must be one of {', '.join(CARDS)}")
    return CARDS[name]
