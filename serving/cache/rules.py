"""Rules that decide which patches are reused.

A rule sees the patches of requests, not of rows: both rows of a guided request are treated alike, because guidance
multiplies their difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.errors import UsageError
from ...data.tables.block_facts import BlockFacts
from ...training.cache.predictor import CachePredictor, features_of
from .cells import Integers
from .options import CacheOptions

Booleans = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class PatchView:
    """Patches of all active requests before one block; arrays are (patches,).

    Attributes:
        block: number of the block, from 0; `num_blocks` for all blocks as one.
        num_blocks: number of blocks.
        change: relative mean squared change of the block's input since it was last computed (the larger one of a
            guided request's two rows), float32 on the model's device; None unless the rule needs it.
        request: index of the patch's request in the batch, ascending.
        steps_done, num_steps: number of steps done by that request, and of all its steps.
        reuses: number of times in a row that this block was reused for the patch.
        pixels: width times height of the request's image.
    """

    block: int
    num_blocks: int
    change: Tensor | None
    request: Integers
    steps_done: Integers
    num_steps: Integers
    reuses: Integers
    pixels: Integers


class ReuseRule(Protocol):
    """Decides before a block which patches may be reused. New patches, first and last steps are always computed.

    Attributes:
        needs_change: whether the rule needs `PatchView.change`.
        observes: whether `observe` is called before the first block of every step.
        is_whole: whether the rule decides about all blocks of a model as one, unless the options set `full_above`.
        max_reuse: largest number of reuses of a patch in a row, unless the options set it.
    """

    needs_change: bool = False
    observes: bool = False
    is_whole: bool = False
    max_reuse: int = 4

    def observe(self, keys: Sequence[int], changes: NDArray[np.float64], is_forced: Booleans) -> None:
        """Record how the input of a step has changed.

        Args:
            keys: keys of the requests in the batch.
            changes: (requests,) root of the mean squared difference of the first block's input from the previous step,
                relative to that step; infinite for a new request.
            is_forced: (requests,) whether all of a request is computed at this step, regardless of the rule.
        """

    def may_reuse(self, view: PatchView) -> Booleans:
        """Return (patches,) True where the output of the last computation may be reused."""
        ...


class NeverReuse(ReuseRule):
    """Computes everything, while everything is still kept, for profiles and tests."""

    def may_reuse(self, view: PatchView) -> Booleans:
        return np.zeros(len(view.request), bool)


class InputThreshold(ReuseRule):
    """Reuses patches that have changed less than a threshold; none at 0, since the comparison is strict."""

    needs_change = True

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def may_reuse(self, view: PatchView) -> Booleans:
        assert view.change is not None
        return (view.change < self.threshold).cpu().numpy()


class Predicted(ReuseRule):
    """Uses the trained predictor, which is on the model's device (PatchedServe sections 5.1 and 7).

    Unless the options say otherwise, a request takes a step either whole or not at all, because mixing old borders,
    sums and outputs of blocks with new ones does harm: with emoji-xl, at equal savings, the SSIM to images without a
    cache rose from 0.934 to 0.965 if requests took each block whole, and to 0.980 if they took all blocks from the
    first computed one on. The mean vote of its patches then decides for a request: with emoji-3, the SSIM was 0.983 at
    64 % saved, and 0.978 at 63 % if every patch had to agree. `psctl reproduce patchedserve --figure 15` shows the
    decision patch by patch.

    Raises:
        UsageError: the options allow more reuses in a row than the predictor was trained on.
    """

    needs_change = True
    is_whole = True

    def __init__(self, predictor: CachePredictor, max_reuse: int | None = None, kernels: str = "auto") -> None:
        self.max_reuse = predictor.max_lag if max_reuse is None else max_reuse
        if self.max_reuse > predictor.max_lag:
            raise UsageError(
                f"--max-reuse is {self.max_reuse}, but the predictor has learnt from {predictor.max_lag} steps in "
                f"a row; give at most that, or profile again with psctl profile blocks --max-lag {self.max_reuse}"
            )
        self.predictor, self._kernels = predictor, kernels

    def may_reuse(self, view: PatchView) -> Booleans:
        assert view.change is not None
        others = np.stack([view.steps_done / view.num_steps, view.reuses, view.pixels]).astype(np.float32)
        features = features_of(view.change, view.block, *torch.from_numpy(others).to(view.change.device))
        if view.block < view.num_blocks:
            return self.predictor.may_reuse(features, kernels=self._kernels).cpu().numpy()
        votes = self.predictor.votes(features, kernels=self._kernels).cpu().numpy()
        starts = np.flatnonzero(np.diff(view.request, prepend=-1))
        counts = np.diff(starts, append=len(votes))
        return np.repeat(np.add.reduceat(votes, starts) > self.predictor.min_confidence * counts, counts)


class Interval(ReuseRule):
    """Computes all blocks at every n-th step of a request, and only the outermost two at other steps (DeepCache)."""

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def may_reuse(self, view: PatchView) -> Booleans:
        is_inner = 0 < view.block < view.num_blocks - 1
        return (view.steps_done % self.interval != 0) & is_inner


class Accumulated(ReuseRule):
    """Lets a request skip all blocks until the sum of its input's changes reaches a threshold (TeaCache)."""

    observes = True
    is_whole = True

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self._sums: dict[int, float] = {}
        self._skips: Booleans = np.empty(0, bool)

    def observe(self, keys: Sequence[int], changes: NDArray[np.float64], is_forced: Booleans) -> None:
        """Add up the changes and decide for the step; the sum of a computed request restarts at 0."""
        sums = np.array([self._sums.get(key, 0.0) for key in keys]) + changes
        self._skips = sums < self.threshold
        self._sums = dict(zip(keys, np.where(self._skips & ~is_forced, sums, 0.0).tolist(), strict=True))

    def may_reuse(self, view: PatchView) -> Booleans:
        return self._skips[view.request]


def load_rule(options: CacheOptions, facts: BlockFacts, device: torch.device, kernels: str = "auto") -> ReuseRule:
    """Return the rule that the options select. A predictor must have been trained for `facts`, and goes to `device`.

    Raises:
        UsageError: no predictor is given, its file is damaged, or it was trained for another model, scheduler or patch
            size.
    """
    if options.mode == "interval":
        return Interval(options.interval)
    if options.mode == "accumulated":
        assert options.threshold is not None
        return Accumulated(options.threshold)
    if options.threshold is not None:
        return InputThreshold(options.threshold)
    if options.predictor is None:
        raise UsageError(
            "--cache needs a trained predictor (psctl profile blocks, then psctl train-predictor cache) or "
            "--cache-threshold"
        )
    predictor = CachePredictor.load(options.predictor, expect=facts, device=device)
    return Predicted(predictor, options.max_reuse, kernels)
