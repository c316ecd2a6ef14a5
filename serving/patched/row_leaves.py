"""Leaves that repeat values with one entry per row for the row's patches, and that embed latents as tokens."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.adapters import adapted_of
from .context import BatchLeaf, PatchContext
from .tokens import repeated


class RowsToPatches(nn.Module):
    """A linear layer on values with one entry per row (timestep, text); repeats its output for the row's patches."""

    def __init__(self, linear: nn.Linear, context: PatchContext) -> None:
        super().__init__()
        self.linear, self.context = linear, context

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).index_select(0, self.context.row_of_patch)


class RowsAndZeroToPatches(BatchLeaf):
    """`RowsToPatches` on values of the timesteps of all rows, and then of as many timesteps 0, for the patches of
    references.
    """

    def __init__(self, linear: nn.Linear, context: PatchContext) -> None:
        super().__init__()
        self.linear, self.context = linear, context

    def forward(self, x: Tensor) -> Tensor:
        context = self.context
        rows, is_reference = context.row_of_patch, self.fill(x)
        if context.rows is not None or context.active is not None:
            assert not context.batch.references, "caches and masks take no references"
            is_reference = torch.zeros_like(rows)
        return self.linear(x).index_select(0, rows + is_reference * (len(x) // 2))

    def fill(self, text: Tensor) -> Tensor:
        """Return which patches are of references, (P,), 1 or 0; see `BatchLeaf`."""
        values, level = self.context.batch_values, self.context.batch.levels[0]
        if values.is_reference is None:

            def all_are(value: int) -> Callable[[int, int], Tensor]:
                return lambda height, width: text.new_full((height * width, 1), value, dtype=torch.int64)

            tokens = repeated(level, all_are(0), "torch", of_references=lambda _: all_are(1))
            values.is_reference = tokens.view(len(level.row_index), -1)[:, 0].contiguous()
        return values.is_reference


class EmbToPatches(nn.Module):
    """A norm whose scale and shift, one per row (`emb`), are applied to the row's patches."""

    def __init__(self, norm: nn.Module, context: PatchContext) -> None:
        super().__init__()
        self.norm, self.context = norm, context

    def forward(self, x: Tensor, emb: Tensor) -> Any:
        return self.norm(x, emb=emb.index_select(0, self.context.row_of_patch))


def rows_to_patches(module: nn.Module, context: PatchContext) -> nn.Module:
    """Return the leaf for a linear layer or a norm that modulates the tokens of images."""
    return (RowsToPatches if isinstance(module, nn.Linear) else EmbToPatches)(module, context)  # type: ignore[arg-type]


class ResultsToPatches(nn.Module):
    """A module with several outputs of one entry per row, each of which is repeated for the row's patches."""

    def __init__(self, module: nn.Module, context: PatchContext) -> None:
        super().__init__()
        self.module, self.context = module, context

    def forward(self, *inputs: Any, **named: Any) -> tuple[Tensor, ...]:
        rows = self.context.row_of_patch
        return tuple(result.index_select(0, rows) for result in self.module(*inputs, **named))


class CachedConstant(nn.Module):
    """A module whose output depends only on the number of rows, and is kept on the model's device.

    The model passes it an input on the CPU, and a copy from there would wait for the device in every pass.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.module, self._device = module, device
        self._cached_outputs: dict[int, Tensor] = {}

    def forward(self, numbers: Tensor) -> Tensor:
        rows = len(numbers)
        if rows not in self._cached_outputs:
            self._cached_outputs[rows] = self.module(numbers).to(self._device)
        return self._cached_outputs[rows]


class CachedCaption(nn.Module):
    """A projection of the text for cross attention, which `PatchedModel` runs once for a batch.

    The model expects text for each patch, and gets zeros, which are not used.
    """

    def __init__(self, projection: Any, context: PatchContext) -> None:
        super().__init__()
        self.projection, self.context = projection, context

    def forward(self, text: Tensor) -> Tensor:
        return text.new_zeros(1).expand(len(self.context.row_of_patch), 1, self.projection.linear_2.out_features)


class RowTimesteps(nn.Module):
    """The timestep embedding of every row. Its input is ignored, because diffusers repeats one for every patch."""

    def __init__(self, embedding: nn.Module, context: PatchContext) -> None:
        super().__init__()
        self.embedding, self.context = embedding, context

    def forward(self, timesteps: Tensor) -> Tensor:
        assert self.context.timesteps is not None, "a patched model runs inside PatchedModel only"
        return self.embedding(self.context.timesteps)


class PatchedPatchEmbed(BatchLeaf):
    """The embedding of latent pixels, with the positions of each image at its own size; see `Transformer`."""

    def __init__(
        self, embed: Any, context: PatchContext, positions: Callable[[Any, int, int], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.embed, self.context, self.positions = embed, context, positions or cropped_positions

    def forward(self, latent: Tensor) -> Tensor:
        """Patches [P, channels, side, side] -> tokens [P, grain * grain, width]."""
        level = self.context.at(latent)
        unit, grain, channels = self.embed.patch_size, level.grain, latent.shape[1]
        pixels = latent.view(-1, channels, grain, unit, grain, unit).permute(0, 2, 4, 1, 3, 5)
        pixels = pixels.reshape(-1, grain**2, channels * unit**2)
        tokens = embedded(self.embed, pixels)
        positions = self.fill()
        some = self.context.rows or self.context.active
        if some is not None:
            own = some.tokens(0)
            positions = positions.index_select(0, own)
        return (tokens + positions.view(tokens.shape)).to(tokens.dtype)

    def fill(self, text: Tensor | None = None) -> Tensor:
        """Return the positions [tokens, width] of the batch, which do not depend on the text."""
        context, values = self.context, self.context.batch_values
        if values.positions is None:
            table = partial(self.positions, self.embed)
            values.positions = repeated(context.batch.levels[0], table, context.kernels)
        return values.positions


def embedded(embed: Any, pixels: Tensor) -> Tensor:
    """Apply the convolution or the linear layer of an embedding to the pixels of each token, [..., pixels].

    Adapters change only linear layers.
    """
    weight = embed.proj.weight
    # A quantised weight cannot be flattened.
    out = F.linear(pixels, weight if weight.dim() == 2 else weight.flatten(1), embed.proj.bias)
    if (adapted := adapted_of(embed.proj)) is not None:
        adapted.add(pixels, out)
    return out


def cropped_positions(embed: Any, height: int, width: int) -> Tensor:
    """Return SD3's positions, cropped to the size."""
    return embed.cropped_pos_embed(height * embed.patch_size, width * embed.patch_size)[0]
