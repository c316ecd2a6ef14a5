"""What one call of a denoising model costs, in closed form: MACs, what ranks send each other, slots. No torch.

Source: DistriFusion section 5, tables 1 and 2.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from .levels import Level, Levels
from .strips import Strips

Halos = Literal["neighbours", "all"]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the model.

    Attributes:
        height, width: of the latents.
        text_length: tokens of the text.
        rows: of the batch; with guidance, a request has two.
    """

    height: int
    width: int
    text_length: int
    rows: int = 2


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank does of a call.

    Attributes:
        strips: of all ranks.
        place: of this one.
        text_starts: where each rank's part of SD3's text stream starts, and the end; empty where each has all of it.
    """

    strips: Strips
    place: int
    text_starts: tuple[int, ...] = ()

    def text(self, length: int) -> int:
        """Tokens of the text stream that are this rank's."""
        return self._own(self.text_starts) if self.text_starts else length

    def rows(self, factor: int) -> int:
        """Of the strip, where images are smaller by a factor."""
        return self._own(self.strips.at(factor))

    def _own(self, starts: tuple[int, ...]) -> int:
        start, end = list(pairwise(starts))[self.place]
        return end - start


@dataclass(frozen=True, slots=True)
class Received:
    """Elements that a rank receives in a call from the others' leaves. Latents and predictions are not among them.

    Attributes:
        key_values: keys and values of other strips.
        halos: rows beside a strip.
        statistics: of GroupNorms; always float32.
    """

    key_values: int
    halos: int
    statistics: int

    def num_bytes(self, per_element: int) -> int:
        """With so many bytes for an element of the model."""
        return per_element * (self.key_values + self.halos) + 4 * self.statistics


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a model. Ranks receive the same in every call, `sync` or `displaced`; but for a displaced request's last one
    nothing follows, so that it has none then.
    """

    levels: Levels

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Cost":
        """See `Levels.of`."""
        return cls(Levels.of(config))

    def macs(self, call: Call) -> int:
        """MACs of the unmodified model."""
        levels, text = self.levels, call.text_length
        total = levels.per_row + text * (levels.per_text_once + levels.per_text)
        for level, height, width in self._sizes(call):
            pixels = height * width
            total += pixels * (level.per_pixel + pixels * level.per_pair + text * level.per_text_pair)
            if levels.per_text_query:
                total += text * (text + pixels) * levels.per_text_query
        return call.rows * total

    def strip_macs(self, call: Call, share: Share) -> int:
        """MACs of one rank of several; without `text_macs`."""
        levels, text, own_text = self.levels, call.text_length, share.text(call.text_length)
        total = levels.per_row + own_text * levels.per_text
        for factor, (level, height, width) in zip(levels.by_factor, self._sizes(call), strict=True):
            pixels, own = height * width, share.rows(factor) * width
            total += own * (level.per_pixel + pixels * level.per_pair + text * level.per_text_pair)
            if levels.per_text_query:
                total += own_text * (text + pixels) * (levels.per_text_query - levels.per_idle_query)
        return call.rows * total

    def text_macs(self, call: Call) -> int:
        """MACs of a rank, once a request: keys and values of its text."""
        return call.rows * call.text_length * self.levels.per_text_once

    def received(self, call: Call, share: Share, halos: Halos = "neighbours") -> Received:
        """What a rank receives in a call.

        Args:
            call, share: of the rank.
            halos: `neighbours`: the row above the strip and the one below it, as we send them. `all`: the first and the
                last row of every other strip, as an all-gather does (DistriFusion's code).
        """
        others, is_first = share.strips.count - 1, share.place == 0
        is_last = share.place == others
        key_values = (call.text_length - share.text(call.text_length)) * self.levels.text_key_values
        rows = statistics = 0
        for factor, (level, height, width) in zip(self.levels.by_factor, self._sizes(call), strict=True):
            key_values += (height - share.rows(factor)) * width * level.key_values
            if halos == "all":
                rows += 2 * others * level.above * width
            else:
                rows += (level.above * (not is_first) + level.below * (not is_last)) * width
            statistics += 2 * others * level.groups
        return Received(call.rows * key_values, call.rows * rows, call.rows * statistics)

    def most_received(self, call: Call, num_ranks: int, halos: Halos = "neighbours") -> Received:
        """What the rank that receives most does of a call that all ranks share evenly; see `received`."""
        strips = Strips.of(call.height, self.levels.unit, (1.0,) * num_ranks)
        every = [self.received(call, Share(strips, place), halos) for place in range(num_ranks)]
        return max(every, key=lambda received: received.key_values + received.halos)

    def slots(self, call: Call) -> int:
        """Elements of keys and values that a rank keeps of a displaced call for the next one."""
        pixels = ((level, height * width) for level, height, width in self._sizes(call))
        return call.rows * sum(count * level.key_values for level, count in pixels)

    def _sizes(self, call: Call) -> Iterator[tuple[Level, int, int]]:
        """Every level, with height and width there."""
        for factor, level in self.levels.by_factor.items():
            yield level, -(-call.height // factor), -(-call.width // factor)
