"""Step latencies for schedulers and the simulator: interpolated from a table, per resolution, memoised. No torch."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from ...data.errors import UsageError
from ...data.resolution import Resolution
from ...data.work import Work, is_part, resolution_of, share_of
from ...training.latency.least_squares import relative_line
from .policies.base import StepLatencyPredictor

Batch = tuple[Resolution | Work, ...]
"""Works of a batch, with repeats, sorted."""
_NUM_NEIGHBOURS = 4
_NEAREST = 1e-3
_MAX_REMEMBERED = 200_000


def batch_of(active: Sequence[Resolution | Work]) -> Batch:
    """Return the batch as a dictionary key."""
    return tuple(sorted(active))


class MemoisedLatency:
    """Memoises a predictor that does not change. The order of the resolutions does not matter."""

    def __init__(self, predictor: StepLatencyPredictor) -> None:
        self._predictor = predictor
        self._known: dict[Batch, float] = {}

    def step_latency_s(self, active: Sequence[Resolution | Work]) -> float:
        """Return the seconds of one step over `active`, from memory if known.

        Raises:
            ValueError: the predictor returns something other than a positive finite number.
        """
        key = tuple(active)
        latency_s = self._known.get(key)
        if latency_s is None:
            batch = batch_of(key)
            latency_s = self._known.get(batch)
            if latency_s is None:
                latency_s = float(self._predictor.step_latency_s(batch))
                if not 0 < latency_s < math.inf:
                    names = ", ".join(map(str, batch))
                    raise ValueError(f"step latency of {names} is predicted as {latency_s} s, but must be above 0")
                self._remember(batch, latency_s)
            self._remember(key, latency_s)
        return latency_s

    def _remember(self, key: Batch, latency_s: float) -> None:
        if len(self._known) >= _MAX_REMEMBERED:
            self._known.clear()
        self._known[key] = latency_s


class PerResolutionLatency:
    """Step latencies of the plain engine: one forward pass for each resolution, one after the other."""

    def __init__(self, predictor: StepLatencyPredictor) -> None:
        self._predictor = predictor

    def step_latency_s(self, active: Sequence[Resolution | Work]) -> float:
        """Return the seconds of one step over `active`: the sum over its batches of one resolution."""
        counts = Counter(active)
        return sum(self._predictor.step_latency_s((resolution,) * counts[resolution]) for resolution in sorted(counts))


class TableLatency:
    """Step latencies from a table of measured batches. Batches that were not measured are interpolated.

    First a line is fitted to the table by non-negative least squares of relative errors,

        latency = a + b * (distinct resolutions) + sum over resolutions of c * (requests)

    so that no batch gets faster by growing; terms that the table cannot tell apart count once (`relative_line`).
    Batches do not grow along a line (small ones do not fill the device). The fitted value is therefore multiplied by
    the deviation of the table from the line nearby: the mean of measured / fitted over the four nearest batches,
    weighted by the inverse distance. The distance is the number of requests to add or remove.

    Args:
        latencies: seconds of one step by batch; the order of a batch's resolutions does not matter.

    Attributes:
        max_batch_size: number of requests in the largest measured batch.
        num_too_large: number of predictions for batches with more requests than that.
        num_measured: number of batches in the table.

    Raises:
        UsageError: the table is empty, has an empty batch, the same one twice, or a latency that is not above 0.
    """

    def __init__(self, latencies: Mapping[tuple[Resolution, ...], float]) -> None:
        self._measured: dict[Batch, float] = {}
        for active, latency_s in latencies.items():
            batch = batch_of(active)
            name = ", ".join(map(str, batch))
            if not batch:
                raise UsageError("the latency table has a batch of no requests")
            if not 0 < latency_s < math.inf:
                raise UsageError(f"the latency of {name} is {latency_s:g} s, but it must be above 0 and finite")
            if batch in self._measured:
                raise UsageError(f"the latency table has {name} twice")
            self._measured[batch] = latency_s
        if not self._measured:
            raise UsageError("the latency table is empty, but it must hold at least one batch")
        self.max_batch_size = max(map(len, self._measured))
        self.num_too_large, self.num_measured = 0, len(self._measured)
        self.resolutions = tuple(sorted({resolution for batch in self._measured for resolution in batch}))
        self._counts = np.array([self._count(batch) for batch in self._measured], dtype=float)
        measured_s = np.array(list(self._measured.values()))
        self._weights = relative_line(self._features(self._counts), measured_s)
        self._off_line = measured_s / (self._features(self._counts) @ self._weights)

    def step_latency_s(self, active: Sequence[Resolution | Work]) -> float:
        """Return the seconds of one step over `active`: measured if the table has the batch, otherwise interpolated.

        Raises:
            UsageError: the table does not cover a resolution or this number of requests, or the batch is empty.
        """
        batch = batch_of(active)
        if batch in self._measured:
            return self._measured[batch]
        if not batch:
            raise UsageError("a batch of no requests has no step latency")
        self.check(batch)
        if len({len(known) for known in self._measured}) == 1 and len(batch) != self.max_batch_size:
            raise UsageError(
                f"asked for a batch of {len(batch)} requests, but all batches of the latency table have "
                f"{self.max_batch_size}, which says nothing of others"
            )
        self.num_too_large += len(batch) > self.max_batch_size
        counts = np.array(self._count(batch), dtype=float)
        distances = np.abs(self._counts - counts).sum(axis=1)
        # Stable, so that ties are broken by the order of the table.
        nearest = np.argsort(distances, kind="stable")[:_NUM_NEIGHBOURS]
        # With references, a batch may have the same counts as a measured one.
        near = 1 / np.maximum(distances[nearest], _NEAREST)
        factor = float(near @ self._off_line[nearest] / near.sum())
        return self._line(counts) * factor

    def check(self, resolutions: Sequence[Resolution | Work]) -> None:
        """Raise UsageError if the table has no batch with one of these resolutions in it, or for a part of an image."""
        known = self.resolutions
        unknown = sorted(each for each in set(resolutions) if is_part(each) or resolution_of(each) not in known)
        if unknown:
            names = ", ".join(map(str, known))
            raise UsageError(f"the latency table knows nothing of {unknown[0]}, but only of {names}")

    def _count(self, batch: Batch) -> list[float]:
        """Return the number of images of each resolution; references count as parts of one."""
        counts: dict[Resolution, float] = defaultdict(float)
        for work in batch:
            counts[resolution_of(work)] += share_of(work)
        return [counts[resolution_of(resolution)] for resolution in self.resolutions]

    def _line(self, counts: np.ndarray) -> float:
        return float((self._features(counts[None]) @ self._weights)[0])

    @staticmethod
    def _features(counts: np.ndarray) -> np.ndarray:
        """(n, resolutions) requests of each -> (n, resolutions + 2)."""
        distinct = (counts > 0).sum(axis=1, keepdims=True)
        return np.hstack([counts, np.ones((len(counts), 1)), distinct])
