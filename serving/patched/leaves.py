"""Replacements of a model's leaf modules that compute on patches: convolutions, norms, up-sampling.

Each leaf holds the module that it replaces, with its weights.
Sources: PatchedServe sections 4.2.1 (convolution) and 4.2.2 (GroupNorm and stitching).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...kernels.group_norm_stats import group_norm_stats
from ...kernels.group_norm_stitch import group_norm_apply, group_norm_silu_stitch
from ...kernels.halo import halo_gather
from ..cache.active import ActiveSet
from ..cache.slots import NormSlots, TokenSlots
from ..core.adapters import adapted_of
from ..core.derived import Derived
from ..layout.packing import Level
from .context import Fused, PatchContext, Strategy
from .tokens import images_of, joined, to_patches, to_tokens, tokens_of

_NATIVE_FROM_SIDE = 4
"""Least side of active cells, in outputs, that are convolved natively; smaller ones use a product over taps."""
_FEW_TOKENS = 256
"""Most tokens for which GroupNorm in bfloat16 on a CPU is one call in float32: 31 us instead of 72 for 2 x 4 x 4 of 256
channels. For more tokens sums are faster: 579 us instead of 1205 for 14848 tokens of 64 channels."""


class PatchedConv(nn.Module):
    """A convolution of 1 x 1, or of 3 x 3 with padding 1 and stride 1 or 2, over the images that the patches make up.

    `regroup`: the images of each resolution are reassembled and convolved separately.
    `stitch`: every patch (in image order, every position) gets the pixels around it, then one launch serves all.
    """

    def __init__(self, conv: nn.Conv2d, context: PatchContext) -> None:
        super().__init__()
        self.conv, self.context = conv, context
        self.stride = conv.stride[0]
        self.is_pointwise = conv.kernel_size == (1, 1)
        self.out_channels = conv.out_channels
        self.slots = TokenSlots()
        self.keeps_input = True
        self._taps = Derived(lambda: conv.weight.detach().contiguous(memory_format=torch.channels_last))
        self._adapted = adapted_of(conv)
        # In a dictionary, so that they are not among the model's modules.
        self._downs: dict[str, PatchedConv] = {}
        for name, pair in self._adapted.pairs.items() if self._adapted is not None else ():
            self._downs[name] = PatchedConv(pair.down, context)  # type: ignore[arg-type]  as what it adapts

    def forward(self, x: Tensor) -> Tensor:
        context = self.context
        if self.is_pointwise:
            weight = self.conv.weight.view(self.out_channels, -1)
            out = to_patches(F.linear(to_tokens(x), weight, self.conv.bias), x.shape[2])
            return self._with_adapters(out, lambda down: down(x))
        if context.consume_fused("stitching"):
            self._keep(x[:, :, 1:-1, 1:-1])
            return self._with_adapters(self._valid(x), lambda down: down._valid(x))
        level = context.at(x)
        self._keep(x)
        out_level = context.level = context.packing.levels[level.index + self.stride - 1]
        if context.active is None:
            places = level, out_level, context.choose(self, level, out_level)
            return self._with_adapters(self.run(x, *places), lambda down: down.run(x, *places))
        return self.masked(to_tokens(x), level, out_level)

    def _with_adapters(self, out: Tensor, reduced: "Callable[[PatchedConv], Tensor]") -> Tensor:
        """Add the outputs of adapters.

        Their first convolution, which has few outputs, runs on all rows, because patches need their neighbours.
        """
        if self._adapted is None or self._adapted.model.rows is None:
            return out
        tokens = to_tokens(out)
        for name, down in self._downs.items():
            self._adapted.add_reduced(name, tokens, lambda down=down: to_tokens(reduced(down)))
        return to_patches(tokens, out.shape[2])

    def masked(self, tokens: Tensor, level: Level, out_level: Level) -> Tensor:
        """Convolve the active cells, with the kept inputs of the others as context."""
        active = self.context.active
        assert active is not None
        place = level.index, out_level.index
        kept, channels = self.slots.write(tokens, active, level.index), tokens.shape[1]
        if active.tables.side(out_level.index) < _NATIVE_FROM_SIDE:
            taps = kept.index_select(0, active.taps(*place)).view(-1, 9 * channels)
            return to_patches(F.linear(taps, self._matrix(), self.conv.bias), out_level.side)
        side = active.tables.window_side(*place)
        window = kept.index_select(0, active.window(*place)).view(-1, side, side, channels).permute(0, 3, 1, 2)
        return to_patches(to_tokens(self._valid(window)), out_level.side)

    def _keep(self, x: Tensor) -> None:
        if self.context.cells is not None and self.keeps_input:
            self.slots.buffer.store(to_tokens(x), self.context.cells, self.context.level.index)

    def shape_key(self, side: int) -> str:
        """Return a key of the properties that determine the convolution's time, apart from the number of positions."""
        return f"{self.conv.in_channels}->{self.out_channels} stride {self.stride} side {side}"

    def run(self, x: Tensor, level: Level, out_level: Level, strategy: Strategy) -> Tensor:
        """Convolve with the given strategy; the result is the same with both."""
        if strategy == "regroup":
            kernels = self.context.kernels
            images = images_of(to_tokens(x), level, kernels)
            weight, bias, padding = self.channels_last_weight(), self.conv.bias, self.conv.padding
            images = [F.conv2d(image, weight, bias, self.stride, padding) for image in images]
            return to_patches(tokens_of(images, out_level, kernels), out_level.side)
        if level.neighbours is None:
            tokens = F.pad(to_tokens(x), (0, 0, 0, 1))
            taps = tokens.index_select(0, level.windows(self.stride)).view(-1, 9 * tokens.shape[1])
            return to_patches(F.linear(taps, self._matrix(), self.conv.bias), 1)
        return self._valid(halo_gather(x, level.neighbours, kernels=self.context.kernels))

    def _valid(self, padded: Tensor) -> Tensor:
        return F.conv2d(padded, self.channels_last_weight(), self.conv.bias, self.stride)

    def _matrix(self) -> Tensor:
        """Return the weight as a matrix (out channels, 9 * in channels), taps line by line."""
        return self.channels_last_weight().permute(0, 2, 3, 1).view(self.out_channels, -1)

    def channels_last_weight(self) -> Tensor:
        """Return the weight in channels-last format, also the matrix of a product over taps; copied at first use."""
        return self._taps.of(self.conv.weight)


class PatchedGroupNorm(nn.Module):
    """GroupNorm over the whole image of each row, with the SiLU after it if there is one.

    If the convolution after both stitches patches, norm, SiLU and stitching are one kernel (PatchedServe 4.2.2), and
    the result is padded. `conv` is the convolution that follows with only an `FusableActivation` between.
    """

    def __init__(self, norm: nn.GroupNorm, context: PatchContext, conv: PatchedConv | None = None) -> None:
        super().__init__()
        self.norm, self.context = norm, context
        # Held in a tuple, so that the convolution is not a child of two modules.
        self._conv = (conv,)
        self.slots = NormSlots(norm.num_groups)
        self._fused: tuple[Fused, ...] = () if conv is None else ("activation",)
        self._affine = Derived(lambda: [part.float().view(norm.num_groups, -1) for part in (norm.weight, norm.bias)])

    def forward(self, x: Tensor) -> Tensor:
        context, conv = self.context, self._conv[0]
        level = context.at(x)
        context.record_fused(*self._fused)
        if context.active is not None:
            return to_patches(self._masked(to_tokens(x), context.active), level.side)
        if context.cells is not None:
            self.slots.buffer.store(to_tokens(x), context.cells, level.index)
        if level.neighbours is None:
            is_slow = x.dtype == torch.bfloat16 and x.device.type == "cpu"
            norm_tokens = self._by_sums if is_slow and level.num_tokens > _FEW_TOKENS else self._by_resolution
            return to_patches(norm_tokens(to_tokens(x), level), level.side)
        norm, kernels = self.norm, context.kernels
        num_rows = context.packing.num_rows
        mean, rstd = group_norm_stats(x, level.row_index, num_rows, norm.num_groups, norm.eps, kernels=kernels)
        known = (x, mean, rstd, norm.weight, norm.bias, level.row_index)
        if conv is not None and context.choose(conv, level, level) == "stitch":
            context.record_fused("activation", "stitching")
            return group_norm_silu_stitch(*known, level.neighbours, kernels=kernels)
        return group_norm_apply(*known, activation=conv is not None, kernels=kernels)

    def _by_resolution(self, tokens: Tensor, level: Level) -> Tensor:
        """Apply torch's GroupNorm to the images of each resolution, in float32 for bfloat16 on a CPU, which is slow."""
        norm, channels = self.norm, tokens.shape[1]
        weight, bias, values = norm.weight, norm.bias, tokens
        if tokens.dtype == torch.bfloat16 and tokens.device.type == "cpu":
            weight, bias = (part.flatten() for part in self._affine.of(norm.weight))
            values = tokens.float()
        parts = []
        for group in level.groups:
            part = values[group.start : group.end].view(group.rows, -1, 1, channels).permute(0, 3, 1, 2)
            part = F.group_norm(part, norm.num_groups, weight, bias, norm.eps)
            parts.append(part.permute(0, 2, 3, 1).reshape(-1, channels))
        out = joined(parts)
        return (F.silu(out, inplace=True) if self._fused else out).to(tokens.dtype)

    def _by_sums(self, tokens: Tensor, level: Level) -> Tensor:
        """Compute GroupNorm from sums of the values and of their squares, in float32.

        torch's channels-last GroupNorm in bfloat16 on a CPU is several times slower (239 us for 2 x 24 x 24 x 64). The
        mean of squares minus the square of the mean loses precision, but far less than bfloat16 inputs have lost.
        """
        norm, channels = self.norm, tokens.shape[1]
        num_groups, width = norm.num_groups, channels // norm.num_groups
        values = tokens.float()
        squares = values * values
        sums = [
            source[group.start : group.end].view(group.rows, -1, channels).sum(1)
            for source in (values, squares)
            for group in level.groups
        ]
        means = torch.cat(sums).view(2, -1, num_groups, width).sum(3) / (level.row_tokens * width)
        mean, square = means[0], means[1]
        rstd = torch.addcmul(square, mean, mean, value=-1).clamp_(min=0).add_(norm.eps).rsqrt_()
        scale, shift = self._scale_shift(mean, rstd)
        for group in level.groups:
            part = values[group.start : group.end].view(group.rows, -1, channels)
            torch.addcmul(shift[group.row_slice], part, scale[group.row_slice], out=part)
        if self._fused:
            F.silu(values, inplace=True)
        return values.to(tokens.dtype)

    def _masked(self, tokens: Tensor, active: ActiveSet) -> Tensor:
        """Normalise the tokens of the active cells, with the kept sums of the others."""
        values = tokens.float().view(len(active), -1, tokens.shape[1])
        mean, rstd = self.slots.statistics(values, active, self.norm.eps)
        scale, shift = (part.index_select(0, active.row_of_cell) for part in self._scale_shift(mean, rstd))
        values = torch.addcmul(shift, values, scale)
        if self._fused:
            F.silu(values, inplace=True)
        return values.to(tokens.dtype).view(tokens.shape)

    def _scale_shift(self, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and shift, both [rows, 1, channels] in float32, for statistics (rows, groups)."""
        norm = self.norm
        weight, bias = self._affine.of(norm.weight)
        scale = rstd[:, :, None] * weight
        shift = torch.addcmul(bias, mean[:, :, None], scale, value=-1)
        return scale.view(-1, 1, norm.num_channels), shift.view(-1, 1, norm.num_channels)


class FusableActivation(nn.Module):
    """SiLU, skipped if the norm before it has applied it already."""

    def __init__(self, activation: nn.Module, context: PatchContext) -> None:
        super().__init__()
        self.activation, self.context = activation, context

    def forward(self, x: Tensor) -> Tensor:
        # Timestep embeddings pass through the same module.
        return x if x.dim() == 4 and self.context.consume_fused("activation") else self.activation(x)


class PatchedUpsample(nn.Module):
    """Nearest up-sampling to the next finer level, then the convolution that was in the module."""

    def __init__(self, conv: PatchedConv, context: PatchContext) -> None:
        super().__init__()
        self.conv, self.context = conv, context
        # The input is kept here, before up-sampling, at a quarter of the size.
        conv.keeps_input = False

    def forward(self, hidden_states: Tensor, output_size: object = None) -> Tensor:
        """Up-sample and convolve. diffusers passes `output_size` for odd sides; it is the size of the finer level."""
        context = self.context
        level = context.at(hidden_states)
        finer = context.packing.levels[level.index - 1]
        context.level = finer
        if context.active is not None:
            return self.conv.masked(to_tokens(hidden_states), level, finer)
        if context.cells is not None:
            self.conv.slots.buffer.store(to_tokens(hidden_states), context.cells, level.index)
        if level.neighbours is not None:
            return self.conv(F.interpolate(hidden_states, scale_factor=2.0, mode="nearest"))
        tokens = to_tokens(hidden_states).index_select(0, level.sources_of(finer))
        return self.conv(to_patches(tokens, 1))
