"""Cost of one call of a denoising model, in closed form: MACs, communication between ranks, and slots. No torch.

Source: DistriFusion section 5, tables 1 and 2.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from .levels import LevelCounts, Levels
from .strips import Strips

Halos = Literal["neighbours", "all"]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the model.

    Attributes:
        height, width: size of the latents.
        text_length: number of text tokens.
        rows: number of rows in the batch; with guidance, a request has two.
    """

    height: int
    width: int
    text_length: int
    rows: int = 2


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's share of a call.

    Attributes:
        strips: strips of all ranks.
        place: index of this rank's strip.
        text_starts: start of each rank's part of the text stream, then the end; empty if each rank has all of it.
    """

    strips: Strips
    place: int
    text_starts: tuple[int, ...] = ()

    def text(self, length: int) -> int:
        """Return the number of tokens of the text stream that belong to this rank."""
        return self._own(self.text_starts) if self.text_starts else length

    def rows(self, factor: int) -> int:
        """Return the number of rows of the strip where images are smaller by a factor."""
        return self._own(self.strips.at(factor))

    def _own(self, starts: tuple[int, ...]) -> int:
        start, end = list(pairwise(starts))[self.place]
        return end - start


@dataclass(frozen=True, slots=True)
class ReceivedElements:
    """Number of elements that a rank receives from the others' leaves in a call, without latents and predictions.

    Attributes:
        key_values: elements of keys and values of other strips.
        halos: elements of the rows beside a strip.
        statistics: elements of GroupNorm statistics, which are always float32.
    """

    key_values: int
    halos: int
    statistics: int

    def num_bytes(self, per_element: int) -> int:
        """Return the number of bytes, given the bytes per element of the model."""
        return per_element * (self.key_values + self.halos) + 4 * self.statistics


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a model's calls.

    Ranks receive the same amount in every call, `sync` or `displaced`. The exception is the last call of a displaced
    request: no call follows it, so nothing is sent.
    """

    levels: Levels

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Cost":
        """Return the cost of a U-Net, from its config."""
        return cls(Levels.of(config))

    def macs(self, call: Call) -> int:
        """Return the MACs of the unmodified model."""
        levels, text = self.levels, call.text_length
        total = levels.per_row + text * (levels.per_text_once + levels.per_text)
        for level, height, width in self._sizes(call):
            pixels = height * width
            total += pixels * (level.per_pixel + pixels * level.per_pair + text * level.per_text_pair)
            if levels.per_text_query:
                total += text * (text + pixels) * levels.per_text_query
        return call.rows * total

    def strip_macs(self, call: Call, share: Share) -> int:
        """Return the MACs of one of several ranks, without `text_macs`."""
        levels, text, own_text = self.levels, call.text_length, share.text(call.text_length)
        total = levels.per_row + own_text * levels.per_text
        for factor, (level, height, width) in zip(levels.by_factor, self._sizes(call), strict=True):
            pixels, own = height * width, share.rows(factor) * width
            total += own * (level.per_pixel + pixels * level.per_pair + text * level.per_text_pair)
            if levels.per_text_query:
                total += own_text * (text + pixels) * (levels.per_text_query - levels.per_idle_query)
        return call.rows * total

    def text_macs(self, call: Call) -> int:
        """Return the MACs of a rank that occur once per request: the keys and values of its text."""
        return call.rows * call.text_length * self.levels.per_text_once

    def received(self, call: Call, share: Share, halos: Halos = "neighbours") -> ReceivedElements:
        """Return the number of elements that a rank receives in a call.

        Args:
            call: the call of the model.
            share: the rank's share of it.
            halos: `neighbours`: the row above the strip and the row below it, as we send them. `all`: the first and the
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
        return ReceivedElements(call.rows * key_values, call.rows * rows, call.rows * statistics)

    def max_received(self, call: Call, num_ranks: int, halos: Halos = "neighbours") -> ReceivedElements:
        """Return what the rank that receives most gets in a call that all ranks share evenly, as `received` counts."""
        strips = Strips.of(call.height, self.levels.unit, (1.0,) * num_ranks)
        every = [self.received(call, Share(strips, place), halos) for place in range(num_ranks)]
        return max(every, key=lambda received: received.key_values + received.halos)

    def slots(self, call: Call) -> int:
        """Return the elements of keys and values that a rank keeps from a displaced call for the next one."""
        pixels = ((level, height * width) for level, height, width in self._sizes(call))
        return call.rows * sum(count * level.key_values for level, count in pixels)

    def _sizes(self, call: Call) -> Iterator[tuple[LevelCounts, int, int]]:
        """Iterate over the levels, with the height and width of the images there."""
        for factor, level in self.levels.by_factor.items():
            yield level, -(-call.height // factor), -(-call.width // factor)
