"""A linear model of step latencies that is learnt online and follows the machine.

Recursive least squares with forgetting: the seconds of a step are a constant, a cost of each further resolution, a cost
of the first step after a change of the batch, and a cost of each request by its resolution. No weight is negative. The
model needs no table. It can therefore correct a table in which the cost of mixing or of one resolution is wrong, or
every row is noisy, which no common factor can.

This module imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...data.resolution import Resolution, parse
from ...data.work import Work, resolution_of, share_of

FORGETTING = 0.995
"""Factor by which all earlier steps are discounted at every new one; their weight halves in 138 steps."""
MIN_OBSERVATIONS = 20.0
"""Recent steps with requests of a resolution that are needed before the line predicts batches with it."""
_RIDGE = 1e-3
"""Ridge as a share of each column's sum of squares; it determines weights that the steps alone cannot separate."""
_SOLVED_EVERY = 8
"""Number of steps between two solutions. In fewer steps the weights change by less than the noise, and predictions are
cached meanwhile."""
_MOST_SIZES = 32
"""Largest number of resolutions with a column; batches with others are not predicted."""
_EVERY, _DISTINCT, _FIRST = range(3)
"""Common columns; those of the resolutions follow, in the order in which these were first seen."""
_NUM_COMMON = 3


@dataclass(frozen=True)
class LineState:
    """State of a `LearntLine`, from which another one can continue; all sums are discounted by `FORGETTING`.

    Attributes:
        sizes: resolutions, in the order of their columns.
        squares, products: sums over steps of columns times columns, and of columns times measured seconds, all divided
            by the expected seconds of the step, so that a millisecond matters more in a short step.
        seen: number of steps with requests of each resolution.
        steps, first: number of all steps, and of those that were the first of their batch.
    """

    sizes: list[str] = field(default_factory=list)
    squares: list[list[float]] = field(default_factory=list)
    products: list[float] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)
    steps: float = 0.0
    first: float = 0.0


class LearntLine:
    """Predicts the seconds of a step from its batch. Any thread may predict; only one at a time may call `observe`.

    Args:
        state: state to continue from; by default nothing has been learnt.

    Raises:
        ValueError: parts of the state are inconsistent or not finite, or a resolution is invalid.
    """

    def __init__(self, state: LineState = LineState()) -> None:
        width = _NUM_COMMON + len(state.sizes)
        self._columns = {parse(name): _NUM_COMMON + number for number, name in enumerate(state.sizes)}
        self._squares = np.array(state.squares or np.zeros((width, width)), dtype=float)
        self._products = np.array(state.products or np.zeros(width), dtype=float)
        self._seen = np.array(state.seen, dtype=float)
        self._steps, self._first = state.steps, state.first
        parts = (self._squares, self._products, self._seen)
        if [part.shape for part in parts] != [(width, width), (width,), (width - _NUM_COMMON,)]:
            raise ValueError(f"what was learnt of {len(state.sizes)} resolutions has other columns than theirs")
        if not all(np.isfinite(part).all() for part in (*parts, self._steps, self._first)):
            raise ValueError("what was learnt of batches is not finite")
        self._unsolved = 0
        # Replaced as a whole, so that a concurrent prediction uses either the old or the new weights.
        self._weights: tuple[np.ndarray, dict[tuple[Resolution | Work, ...], float | None]] | None = None
        if self._steps:
            self._solve()

    def step_latency_s(self, active: Sequence[Resolution | Work]) -> float | None:
        """Return the seconds of one step of this batch, with the cost of changes of batches averaged over all steps.

        Returns None if too little is known.
        """
        if self._weights is None or not active:
            return None
        weights, known = self._weights
        key = tuple(active)
        if key not in known:
            known[key] = self._predict(weights, key)
        return known[key]

    def _predict(self, weights: np.ndarray, active: Sequence[Resolution | Work]) -> float | None:
        columns = [self._columns.get(resolution_of(work), len(weights)) for work in active]
        if (
            max(columns) >= len(weights)
            or min(self._seen[column - _NUM_COMMON] for column in columns) < MIN_OBSERVATIONS
        ):
            return None
        return float(weights @ self._features(active, self._first / self._steps, len(weights))) or None

    def observe(
        self, active: Sequence[Resolution | Work], measured_s: float, expected_s: float, *, is_first: bool
    ) -> None:
        """Learn from a step.

        Args:
            active: batch of the step.
            measured_s: measured seconds of the step.
            expected_s: expected seconds of the step, above 0, by which its error is divided. (Dividing by the measured
                seconds would give short steps more weight than long ones of the same batch, as a cache causes them, and
                bias the line below their mean.)
            is_first: whether the batch has changed since the step before.
        """
        sizes = {resolution_of(work) for work in active}
        new = [size for size in sorted(sizes) if size not in self._columns]
        if len(self._columns) + len(new) > _MOST_SIZES:
            return
        for size in new:
            self._columns = self._columns | {size: _NUM_COMMON + len(self._columns)}
            self._squares = np.pad(self._squares, (0, 1))
            self._products = np.append(self._products, 0.0)
            self._seen = np.append(self._seen, 0.0)
        self._seen = FORGETTING * self._seen
        for size in sizes:
            self._seen[self._columns[size] - _NUM_COMMON] += 1
        self._steps = FORGETTING * self._steps + 1
        self._first = FORGETTING * self._first + is_first
        features = self._features(active, float(is_first), len(self._products)) / expected_s
        self._squares = FORGETTING * self._squares + np.outer(features, features)
        self._products = FORGETTING * self._products + features * (measured_s / expected_s)
        self._unsolved += 1
        if self._unsolved >= _SOLVED_EVERY:
            self._solve()

    @property
    def state(self) -> LineState:
        """State from which another line can continue."""
        return LineState(
            sizes=list(map(str, self._columns)),
            squares=self._squares.tolist(),
            products=self._products.tolist(),
            seen=self._seen.tolist(),
            steps=self._steps,
            first=self._first,
        )

    def _solve(self) -> None:
        self._unsolved = 0
        own = np.diag(self._squares)
        if own.min() < 0:
            raise ValueError("a sum of squares is below 0 in what was learnt of batches")
        # No step had an entry in an empty column, so any ridge will do.
        squares = self._squares + np.diag(np.where(own > 0, _RIDGE * own, 1.0))
        # Columns with negative weights are removed and the others solved again. (SciPy could do this, but prediction
        # does not import it.)
        weights, kept = np.zeros(len(own)), np.arange(len(own))
        while len(kept):
            solved = np.linalg.solve(squares[np.ix_(kept, kept)], self._products[kept])
            if solved.min() >= 0:
                weights[kept] = solved
                break
            kept = kept[solved >= 0]
        self._weights = weights, {}

    def _features(self, active: Sequence[Resolution | Work], first: float, width: int) -> np.ndarray:
        features = np.zeros(width)
        for work in active:
            features[self._columns[resolution_of(work)]] += share_of(work)
        features[_EVERY] = 1.0
        features[_DISTINCT] = np.count_nonzero(features[_NUM_COMMON:]) - 1
        features[_FIRST] = first
        return features
