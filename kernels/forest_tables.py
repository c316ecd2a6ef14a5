"""Arrays of a random forest with two classes: its trees as nodes, and the same trees as boxes of bits.

Files hold nodes, and the Triton kernel walks them. The torch reference reads boxes: every leaf is a box, an interval of
each feature. The thresholds of a feature divide it into intervals; for each interval, one bit per leaf is set if the
leaf's box contains the interval. The AND of the bits of a row's intervals, one of each feature, leaves one bit per
tree: the leaf that the row falls into. Bits of false nodes are the idea of Lucchese et al., QuickScorer: a Fast
Algorithm to Rank Documents with Additive Ensembles of Regression Trees (SIGIR 2015); with bits of boxes, no search for
the first remaining bit is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

SEGMENT_LEAVES = 63
"""Leaves whose bits one integer holds. The sign bit is unused, so that the exponent of a float gives the one set
bit. A tree with more leaves takes more integers."""

_EXPONENT_OF_ONE = 127
_PLACES = 192  # exponents of float32: 0 for "no bit", otherwise 127 + bit
_MAX_MASK_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class FlatForest:
    """All trees of a forest in flat arrays, created and checked by `of`.

    Attributes:
        feature: (nodes,) int32, the feature that a node tests; 0 at a leaf.
        threshold: (nodes,) float32; a row whose feature is at most this goes left, any other, also NaN, goes right.
        children: (nodes, 2) int32, left and right; a leaf is its own child.
        proba: (nodes, 2) float64, the probability of classes 0 and 1 at a leaf; 0 elsewhere.
        roots: (trees,) int32, in the order in which the trees' probabilities are summed.
        depth: number of steps from a root to the deepest leaf.
        num_features: number of features of a row.
        cuts: thresholds of each feature, ascending, float32.
        masks: for each feature (intervals, segments) int64, the leaves whose boxes contain the interval.
        places: (segments, 1) int32, where a segment's part of `leaf_proba` begins.
        leaf_proba: (segments * places,) complex128; class 0 is the real part, class 1 the imaginary one, so that one
            addition adds both.
        divisor: () float64, the number of trees. With a Python number, torch's CUDA division would multiply by the
            reciprocal, which rounds once more.
    """

    feature: torch.Tensor
    threshold: torch.Tensor
    children: torch.Tensor
    proba: torch.Tensor
    roots: torch.Tensor
    depth: int
    num_features: int
    cuts: tuple[torch.Tensor, ...]
    masks: tuple[torch.Tensor, ...]
    places: torch.Tensor
    leaf_proba: torch.Tensor
    divisor: torch.Tensor

    @classmethod
    def of(
        cls,
        feature: torch.Tensor,
        threshold: torch.Tensor,
        children: torch.Tensor,
        proba: torch.Tensor,
        roots: torch.Tensor,
        num_features: int,
    ) -> "FlatForest":
        """Check the nodes of a forest and build the other arrays; arguments are as the attributes, on the CPU.

        Raises:
            ValueError: the arrays are not a forest (the message names the broken rule), or its bits would take more
                than 256 MiB.
        """
        nodes = _Nodes(feature.numpy(), threshold.numpy(), children.numpy(), proba.numpy(), roots.numpy(), num_features)
        depth = nodes.check()
        cuts, masks, leaves = nodes.boxes()
        table = np.zeros((len(leaves), _PLACES, 2))
        for segment, leaf in enumerate(leaves):
            table[segment, _EXPONENT_OF_ONE : _EXPONENT_OF_ONE + len(leaf)] = nodes.proba[leaf]
        return cls(
            *(feature, threshold, children, proba, roots, depth, num_features),
            cuts=tuple(map(torch.from_numpy, cuts)),
            masks=tuple(map(torch.from_numpy, masks)),
            places=(torch.arange(len(leaves), dtype=torch.int32) * _PLACES)[:, None],
            leaf_proba=torch.view_as_complex(torch.from_numpy(table)).flatten(),
            divisor=torch.tensor(len(roots), dtype=torch.float64),
        )

    @classmethod
    def of_trees(cls, trees: Sequence[Any], num_features: int) -> "FlatForest":
        """Build the forest from trees with the attributes of scikit-learn's `Tree`: children_left, children_right,
        feature, threshold, value. Raises ValueError as `of`.

        A float32 feature is at most a float64 threshold if and only if it is at most the largest float32 not above it,
        so thresholds are rounded down.
        """
        parts: list[tuple[np.ndarray, ...]] = []
        roots: list[int] = []
        start = 0
        for tree in trees:
            is_leaf = tree.children_left < 0
            own = np.arange(len(is_leaf))
            sides = [np.where(is_leaf, own, side) + start for side in (tree.children_left, tree.children_right)]
            parts.append(
                (
                    np.where(is_leaf, 0, tree.feature).astype(np.int32),
                    np.where(is_leaf, 0, _round_down(tree.threshold)).astype(np.float32),
                    np.stack(sides, axis=1).astype(np.int32),
                    np.where(is_leaf[:, None], tree.value.reshape(len(is_leaf), -1), 0.0),
                )
            )
            roots.append(start)
            start += len(is_leaf)
        if not parts:
            raise ValueError("the forest has no trees")
        feature, threshold, children, proba = (
            torch.from_numpy(np.concatenate(columns)) for columns in zip(*parts, strict=True)
        )
        return cls.of(feature, threshold, children, proba, torch.tensor(roots, dtype=torch.int32), num_features)

    @property
    def num_trees(self) -> int:
        return self.roots.shape[0]

    @property
    def device(self) -> torch.device:
        return self.feature.device

    @property
    def num_bytes(self) -> int:
        """Memory of all arrays in bytes."""
        parts = [self.feature, self.threshold, self.children, self.proba, self.roots, self.places, self.leaf_proba]
        return sum(array.numel() * array.element_size() for array in (*parts, *self.cuts, *self.masks))

    def nodes(self) -> dict[str, torch.Tensor]:
        """Return the arrays from which `of` rebuilds the forest, by the names of its arguments."""
        return {name: getattr(self, name) for name in ("feature", "threshold", "children", "proba", "roots")}

    def to(self, device: torch.device | str) -> "FlatForest":
        """Return the forest with its arrays on a device."""
        return FlatForest(**{field.name: _moved(getattr(self, field.name), device) for field in fields(self)})


@dataclass(frozen=True, slots=True)
class _Nodes:
    """Nodes as numpy arrays, which are checked and divided into boxes."""

    feature: np.ndarray
    threshold: np.ndarray
    children: np.ndarray
    proba: np.ndarray
    roots: np.ndarray
    num_features: int

    @property
    def is_leaf(self) -> np.ndarray:
        return self.children[:, 0] == np.arange(len(self.feature))

    def check(self) -> int:
        """Check the nodes and return the depth. Raises ValueError."""
        num = len(self.feature)
        wanted = {
            "feature": ((num,), np.int32),
            "threshold": ((num,), np.float32),
            "children": ((num, 2), np.int32),
            "proba": ((num, 2), np.float64),
            "roots": ((len(self.roots),), np.int32),
        }
        for name, (shape, dtype) in wanted.items():
            array = getattr(self, name)
            if array.shape != shape or array.dtype != dtype:
                what = f"{shape} of {np.dtype(dtype)}"
                raise ValueError(f"{name} of the forest is {array.shape} of {array.dtype}, but it must be {what}")
        own, is_leaf = np.arange(num), self.is_leaf
        if not len(self.roots) or self.roots[0] != 0 or (np.diff(self.roots) <= 0).any() or self.roots[-1] >= num:
            raise ValueError("the roots of the forest must ascend from node 0")
        # A tree's nodes are contiguous, parents first. So there are no cycles, and depth needs one pass.
        ends = np.append(self.roots[1:], num)[np.searchsorted(self.roots, own, side="right") - 1]
        inner = self.children[~is_leaf]
        if (inner <= own[~is_leaf, None]).any() or (inner >= ends[~is_leaf, None]).any():
            raise ValueError("a node of the forest has a child outside its tree or before itself")
        if (self.children[is_leaf] != own[is_leaf, None]).any():
            raise ValueError("a leaf of the forest has a child")
        times = np.bincount(inner.ravel(), minlength=num)
        times[self.roots] += 1
        if (times != 1).any():
            raise ValueError("a node of the forest has no parent or several")
        if self.num_features < 1 or ((self.feature < 0) | (self.feature >= self.num_features)).any():
            raise ValueError(f"a node of the forest looks at a feature outside 0 to {self.num_features - 1}")
        if not np.isfinite(self.threshold).all():
            raise ValueError("a threshold of the forest is not finite")
        leaves = self.proba[is_leaf]
        if not ((leaves >= 0) & (leaves <= 1)).all() or not np.allclose(leaves.sum(axis=1), 1, rtol=0, atol=1e-6):
            raise ValueError("the probabilities of a leaf of the forest do not add up to 1")
        depth = np.zeros(num, dtype=np.int64)
        for node in np.flatnonzero(~is_leaf):
            depth[self.children[node]] = depth[node] + 1
        return int(depth.max())

    def boxes(self) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
        """Return cuts and masks by feature, and the leaves of every segment in the order of their bits.

        Interval i of a feature is above its first i thresholds and not above the next one.
        """
        is_inner = ~self.is_leaf
        cuts = [np.unique(self.threshold[is_inner & (self.feature == k)]) for k in range(self.num_features)]
        # First and last interval of every node's box.
        first = np.zeros((len(self.feature), self.num_features), dtype=np.int64)
        last = np.empty_like(first)
        last[self.roots] = [len(cut) for cut in cuts]
        for node in np.flatnonzero(is_inner):
            k = self.feature[node]
            cut = np.searchsorted(cuts[k], self.threshold[node])
            left, right = self.children[node]
            first[[left, right]], last[[left, right]] = first[node], last[node]
            last[left, k] = min(last[left, k], cut)
            first[right, k] = max(first[right, k], cut + 1)
        leaves = np.flatnonzero(self.is_leaf)
        of_tree = np.split(leaves, np.searchsorted(leaves, self.roots[1:]))
        segments = [tree[i : i + SEGMENT_LEAVES] for tree in of_tree for i in range(0, len(tree), SEGMENT_LEAVES)]
        num_bytes = 8 * len(segments) * sum(len(cut) + 1 for cut in cuts)
        if num_bytes > _MAX_MASK_BYTES:
            raise ValueError(
                f"the bits of the forest's {len(leaves)} leaves take {num_bytes >> 20} MiB, "
                f"but at most {_MAX_MASK_BYTES >> 20} MiB are allowed; use fewer trees or leaves"
            )
        masks = [np.zeros((len(cut) + 1, len(segments)), dtype=np.int64) for cut in cuts]
        for segment, leaf in enumerate(segments):
            for bit, node in enumerate(leaf):
                for k, mask in enumerate(masks):
                    mask[first[node, k] : last[node, k] + 1, segment] |= np.int64(1) << np.int64(bit)
        return cuts, masks, segments


def _round_down(threshold: np.ndarray) -> np.ndarray:
    """Return the largest float32 that is not above each float64."""
    nearest = threshold.astype(np.float32)
    return np.where(nearest.astype(np.float64) > threshold, np.nextafter(nearest, np.float32(-np.inf)), nearest)


def _moved(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, tuple):
        return tuple(_moved(item, device) for item in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value
