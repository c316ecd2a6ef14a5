"""Replacements of a model's leaf modules that compute on a strip of rows: convolutions, norms, SD3's embedding.

Each leaf holds the module that it replaces, with its weights. Source: DistriFusion section 4 and figure 4.
"""

from collections.abc import Sequence
from functools import lru_cache
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

    Attributes:
        is_fed: whether its input does in exact calls; see `feed_convolutions`.
    """

    def __init__(self, conv: nn.Conv2d, context: StripContext, *, has_halo: bool = False) -> None:
        super().__init__()
        self.conv, self.context, self._has_halo = conv, context, has_halo
        self.is_fed = False

    def forward(self, x: Tensor) -> Tensor:
        """[rows, channels, height, width] -> [rows, out channels, height or half of it, width or half of it]."""
        conv = self.conv
        if not (self.is_fed and self.context.now.is_exact):
            x = self._with_halos(x)
        return F.conv2d(x, conv.weight, conv.bias, conv.stride, (0, 1))

    def _with_halos(self, x: Tensor) -> Tensor:
        """With the rows around it that are read, or zeros beyond the image."""
        context, is_whole = self.context, self.conv.stride[0] == 1
        is_first, is_last = context.place == 0, context.place + 1 == context.now.strips.count
        if self._has_halo:
            return F.pad(x, (0, 0, int(is_first), int(is_last)))
        # With stride 2, the last row that is read is the strip's own, as strips end after an even row; but for the last
        # strip, behind which the image ends.
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
    """A strip [rows, channels, height, width] with a row on either side, or above it only; of zeros where there is
    none. It has the memory format of `x`.

    Args:
        x: the strip.
        above, below: the rows.
        scale, shift: of all that is there, [rows, channels, 1, 1], in float32; None for as it is.
        with_lower: whether there is a row below.
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
    """Whether the channels of each pixel of [rows, channels, height, width] lie side by side, and nothing between.

    By the strides themselves: torch's own question takes a tensor with sides of 1 for either format.
    """
    _, channels, height, width = x.shape
    return x.stride() == (channels * height * width, 1, width * channels, channels)


class StripGroupNorm(nn.Module):
    """GroupNorm with the statistics of the whole image, of each row and group, as far as they are known.

    Ranks tell each other mean and biased variance of their strips in float32, and combine them in float64 in the order
    of strips. How displaced rows do it says `NormOptions`; the others wait for all ranks.

    Attributes:
        feeds: whether only a convolution reads what comes out, and behind an activation; see `feed_convolutions`.
    """

    def __init__(self, norm: nn.GroupNorm, context: StripContext, factor: int) -> None:
        super().__init__()
        self.norm, self.context, self._factor = norm, context, factor
        self.feeds = False
        self._affine = Derived(lambda: [part.float().view(1, norm.num_groups, -1) for part in (norm.weight, norm.bias)])

    def forward(self, x: Tensor) -> Tensor:
        """[rows, channels, height, width] -> the same, or in an exact call with the neighbours' rows if it `feeds`."""
        context, num_groups = self.context, self.norm.num_groups
        now = context.now
        options = now.norms
        # Rows come first, as in all that ranks send each other.
        own = torch.stack(statistics(x, num_groups), 1)
        if self.feeds and now.is_exact:
            parts, above, below = context.gather_with_halos(self, own, x)
            scale, shift = self._scale_shift(*combined(parts, now.strips.weights(self._factor)))
            return _between(x, above, below, scale, shift)
        parts, before = context.gather(self, own, [own.shape] * now.strips.count, at_once=options.mode == "sync")
        weights = now.strips.weights(self._factor)
        if any(now.is_displaced) and options.mode not in ("sync", "stale"):
            pixels = x.shape[1] // num_groups * x.shape[2] * x.shape[3]
            found = displaced(own, parts, before, context.place, weights, options, pixels)
            if not all(now.is_displaced):
                rows = torch.tensor(now.is_displaced, device=x.device)[:, None]
                found = tuple(torch.where(rows, *both) for both in zip(found, combined(parts, weights), strict=True))
        else:
            found = combined(parts, weights)
        scale, shift = self._scale_shift(*found)
        return torch.addcmul(shift, x, scale).to(x.dtype)

    def _scale_shift(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, channels, 1, 1] in float32, from mean and variance [rows, groups]."""
        weight, bias = self._affine.of(self.norm.weight)
        scale = weight * (variance + self.norm.eps).rsqrt().float()[:, :, None]
        shift = bias - scale * mean.float()[:, :, None]
        return scale.flatten(1)[:, :, None, None], shift.flatten(1)[:, :, None, None]


def feed_convolutions(model: nn.Module) -> int:
    """Let norms whose result only a convolution reads, behind an activation, ask for its halos with their statistics,
    so that in exact calls ranks wait for each other once and not twice. Returns how many convolutions are fed.

    Args:
        model: with leaves of strips.
    """
    fed = 0
    for module in model.modules():
        for norm, act, conv in _chains(module):
            # Beyond the image there are zeros, which stay zeros behind the activation.
            if isinstance(norm, StripGroupNorm) and isinstance(conv, StripConv) and not act(torch.zeros(1)).any():
                norm.feeds = conv.is_fed = True
                fed += 1
    return fed


def _chains(module: Any) -> list[tuple[Any, Any, Any]]:
    """Norm, activation and convolution that diffusers' forward of a module calls one after the other."""
    if type(module).__name__ == "ResnetBlock2D":
        act = module.nonlinearity
        first = [(module.norm1, act, module.conv1)] if module.upsample is None and module.downsample is None else []
        return first if module.time_embedding_norm != "default" else [*first, (module.norm2, act, module.conv2)]
    if hasattr(module, "conv_norm_out"):
        return [(module.conv_norm_out, module.conv_act, module.conv_out)]
    return []


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
    shares = _shares(tuple(weights), means.device)
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
    shares = _shares(tuple(weights), means.device)
    squares = variances + means.square()
    mean = (shares * means).sum(0) + (own_mean - means[place])
    square = (shares * squares).sum(0) + (own_variance + own_mean.square() - squares[place])
    variance = square - mean.square()
    if options.bessel:
        variance = variance * (num_values / (num_values - 1))
    return mean, torch.where(variance < options.guard * own_variance, own_variance, variance)


@lru_cache(256)
def _shares(weights: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(weights, dtype=torch.float64, device=device)[:, None, None]


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
