"""Replacements of a model's leaf modules that compute on a strip of rows: convolutions, norms, SD3's embedding.

Each leaf holds the module that it replaces, with its weights. Source: DistriFusion section 4 and figure 4.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.derived import Derived
from .context import StripContext
from .options import NormOptions


class StripConv(nn.Module):
    """A convolution of 3 x 3 with padding 1 and stride 1 or 2: a row of each neighbour's input is all that it lacks.

    Args:
        conv: what it replaces.
        has_halo: whether its input comes with the neighbours' rows, as that of a model's first layer does.
    """

    def __init__(self, conv: nn.Conv2d, context: StripContext, *, has_halo: bool = False) -> None:
        super().__init__()
        self.conv, self.context, self._has_halo = conv, context, has_halo

    def forward(self, x: Tensor) -> Tensor:
        """[rows, channels, height, width] -> [rows, out channels, height or half of it, width or half of it]."""
        conv, context = self.conv, self.context
        is_first, is_last = context.place == 0, context.place + 1 == context.now.strips.count
        if self._has_halo:
            x = F.pad(x, (0, 0, int(is_first), int(is_last)))
        else:
            # With stride 2, the last row that is read is the strip's own, as strips end after an even row; but for the
            # last strip, behind which the image ends.
            above, below = context.halos(self, x, with_lower=conv.stride[0] == 1)
            x = _between(x, above, below, with_lower=conv.stride[0] == 1 or is_last)
        return F.conv2d(x, conv.weight, conv.bias, conv.stride, (0, 1))


def _between(x: Tensor, above: Tensor | None, below: Tensor | None, *, with_lower: bool) -> Tensor:
    """A strip [rows, channels, height, width] with a row on either side, or above it only; of zeros where there is
    none. It has the memory format of `x`.
    """
    rows, channels, height, width = x.shape
    memory_format = torch.channels_last if is_channels_last(x) else torch.contiguous_format
    shape = (rows, channels, height + 1 + with_lower, width)
    padded = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format)
    padded[:, :, 1 : height + 1] = x
    padded[:, :, :1] = 0 if above is None else above
    if with_lower:
        padded[:, :, -1:] = 0 if below is None else below
    return padded


def is_channels_last(x: Tensor) -> bool:
    """Whether the channels of each pixel of [rows, channels, height, width] lie side by side, and nothing between.

    By the strides themselves: torch's own question takes a tensor with sides of 1 for either format.
    """
    _, channels, height, width = x.shape
    return x.stride() == (channels * height * width, 1, width * channels, channels)


class StripGroupNorm(nn.Module):
    """GroupNorm with the statistics of the whole image, of each row and group, as far as they are known.

    Ranks tell each other mean and biased variance of their strips in float32, and combine them in float64 in the order
    of strips. How displaced rows do it says `NormOptions`; the others wait for all ranks.
    """

    def __init__(self, norm: nn.GroupNorm, context: StripContext, factor: int) -> None:
        super().__init__()
        self.norm, self.context, self._factor = norm, context, factor
        self._affine = Derived(lambda: [part.float().view(1, norm.num_groups, -1) for part in (norm.weight, norm.bias)])

    def forward(self, x: Tensor) -> Tensor:
        """[rows, channels, height, width] -> the same."""
        context, num_groups = self.context, self.norm.num_groups
        now = context.now
        options = now.norms
        # Rows come first, as in all that ranks send each other.
        own = torch.stack(statistics(x, num_groups), 1)
        parts, before = context.gather(self, own, [own.shape] * now.strips.count, at_once=options.mode == "sync")
        weights = now.strips.weights(self._factor)
        mean, variance = combined(parts, weights)
        if any(now.is_displaced) and options.mode not in ("sync", "stale"):
            pixels = x.shape[1] // num_groups * x.shape[2] * x.shape[3]
            others = displaced(own, parts, before, context.place, weights, options, pixels)
            displaced_rows = torch.tensor(now.is_displaced, device=x.device)[:, None]
            mean, variance = (torch.where(displaced_rows, *both) for both in zip(others, (mean, variance), strict=True))
        return self._normalized(x, mean, variance)

    def _normalized(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """With mean and variance [rows, groups], in float32 whatever the dtype of `x`."""
        weight, bias = self._affine.of(self.norm.weight)
        scale = weight * (variance + self.norm.eps).rsqrt().float()[:, :, None]
        shift = bias - scale * mean.float()[:, :, None]
        shape = (x.shape[0], x.shape[1], 1, 1)
        return torch.addcmul(shift.view(shape), x, scale.view(shape)).to(x.dtype)


def statistics(x: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Mean and biased variance [rows, groups] of [rows, channels, height, width], in float32."""
    rows, channels, height, width = x.shape
    # What it makes of `x` is not needed; its moments are stable, and take a quarter of the time of `torch.var_mean`. On
    # a GPU it reads one format only.
    x = x.float() if x.device.type == "cpu" and is_channels_last(x) else x.float().contiguous()
    _, mean, rstd = torch.native_group_norm(x, None, None, rows, channels, height * width, num_groups, 0.0)
    return mean, rstd.pow(-2)


def combined(parts: Sequence[Tensor], weights: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Mean and variance [rows, groups] in float64 of strips [rows, 2, groups] with these shares of the pixels:
    m = sum w_j m_j, var = sum w_j (v_j + (m_j - m)^2).
    """
    means, variances = torch.stack(list(parts)).double().unbind(2)
    shares = _shares(weights, means)
    mean = (shares * means).sum(0)
    return mean, (shares * (variances + (means - mean).square())).sum(0)


def displaced(
    own: Tensor,
    parts: Sequence[Tensor],
    before: Tensor,
    place: int,
    weights: Sequence[float],
    options: NormOptions,
    num_values: int,
) -> tuple[Tensor, Tensor]:
    """Mean and variance [rows, groups] in float64 of rows that know the other strips of the call before.

    `separate`: of the own strip. `corrected` (DistriFusion section 4, equation 2): what all strips had in the call
    before, and what has changed in the own one since: m = sum w_j m'_j + (m_i - m'_i), q the same of the mean squares,
    var = q - m^2. Where that is negative, or less than `guard` of it, the variance is the own strip's.

    Args:
        own: this strip's mean and biased variance, [rows, 2, groups].
        parts: those of all strips, the own one in its place.
        before: the own one's in the call from which those of the others are.
        place: of the own strip.
        weights: of the strips.
        options: `mode`, `bessel` and `guard`.
        num_values: of a group in the own strip, for `bessel`.
    """
    own_mean, own_variance = own.double().unbind(1)
    if options.mode == "separate":
        return own_mean, own_variance
    primed = torch.stack([*parts[:place], before, *parts[place + 1 :]]).double()
    means, variances = primed.unbind(2)
    shares = _shares(weights, means)
    squares = variances + means.square()
    mean = (shares * means).sum(0) + (own_mean - means[place])
    square = (shares * squares).sum(0) + (own_variance + own_mean.square() - squares[place])
    variance = square - mean.square()
    if options.bessel:
        variance = variance * (num_values / (num_values - 1))
    return mean, torch.where(variance < options.guard * own_variance, own_variance, variance)


def _shares(weights: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(weights, dtype=torch.float64, device=like.device)[:, None, None]


class StripPatchEmbed(nn.Module):
    """SD3's embedding of latents: positions are cropped for the whole image, then those of the strip are taken."""

    def __init__(self, embed: Any, context: StripContext) -> None:
        super().__init__()
        self.embed, self.context = embed, context

    def forward(self, latent: Tensor) -> Tensor:
        """[rows, channels, height, width] -> [rows, tokens, channels]."""
        embed, strips = self.embed, self.context.now.strips
        width = latent.shape[3] // embed.patch_size
        starts = strips.at(embed.patch_size)
        positions = embed.cropped_pos_embed(strips.starts[-1], latent.shape[3])
        own = positions[:, starts[self.context.place] * width : starts[self.context.place + 1] * width]
        tokens = embed.proj(latent).flatten(2).transpose(1, 2)
        return (tokens + own).to(tokens.dtype)
