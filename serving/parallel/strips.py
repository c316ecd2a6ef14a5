"""Division of an image's rows among ranks, at every level of a model. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...data.errors import UsageError


@dataclass(frozen=True, slots=True)
class Strips:
    """Rows of latents by rank: rank i owns those from `starts[i]` up to `starts[i + 1]`.

    Attributes:
        starts: first row of every rank, then the height; all but the last are multiples of `unit`, so that a strip ends
            where its down-sampled form ends.
        unit: number of rows of latents that make one row at the deepest level.
    """

    starts: tuple[int, ...]
    unit: int

    @classmethod
    def of(cls, height: int, unit: int, shares: Sequence[float]) -> "Strips":
        """Divide `height` rows in proportion to the shares, as closely as whole units allow.

        Raises:
            UsageError: there are fewer units than shares; the message states how many ranks can share the height.
        """
        units, count, total = -(-height // unit), len(shares), sum(shares)
        if count > units:
            raise UsageError(
                f"{count} ranks are too many for latents of {height} rows, of which {unit} stay together: "
                f"at most {units} can share them"
            )
        cuts, so_far = [0], 0.0
        for rank, share in enumerate(shares[:-1]):
            so_far += share
            # Every rank before and after the cut keeps at least one unit.
            cuts.append(min(max(round(units * so_far / total), cuts[-1] + 1), units - (count - rank - 1)))
        return cls((*(unit * cut for cut in cuts), height), unit)

    @property
    def count(self) -> int:
        """Number of strips."""
        return len(self.starts) - 1

    def at(self, factor: int) -> tuple[int, ...]:
        """Return `starts` where images are smaller by a factor that divides `unit`; models round sizes up, as here."""
        return tuple(-(-start // factor) for start in self.starts)

    def heights(self, factor: int) -> tuple[int, ...]:
        """Return the number of rows of every strip where images are smaller by a factor."""
        return tuple(end - start for start, end in pairwise(self.at(factor)))

    def weights(self, factor: int) -> tuple[float, ...]:
        """Return the share of every strip in the pixels of an image."""
        heights = self.heights(factor)
        return tuple(height / sum(heights) for height in heights)
