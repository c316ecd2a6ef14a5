"""A reuse rule of the patch cache that reuses a given share of patches, for tests and measurements of speed."""

import numpy as np

from patchedserve.serving.cache.rules import Booleans, PatchView, ReuseRule


class FixedShare(ReuseRule):
    """Reuses a given share of the patches, chosen at random for each block and step."""

    def __init__(self, share: float, seed: int = 0) -> None:
        self.share, self._rng = share, np.random.default_rng(seed)

    def may_reuse(self, view: PatchView) -> Booleans:
        count = round(self.share * len(view.request))
        return np.isin(np.arange(len(view.request)), self._rng.permutation(len(view.request))[:count])
