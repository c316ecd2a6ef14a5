"""PNG files of every colour type and bit depth, written from their samples, with the expected value of each pixel.

The code follows the specification (ISO/IEC 15948), and uses nothing that the readers under test use.
"""

import struct
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

GREY, RGB, PALETTE, GREY_ALPHA, RGBA = 0, 2, 3, 4, 6
CHANNELS = {GREY: 1, RGB: 3, PALETTE: 1, GREY_ALPHA: 2, RGBA: 4}
DEPTHS = {GREY: (1, 2, 4, 8, 16), RGB: (8, 16), PALETTE: (1, 2, 4, 8), GREY_ALPHA: (8, 16), RGBA: (8, 16)}
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""Passes of an interlaced file: first column and row, and the distances to the following columns and rows."""


@dataclass(frozen=True)
class Png:
    """A PNG before it is written.

    Attributes:
        samples: (height, width, channels), from 0 to 2^depth - 1; with a palette, indices of its entries.
        colour: colour type of the header.
        depth: bits per sample.
        palette: (entries, 3), from 0 to 255.
        transparent: content of tRNS: the samples of the only transparent colour, or the alpha of the first entries of
            the palette; None for a file without the chunk.
        is_interlaced: whether the file is written in seven passes.
    """

    samples: NDArray[np.int64]
    colour: int
    depth: int
    palette: NDArray[np.uint8] | None = None
    transparent: tuple[int, ...] | None = None
    is_interlaced: bool = False

    @property
    def has_transparency(self) -> bool:
        """Whether there is an alpha channel, or tRNS."""
        return self.transparent is not None or self.colour in (GREY_ALPHA, RGBA)

    def to_bytes(self, exif: bytes | None = None) -> bytes:
        """Return the file. Its rows use all five filters in turn."""
        height, width, _ = self.samples.shape
        header = struct.pack(">IIBBBBB", width, height, self.depth, self.colour, 0, 0, self.is_interlaced)
        chunks = [(b"IHDR", header)]
        if self.palette is not None:
            chunks.append((b"PLTE", self.palette.tobytes()))
        if self.transparent is not None:
            form = f"{len(self.transparent)}B" if self.colour == PALETTE else f">{len(self.transparent)}H"
            chunks.append((b"tRNS", struct.pack(form, *self.transparent)))
        if exif is not None:
            chunks.append((b"eXIf", exif))
        passes = _PASSES if self.is_interlaced else ((0, 0, 1, 1),)
        parts = (self.samples[row::down, column::right] for column, row, right, down in passes)
        chunks += [(b"IDAT", zlib.compress(b"".join(map(self._filtered, parts)))), (b"IEND", b"")]
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in chunks
        )

    def rgba(self) -> NDArray[np.uint8]:
        """Return the pixels, (height, width, 4): red, green, blue and alpha, scaled to eight bits."""
        most = 2**self.depth - 1
        if self.palette is not None:
            alphas = np.full(len(self.palette), 255)
            given = self.transparent or ()
            alphas[: len(given)] = given
            indices = self.samples[..., 0]
            return np.dstack([self.palette[indices], alphas[indices]]).astype(np.uint8)
        scaled = np.rint(self.samples * 255 / most)
        has_alpha = self.colour in (GREY_ALPHA, RGBA)
        colours = scaled[..., :-1] if has_alpha else scaled
        alpha = scaled[..., -1] if has_alpha else np.full(scaled.shape[:2], 255)
        if self.transparent is not None:
            alpha = np.where((self.samples == self.transparent).all(-1), 0, 255)
        return np.dstack([np.broadcast_to(colours, (*alpha.shape, 3)), alpha]).astype(np.uint8)

    def _filtered(self, samples: NDArray[np.int64]) -> bytes:
        found = bytearray()
        num_bytes = max(1, samples.shape[2] * self.depth // 8)  # of a pixel
        above: list[int] | None = None
        for number, row in enumerate(samples if samples.size else ()):
            bits = "".join(f"{sample:0{self.depth}b}" for sample in row.flat)
            line = [int(bits[place : place + 8].ljust(8, "0"), 2) for place in range(0, len(bits), 8)]
            above = above or [0] * len(line)
            kind = number % 5
            found.append(kind)
            for place, byte in enumerate(line):
                left, corner = (line[place - num_bytes], above[place - num_bytes]) if place >= num_bytes else (0, 0)
                up = above[place]
                predicted = (0, left, up, (left + up) // 2, _paeth(left, up, corner))[kind]
                found.append((byte - predicted) % 256)
            above = line
        return bytes(found)


def _paeth(left: int, up: int, corner: int) -> int:
    guess = left + up - corner
    return min((left, up, corner), key=lambda each: abs(guess - each))


class PngCase(NamedTuple):
    """Colour type, bits per sample, and whether there is a tRNS chunk."""

    colour: int
    depth: int
    has_key: bool


CASES = [
    PngCase(colour, depth, has_key)
    for colour, depths in DEPTHS.items()
    for depth in depths
    for has_key in ((False,) if colour in (GREY_ALPHA, RGBA) else (False, True))
]
"""All combinations that the specification allows."""


def random_png(rng: np.random.Generator, colour: int, depth: int, has_key: bool, *, is_interlaced: bool = False) -> Png:
    """Return a PNG of random samples, 13x11; its tRNS chunk has an existing colour, or all palette entries but one."""
    most, shape = 2**depth - 1, (11, 13, CHANNELS[colour])
    # Half of the values are neighbours, to catch readers that confuse colours which differ in their low bits only.
    samples = np.where(rng.random(shape) < 0.5, rng.integers(0, most + 1, shape), rng.integers(0, 2, shape) + most // 2)
    palette = transparent = None
    if colour == PALETTE:
        palette = rng.integers(0, 256, (most + 1, 3), dtype=np.uint8)
        transparent = tuple(map(int, rng.integers(0, 256, most))) if has_key else None
    elif has_key:
        transparent = tuple(map(int, samples[5, 6]))
    return Png(samples, colour, depth, palette, transparent, is_interlaced)
