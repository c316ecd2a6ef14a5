"""Computation and communication of a denoising model by level, from its configuration. No torch.

A level consists of the layers whose images are smaller than the latents by the same factor. Multiply-accumulates (MACs)
are those of matrix products, convolutions and attention; norms, activations and the like are not counted, as is
customary.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class LevelCounts:
    """Counts of one level, for one row of a batch.

    Attributes:
        per_pixel: MACs per pixel.
        per_pair: MACs of a pixel with each pixel that it attends to.
        per_text_pair: MACs of a pixel with each text token that it attends to.
        key_values: elements of a pixel's keys and values that other ranks need.
        above, below: channels of the rows above and below a strip that its convolutions need.
        groups: number of groups in all GroupNorms.
    """

    per_pixel: int = 0
    per_pair: int = 0
    per_text_pair: int = 0
    key_values: int = 0
    above: int = 0
    below: int = 0
    groups: int = 0


@dataclass(slots=True)
class Levels:
    """Counts of a model for one row of a batch: its levels by factor, and the parts that belong to no place in the
    image.

    Attributes:
        by_factor: the levels, by the factor between latents and images.
        per_row: MACs that depend neither on the image nor on the text, such as those of the timestep.
        per_text_once: MACs of a text token that are the same in every call: U-Nets' keys and values of the text.
        per_text: MACs of a token of a text stream.
        per_text_query: MACs of such a token with each token of text and image that it attends to.
        per_idle_query: the part of `per_text_query` whose result is never read, which strips leave out.
        text_key_values: elements of keys and values of such a token.
    """

    by_factor: dict[int, LevelCounts] = field(default_factory=lambda: defaultdict(LevelCounts))
    per_row: int = 0
    per_text_once: int = 0
    per_text: int = 0
    per_text_query: int = 0
    per_idle_query: int = 0
    text_key_values: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Levels":
        """Count the levels of a U-Net, from a config with all keys of diffusers' `model.config`."""
        return _UNet(config).levels

    @property
    def unit(self) -> int:
        """Number of rows of latents that must stay together."""
        return max(self.by_factor)

    def attention(self, factor: int, channels: int) -> None:
        """Add a self attention of pixels: its projections, its products, and the elements that other ranks need."""
        level = self.by_factor[factor]
        level.per_pixel += 4 * channels**2
        level.per_pair += 2 * channels
        level.key_values += 2 * channels


class _UNet:
    """Counts the levels of `UNet2DConditionModel`, in the order of its constructor."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.levels, self._groups = Levels(), config["norm_num_groups"]
        channels: Sequence[int] = config["block_out_channels"]
        depth, first, last = len(channels), channels[0], channels[-1]
        self._time = config["time_embedding_dim"] or 4 * first
        self._time_outs = 2 if config["resnet_time_scale_shift"] == "scale_shift" else 1
        counts, widths = (_each(config[name], depth) for name in ("layers_per_block", "cross_attention_dim"))
        blocks = _each(config["transformer_layers_per_block"], depth)
        up_blocks = config["reverse_transformer_layers_per_block"] or blocks[::-1]

        self._embedding(first)
        if config["addition_embed_type"] is not None:
            self._embedding(config["projection_class_embeddings_input_dim"])
        # The neighbours' rows of latents are sent with the latents.
        self.levels.by_factor[1].per_pixel += 9 * config["in_channels"] * first
        skips = [first]
        for index, kind in enumerate(config["down_block_types"]):
            factor, own = 2**index, channels[index]
            for number in range(counts[index]):
                self._resnet(factor, skips[-1], own)
                self._transformer(factor, own, _each(blocks[index], counts[index])[number], widths[index], kind)
                skips.append(own)
            if index + 1 < depth:
                # The last row that stride 2 reads belongs to the strip itself.
                self.levels.by_factor[factor].above += own
                self.levels.by_factor[2 * factor].per_pixel += 9 * own**2
                skips.append(own)

        self._resnet(2 ** (depth - 1), last, last)
        self._transformer(2 ** (depth - 1), last, blocks[-1], widths[-1], config["mid_block_type"])
        self._resnet(2 ** (depth - 1), last, last)

        before = last
        for index, kind in enumerate(config["up_block_types"]):
            factor, own, count = 2 ** (depth - 1 - index), channels[depth - 1 - index], counts[depth - 1 - index] + 1
            for number in range(count):
                self._resnet(factor, before + skips.pop(), own)
                self._transformer(factor, own, _each(up_blocks[index], count)[number], widths[depth - 1 - index], kind)
                before = own
            if index + 1 < depth:
                self._conv(factor // 2, own, own)
        self.levels.by_factor[1].groups += self._groups
        self._conv(1, first, config["out_channels"])

    def _embedding(self, width: int) -> None:
        self.levels.per_row += (width + self._time) * self._time

    def _conv(self, factor: int, channels: int, out: int) -> None:
        """Add a convolution of 3 x 3."""
        level = self.levels.by_factor[factor]
        level.per_pixel += 9 * channels * out
        level.above += channels
        level.below += channels

    def _resnet(self, factor: int, channels: int, out: int) -> None:
        self._conv(factor, channels, out)
        self._conv(factor, out, out)
        level = self.levels.by_factor[factor]
        level.per_pixel += channels * out if channels != out else 0
        level.groups += 2 * self._groups
        self.levels.per_row += self._time * self._time_outs * out

    def _transformer(self, factor: int, channels: int, num_blocks: int, text_width: int, kind: str) -> None:
        if "CrossAttn" not in kind:
            return
        level = self.levels.by_factor[factor]
        level.groups += self._groups
        level.per_pixel += 2 * channels**2
        for _ in range(num_blocks):
            self.levels.attention(factor, channels)
            # Query and output of the attention to the text, and the gated feed-forward: 8 channels in, 4 out.
            level.per_pixel += 14 * channels**2
            level.per_text_pair += 2 * channels
            self.levels.per_text_once += 2 * channels * text_width


def _each(value: Any, count: int) -> Sequence[Any]:
    """Return a sequence as it is, and a single value repeated `count` times."""
    return value if isinstance(value, Sequence) else (value,) * count
