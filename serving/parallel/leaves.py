"""Replacements of a model's leaf modules that work on a strip of rows: convolutions and norms.

Each leaf holds the module that it replaces, with its weights. Source: DistriFusion section 4 and figure 4.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.adapters import adapted_of
from ..core.derived import Derived
from .context import StripContext
from .options import NormOptions


class StripConv(nn.Module):
    """A convolution of 3 x 3 with padding 1 and stride 1 or 2, which needs one row of each neighbour's input.

    Args:
        conv: replaced convolution.
        has_halo: whether its input includes the neighbours' rows, as that of a model's first layer does.

    Attributes:
        is_fed: whether its input includes these rows in exact calls; set by `feed_convolutions`.
    """

    def __init__(self, conv: nn.Conv2d, context: StripContext, *, has_halo: bool = False) -> None:
        super().__init__()
        self.conv, self.context, self._has_halo = conv, context, has_halo
        self.is_fed = False
        self._adapted = adapted_of(conv)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, channels, height, width] -> [rows, out channels, height or half of it, width or half of it]."""
        conv = self.conv
        if not (self.is_fed and self.context.now.is_exact):
            x = self._with_halos(x)
        out = F.conv2d(x, conv.weight, conv.bias, conv.stride, (0, 1))
        if self._adapted is not None:
            self._adapted.add(x, out, lambda down, part: F.conv2d(part, down.weight, None, down.stride, (0, 1)))
        return out

    def _with_halos(self, x: Tensor) -> Tensor:
        """Return the strip with the neighbouring rows that the convolution reads, or zeros beyond the image."""
        context, is_whole = self.context, self.conv.stride[0] == 1
        is_first, is_last = context.place == 0, context.place + 1 == context.now.strips.count
        if self._has_halo:
            return F.pad(x, (0, 0, int(is_first), int(is_last)))
        # With stride 2, the last row that is read belongs to the strip itself, as strips have an even number of rows;
        # the exception is the last strip, after which the image ends.
        above, below = context.halos(self, x, with_lower=is_whole)
        return _between(x, above, below, with_lower=is_whole or is_last)


def _between(
    x: Tensor,
    above: Tensor | None,
    below: Tensor | None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    with_lower: bool = True,
) -> Tensor:
    """Return a strip [rows, channels, height, width] with a row on either side, or above it only.

    The result has the memory format of `x`.

    Args:
        x: the strip.
        above, below: the rows; None for zeros.
        scale, shift: affine map of the strip and the given rows, [rows, channels, 1, 1], in float32; None for none.
        with_lower: whether to add a row below.
    """
    rows, channels, height, width = x.shape
    memory_format = torch.channels_last if is_channels_last(x) else torch.contiguous_format
    shape = (rows, channels, height + 1 + with_lower, width)
    padded = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format)
    for start, part in ((0, above), (1, x), *([(height + 1, below)] if with_lower else [])):
        place = padded[:, :, start : start + (height if part is x else 1)]
        if part is None:
            place.zero_()
        elif scale is None or shift is None:
            place.copy_(part)
        else:
            torch.addcmul(shift, part, scale, out=place)
    return padded


def is_channels_last(x: Tensor) -> bool:
    """Return whether [rows, channels, height, width] is dense in memory with the channels of each pixel contiguous.

    This compares strides, as torch's own check accepts a tensor with sides of 1 for either format.
    """
    _, channels, height, width = x.shape
    return x.stride() == (channels * height * width, 1, width * channels, channels)


class StripGroupNorm(nn.Module):
    """GroupNorm with the statistics of the whole image, of each row and group, as far as they are known.

    Ranks exchange mean and biased variance of their strips in float32, and combine them in float64 in the order of
    strips. `NormOptions` determines the statistics of displaced rows; the other rows wait for all ranks.

    Attributes:
        feeds: whether the output is read only by a convolution, after an activation; set by `feed_convolutions`.
    """

    def __init__(self, norm: nn.GroupNorm, context: StripContext, factor: int) -> None:
        super().__init__()
        self.norm, self.context, self._factor = norm, context, factor
        self.feeds = False
        self._affine = Derived(lambda: [part.float().view(1, norm.num_groups, -1) for part in (norm.weight, norm.bias)])

    def forward(self, x: Tensor) -> Tensor:
        """[rows, channels, height, width] -> the same, in an exact call with the neighbours' rows if it `feeds`."""
        context, num_groups = self.context, self.norm.num_groups
        now = context.now
        options = now.norms
        # Rows are the first dimension, as in all tensors that ranks exchange.
        own = torch.stack(statistics(x, num_groups), 1)
        shares = context.kept("shares", lambda: self._shares(x.device), self._factor)
        if self.feeds and now.is_exact:
            parts, above, below = context.gather_with_halos(self, own, x)
            scale, shift = self._scale_shift(*combined(parts, shares))
            return _between(x, above, below, scale, shift)
        parts, before = context.gather(self, own, [own.shape] * now.strips.count, at_once=options.mode == "sync")
        if any(now.is_displaced) and options.mode not in ("sync", "stale"):
            found = displaced(own, parts, before, context.place, shares, options)
            if not all(now.is_displaced):
                rows = context.kept(
                    "displaced", lambda: torch.tensor(now.is_displaced, device=x.device)[:, None], now.is_displaced
                )
                found = tuple(torch.where(rows, *both) for both in zip(found, combined(parts, shares), strict=True))
        else:
            found = combined(parts, shares)
        scale, shift = self._scale_shift(*found)
        return torch.addcmul(shift, x, scale).to(x.dtype)

    def _shares(self, device: torch.device) -> Tensor:
        """Return the share of each strip in the pixels, (strips, 1, 1) in float64."""
        weights = self.context.now.strips.weights(self._factor)
        return torch.tensor(weights, dtype=torch.float64, device=device)[:, None, None]

    def _scale_shift(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and shift [rows, channels, 1, 1] in float32, from mean and variance [rows, groups]."""
        weight, bias = self._affine.of(self.norm.weight)
        scale = weight * (variance + self.norm.eps).rsqrt().float()[:, :, None]
        shift = bias - scale * mean.float()[:, :, None]
        return scale.flatten(1)[:, :, None, None], shift.flatten(1)[:, :, None, None]


def feed_convolutions(model: nn.Module) -> int:
    """Let norms request the halos of the convolution after them together with their statistics.

    This applies to norms whose output is read only by a convolution, after an activation. In exact calls, ranks then
    wait for each other once instead of twice. Returns the number of convolutions that are fed.

    Args:
        model: model with leaves for strips.
    """
    fed = 0
    for module in model.modules():
        for norm, act, conv in _chains(module):
            # The activation must keep the zeros beyond the image.
            if isinstance(norm, StripGroupNorm) and isinstance(conv, StripConv) and not act(torch.zeros(1)).any():
                norm.feeds = conv.is_fed = True
                fed += 1
    return fed


def _chains(module: Any) -> list[tuple[Any, Any, Any]]:
    """Return the norms, activations and convolutions that diffusers' forward of a module calls in sequence."""
    if type(module).__name__ == "ResnetBlock2D":
        act = module.nonlinearity
        first = [(module.norm1, act, module.conv1)] if module.upsample is None and module.downsample is None else []
        return first if module.time_embedding_norm != "default" else [*first, (module.norm2, act, module.conv2)]
    if hasattr(module, "conv_norm_out"):
        return [(module.conv_norm_out, module.conv_act, module.conv_out)]
    return []


def statistics(x: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance [rows, groups] of [rows, channels, height, width], in float32."""
    rows, channels, height, width = x.shape
    # The normalised output is not needed. The moments are numerically stable and take a quarter of the time of
    # `torch.var_mean`. On a GPU, only one format is supported.
    x = x.float() if x.device.type == "cpu" and is_channels_last(x) else x.float().contiguous()
    _, mean, rstd = torch.native_group_norm(x, None, None, rows, channels, height * width, num_groups, 0.0)
    return mean, rstd.pow(-2)


def combined(parts: Sequence[Tensor], shares: Tensor) -> tuple[Tensor, Tensor]:
    """Combine strips [rows, 2, groups] with these shares of the pixels (strips, 1, 1) to mean and variance
    [rows, groups] in float64: m = sum w_j m_j, var = sum w_j (v_j + (m_j - m)^2).
    """
    means, variances = torch.stack(list(parts)).double().unbind(2)
    mean = (shares * means).sum(0)
    return mean, (shares * (variances + (means - mean).square())).sum(0)


def displaced(
    own: Tensor,
    parts: Sequence[Tensor],
    before: Tensor,
    place: int,
    shares: Tensor,
    options: NormOptions,
) -> tuple[Tensor, Tensor]:
    """Return mean and variance [rows, groups] in float64 of rows that know the other strips from the previous call.

    `separate`: statistics of the rank's own strip. `corrected` (DistriFusion section 4, equation 2): statistics of all
    strips in the previous call, plus the change in the rank's own strip since: m = sum w_j m'_j + (m_i - m'_i), q
    likewise for the mean squares, var = q - m^2. If var is less than `guard` times the variance of the rank's own
    strip, the latter is used instead.

    Args:
        own: mean and biased variance of the rank's own strip, [rows, 2, groups].
        parts: those of all strips, with the rank's own at its index.
        before: those of the rank's own strip in the call that the other parts come from.
        place: index of the rank's own strip.
        shares: share of each strip in the pixels, (strips, 1, 1).
        options: `mode` and `guard`.
    """
    own_mean, own_variance = own.double().unbind(1)
    if options.mode == "separate":
        return own_mean, own_variance
    primed = torch.stack([*parts[:place], before, *parts[place + 1 :]]).double()
    means, variances = primed.unbind(2)
    squares = variances + means.square()
    mean = (shares * means).sum(0) + (own_mean - means[place])
    square = (shares * squares).sum(0) + (own_variance + own_mean.square() - squares[place])
    variance = square - mean.square()
    return mean, torch.where(variance < options.guard * own_variance, own_variance, variance)
