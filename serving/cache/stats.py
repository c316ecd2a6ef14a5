"""Statistics of the cache."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class CacheStats:
    """Statistics of the cache since its creation.

    Attributes:
        patches, skipped: number of patches of requests over all blocks and steps, and number of these that were reused;
            their quotient is the saved computation of PatchedServe, section 8. With a schedule, whole steps count.
        by_block: the same two numbers for every block.
        whole, rows, masked, skipped_blocks: number of times that a block ran in full, for some whole requests, for some
            cells, and not at all.
        refused: number of patches that were computed by decision of the rule; all others had to be computed.
        expired: number of patches that were computed because they had been reused `max_reuse` times in a row.
        uncached: number of times that a block ran without the cache because of the memory bound, by block.
        peak_bytes: largest number of bytes kept.
        overhead_s: seconds spent on decisions and storage, without the blocks themselves.
    """

    patches: int = 0
    skipped: int = 0
    by_block: dict[str, list[int]] = field(default_factory=dict)
    whole: int = 0
    rows: int = 0
    masked: int = 0
    skipped_blocks: int = 0
    refused: int = 0
    expired: int = 0
    uncached: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0
    overhead_s: float = 0.0

    @property
    def saved_share(self) -> float:
        return self.skipped / self.patches if self.patches else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the statistics by name, with the saved share overall and for every block."""
        return {
            "saved_computation": self.saved_share,
            "saved_by_block": {name: skipped / patches for name, (patches, skipped) in self.by_block.items()},
            "blocks_whole": self.whole,
            "blocks_rows": self.rows,
            "blocks_masked": self.masked,
            "blocks_skipped": self.skipped_blocks,
            "patches_refused": self.refused,
            "patches_expired": self.expired,
            "blocks_uncached": sum(self.uncached.values()),
            "uncached_blocks": sorted(self.uncached),
            "peak_mb": self.peak_bytes / 1e6,
            "overhead_s": self.overhead_s,
        }

    def count(self, name: str, patches: int, skipped: int) -> None:
        """Count one pass over one block."""
        self.patches += patches
        self.skipped += skipped
        both = self.by_block.setdefault(name, [0, 0])
        both[0] += patches
        both[1] += skipped
