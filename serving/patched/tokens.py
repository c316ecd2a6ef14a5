"""Conversions between tokens, patches and images of a packed batch.

Patches are [P, channels, side, side], channels-last, so that they are also the tokens [P * side * side, channels].
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.patch import patch_join, patch_split
from ..layout.packing import Level


def to_tokens(x: Tensor) -> Tensor:
    """[P, channels, side, side], channels-last -> [P * side * side, channels]; a view."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def to_patches(tokens: Tensor, side: int) -> Tensor:
    """The inverse of `to_tokens`; a view."""
    return tokens.view(-1, side, side, tokens.shape[1]).permute(0, 3, 1, 2)


def images_of(tokens: Tensor, level: Level, kernels: str = "auto") -> list[Tensor]:
    """Return images [rows, channels, height, width], channels-last, for each resolution. Copies only in patch order."""
    images, grain = [], level.grain
    for group in level.groups:
        part = tokens[group.start : group.end]
        if grain > 1:
            patches = to_patches(part, grain)
            images.append(patch_join(patches, group.height // grain, group.width // grain, kernels=kernels))
        else:
            images.append(part.view(group.rows, group.height, group.width, -1).permute(0, 3, 1, 2))
    return images


def tokens_of(images: list[Tensor], level: Level, kernels: str = "auto") -> Tensor:
    """The inverse of `images_of`; a copy if there are several resolutions, or in patch order."""
    if level.grain > 1:
        return to_tokens(patch_split(images, level.grain, kernels=kernels))
    return joined([to_tokens(image) for image in images])


Table = Callable[[int, int], Tensor]
"""Values of all tokens of an image of (height, width) tokens, [height * width, channels]."""


def repeated(
    level: Level,
    table: Table,
    kernels: str = "auto",
    *,
    of_references: Callable[[int], Table] | None = None,
) -> Tensor:
    """Repeat values that depend on the size of an image for all images of a level: [tokens, channels], in packed order.

    They are zero for padding. `of_references` returns the table for the references of this number, from 0.
    """

    def image_of(table: Table, height: int, width: int) -> Tensor:
        return table(height, width).view(1, height, width, -1).permute(0, 3, 1, 2)

    parts: list[Tensor] = []
    for group in level.groups:
        own = image_of(table, group.height, group.width)
        if not group.references:
            parts.append(own.expand(group.rows, -1, -1, -1))
            continue
        assert of_references is not None, "this family takes no references"
        others = [image_of(of_references(number), *size) for number, size in enumerate(group.references)]
        parts += [own, *others] * group.rows
    return joined([tokens_of(parts, level, kernels)], level.num_padding)


def joined(parts: list[Tensor], num_padding: int = 0) -> Tensor:
    """Concatenate the tokens, or rows, of all resolutions, and zeros for padding."""
    if num_padding:
        parts = [*parts, parts[0].new_zeros(num_padding, *parts[0].shape[1:])]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
