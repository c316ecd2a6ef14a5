"""Peaks of GPUs, from their makers' data sheets. This module imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from ...data.errors import UsageError


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU.

    Attributes:
        flops: dense 16-bit floating-point operations per second, accumulated in float32.
        bandwidth: bytes per second of its memory.
    """

    flops: float
    bandwidth: float


CARDS: Mapping[str, Card] = {
    "l4": Card(121e12, 0.3e12),
    "a10": Card(125e12, 0.6e12),
    "l40s": Card(362e12, 0.864e12),
    "rtx4090": Card(165e12, 1.008e12),
    "a100": Card(312e12, 2.039e12),
    "h100": Card(989e12, 3.35e12),
    "h200": Card(989e12, 4.8e12),
    "b200": Card(2250e12, 8.0e12),
}


def card_of(name: str) -> Card:
    """Return a GPU by name. Raises UsageError for unknown names."""
    if name not in CARDS:
        raise UsageError(f"--predict is {name!r}, but it must be one of {', '.join(CARDS)}")
    return CARDS[name]
