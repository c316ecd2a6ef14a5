"""Random forest inference on a device, with the probabilities and classes of scikit-learn's RandomForestClassifier.

    proba[row] = (tree_1[row] + tree_2[row] + ...) / trees     tree_i[row] is the probability of classes 0 and 1 at the
                                                               leaf of tree i that the row falls into

Sums are in float64 in the order of the trees, as in scikit-learn, so that probabilities are equal to the last bit, and
classes are equal on every row, including near ties. The torch reference does not walk the trees but takes a constant
number of operations on all rows and trees at once (`forest_tables`); the Triton kernel walks all trees in parallel, one
level at a time. Sources: PatchedServe section 5.1 (cache reuse predictor) and section 7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .forest_tables import FlatForest
from .launch import TritonKernel, ceil_div, power_of_two, use_triton

if TYPE_CHECKING:
    import triton.language as tl

_TILE = 256
"""Rows times trees of one Triton program: few, so that the patches of one batch occupy many multiprocessors."""

_EXPONENT_BITS = 23


def forest_proba(features: torch.Tensor, forest: FlatForest, *, kernels: str = "auto") -> torch.Tensor:
    """Return the mean probabilities of both classes, as `RandomForestClassifier.predict_proba` does.

    Args:
        features: (rows, F) float32, of any strides; NaN counts as above every threshold, like infinity.
        forest: forest on the device of the features.
        kernels: one of `KERNELS`.

    Returns:
        (rows, 2) float64.

    Raises:
        ValueError: shape, dtype or device do not fit, or `kernels` cannot be used for this tensor.
    """
    if features.dim() != 2 or features.shape[1] != forest.num_features or features.dtype != torch.float32:
        raise ValueError(
            f"features are {tuple(features.shape)} of {features.dtype}, "
            f"but they must be (rows, {forest.num_features}) of torch.float32"
        )
    if features.device != forest.device:
        raise ValueError(f"features are on {features.device}, but the forest is on {forest.device}")
    if use_triton(kernels, features.device):
        return _forest_proba_triton(features, forest)
    return forest_proba_torch(features, forest)


def forest_votes(features: torch.Tensor, forest: FlatForest, *, kernels: str = "auto") -> torch.Tensor:
    """Return the mean probability of class 1: (rows,) float64. Otherwise as `forest_proba`."""
    return forest_proba(features, forest, kernels=kernels)[:, 1]


def forest_predict(
    features: torch.Tensor, forest: FlatForest, *, min_confidence: float = 0.5, kernels: str = "auto"
) -> torch.Tensor:
    """Return whether each row is of class 1: (rows,) bool. Otherwise as `forest_proba`.

    Args:
        min_confidence: a row is of class 1 if the mean probability of class 1 is above this. At 0.5 it is
            `RandomForestClassifier.predict`: class 1 if it is the more probable one, class 0 in a tie.
    """
    # Both classes, and not just class 1 against a number: rounded probabilities need not add up to 1.
    class_0, class_1 = forest_proba(features, forest, kernels=kernels).unbind(1)
    return class_1 * (1 - min_confidence) > class_0 * min_confidence


def forest_proba_torch(features: torch.Tensor, forest: FlatForest) -> torch.Tensor:
    """Torch reference of `forest_proba`; arguments are not checked."""
    bits: torch.Tensor | None = None
    for column, cut, mask in zip(features.t().contiguous().unbind(), forest.cuts, forest.masks, strict=True):
        if not len(cut):
            continue  # no tree uses this feature
        of_interval = mask.index_select(0, torch.searchsorted(cut, column))
        bits = of_interval if bits is None else bits.bitwise_and_(of_interval)
    if bits is None:
        bits = torch.cat(forest.masks[:1]).expand(len(features), -1)
    # At most one bit of a segment is set, so the conversion to float32 is exact and its exponent is the bit's number.
    place = (bits.float().view(torch.int32) >> _EXPONENT_BITS).t() + forest.places
    of_segment = forest.leaf_proba.index_select(0, place.reshape(-1)).view(place.shape)
    # Segments without the row's leaf add 0. They are added one by one, because `sum` has its own order.
    first, *others = of_segment.unbind()
    total = first.clone()
    for part in others:
        total.add_(part)
    return torch.view_as_real(total).div_(forest.divisor)


@TritonKernel
def forest_kernel(
    features,
    feature,
    threshold,
    children,
    proba,
    roots,
    out,
    num_rows,
    depth,
    stride_row,
    stride_feature,
    num_trees: tl.constexpr,
    block_rows: tl.constexpr,
    block_trees: tl.constexpr,
):
    """Process a block of rows: all trees of a tile descend level by level, then their leaves are summed in order."""
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    is_row = row < num_rows
    start = features + row.to(tl.int64) * stride_row
    total_0 = tl.zeros([block_rows], dtype=tl.float64)
    total_1 = tl.zeros([block_rows], dtype=tl.float64)
    for first in range(0, num_trees, block_trees):
        tree = first + tl.arange(0, block_trees)
        node = tl.load(roots + tree, mask=tree < num_trees, other=0)[None, :]
        node = node + tl.zeros([block_rows, block_trees], dtype=tl.int32)
        for _ in range(depth):
            place = start[:, None] + tl.load(feature + node).to(tl.int64) * stride_feature
            value = tl.load(place, mask=is_row[:, None], other=0.0)
            is_left = value <= tl.load(threshold + node)
            node = tl.load(children + node * 2 + 1 - is_left.to(tl.int32))
        leaf_0 = tl.load(proba + node * 2)
        leaf_1 = tl.load(proba + node * 2 + 1)
        for i in range(block_trees):
            # One number and zeros: the sum is exact in any order.
            is_mine = ((tree == first + i) & (tree < num_trees))[None, :]
            total_0 += tl.sum(tl.where(is_mine, leaf_0, 0.0), axis=1)
            total_1 += tl.sum(tl.where(is_mine, leaf_1, 0.0), axis=1)
    tl.store(out + row * 2, total_0, mask=is_row)
    tl.store(out + row * 2 + 1, total_1, mask=is_row)


def _forest_proba_triton(features: torch.Tensor, forest: FlatForest) -> torch.Tensor:
    num_rows = features.shape[0]
    out = features.new_empty((num_rows, 2), dtype=torch.float64)
    block_trees = min(32, power_of_two(forest.num_trees))
    block_rows = max(1, min(_TILE // block_trees, power_of_two(num_rows)))
    forest_kernel.launch(
        (ceil_div(num_rows, block_rows),),
        features.device,
        *(features, forest.feature, forest.threshold, forest.children, forest.proba, forest.roots, out),
        *(num_rows, forest.depth, *features.stride()),
        num_trees=forest.num_trees,
        block_rows=block_rows,
        block_trees=block_trees,
    )
    return out.div_(forest.divisor)
