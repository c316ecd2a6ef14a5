"""Resolutions: the width and height of an image in pixels, written as "192" or "128x192".

A batch is written as its resolutions, each with its number of requests: "2*128x192 + 256x256".
"""

import re
from collections.abc import Mapping
from typing import NamedTuple, Self

from .errors import UsageError

MAX_SIDE = 16384
"""Maximum side in pixels; more is assumed to be a typing error."""
RESOLUTION_MULTIPLE = 8
"""Every side is a multiple of this many pixels: the autoencoders of SDXL and SD3 shrink images eight times."""

_PATTERN = re.compile(r"([0-9]{1,12})(?:[xX]([0-9]{1,12}))?")
# "2*128x192", "2*128" and, as some programs write it, "2x128x192".
_COUNTED = re.compile(r"(?:([0-9]{1,4}) ?\* ?|([0-9]{1,4})[xX](?=[0-9]+[xX]))?([0-9xX]+)")


class Resolution(NamedTuple):
    """Size of an image in pixels, always WIDTH first. Sorts and hashes as the tuple `(width, height)`."""

    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"

    @property
    def pixels(self) -> int:
        """Number of pixels of the image."""
        return self.width * self.height

    def checked(self) -> Self:
        """Return this resolution if both sides are multiples of `RESOLUTION_MULTIPLE`, from that to `MAX_SIDE`.

        Raises:
            UsageError: a side is not. (A model may allow less; it has its own check.)
        """
        for name, side in zip(self._fields, self, strict=True):
            if not isinstance(side, int) or isinstance(side, bool):
                raise UsageError(f"{name} is {side!r}, but it must be a whole number of pixels")
            if side <= 0 or side % RESOLUTION_MULTIPLE:
                raise UsageError(
                    f"{name} is {side} in resolution {self}, but must be a positive multiple of {RESOLUTION_MULTIPLE}"
                )
            if side > MAX_SIDE:
                raise UsageError(f"{name} is {side} in resolution {self}, but must be at most {MAX_SIDE} pixels")
        return self


def parse(text: str) -> Resolution:
    """Read `"192"` (a square) or `"128x192"` (WIDTHxHEIGHT).

    Raises UsageError if the text has another form, or a side is not a multiple of `RESOLUTION_MULTIPLE` in its range.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"resolution is {text!r}, but it must be SIDE or WIDTHxHEIGHT in pixels, as 192 or 128x192")
    width, height = match.groups()
    return Resolution(int(width), int(height or width)).checked()


def parse_list(text: str) -> tuple[Resolution, ...]:
    """Read resolutions separated by commas, as `"128,192,128x256"`, in the order given.

    Raises UsageError if an item is not a resolution, there is none, or one is given twice.
    """
    resolutions = tuple(parse(item) for item in text.split(","))
    for i, resolution in enumerate(resolutions):
        if resolution in resolutions[:i]:
            raise UsageError(f"resolutions are {text!r}, but {resolution} may be given only once")
    return resolutions


def format_batch(counts: Mapping[Resolution, int]) -> str:
    """Format a batch as `"2*128x192 + 256x256"`: small images first, no number for a single request, and nothing for a
    resolution without requests.
    """
    ranked = sorted(counts.items(), key=lambda pair: (pair[0].pixels, pair[0]))
    return " + ".join(str(size) if count == 1 else f"{count}*{size}" for size, count in ranked if count)


def parse_batch(text: str) -> dict[Resolution, int]:
    """Read a batch as `format_batch` writes it; `"2x128x192+1x256x256"` is the same.

    Raises UsageError if the text has another form, or names a resolution twice or with no requests.
    """
    counts: dict[Resolution, int] = {}
    for part in text.split("+"):
        match = _COUNTED.fullmatch(part.strip())
        if match is None:
            raise UsageError(
                f"combination is {text!r}, but it must be resolutions with the number of their requests, "
                "as 2*512x512 + 1024x1024"
            )
        starred, crossed, size = match.groups()
        resolution, count = parse(size), int(starred or crossed or 1)
        if count < 1 or resolution in counts:
            wrong = "named twice" if count else "named with no requests"
            raise UsageError(f"combination is {text!r}, but {resolution} is {wrong}")
        counts[resolution] = count
    return counts
