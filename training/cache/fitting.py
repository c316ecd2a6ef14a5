"""Training of the cache predictor: fitted to most requests of a block profile, evaluated on the others.

The forest predicts whether the output of a block stays within a threshold of the cached one. All figures are for
held-out requests, beside those of the best plain threshold on the change of the input. Source: PatchedServe section 7
(random forest classifier on the similarities of inputs and outputs of all blocks and steps).
"""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch

from ... import __version__
from ...data.errors import MissingExtraError, UsageError
from ...data.tables.block_facts import BlockFacts
from ...kernels.forest_tables import SEGMENT_LEAVES, FlatForest
from .predictor import FEATURES, CachePredictor
from .samples import BlockSamples

Backend = Literal["sklearn", "cuml"]

MIN_ROWS_OF_CLASS = 50
"""Smallest number of training rows within the threshold, and of rows beyond it."""

_TEST_SHARE = 0.2
_CURVE_POINTS = 60


@dataclass(frozen=True, slots=True)
class FitSettings:
    """Training settings of a predictor.

    Attributes:
        threshold: largest normalised mean square difference of the output at which the cached one may be used. The
            right value depends on the model; its images show it (`--target-ssim`).
        trees, depth: size of the forest. With 16 trees of depth 8 and 63 leaves, a CPU core decides for 512 patches in
            0.15 ms.
        leaves: largest number of leaves of a tree; more than 63 double the cost of a tree on a CPU.
        min_confidence: vote above which the cached output is used.
        seed: seed of split, forest and shuffles.
        backend: library that grows the trees.
    """

    threshold: float = 0.2
    trees: int = 16
    depth: int = 8
    leaves: int = SEGMENT_LEAVES
    min_confidence: float = 0.5
    seed: int = 0
    backend: Backend = "sklearn"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.threshold) and self.threshold > 0):
            raise UsageError(f"threshold is {self.threshold:g}, but it must be a number above 0")
        for name, value, most in (("trees", self.trees, 128), ("depth", self.depth, 16), ("leaves", self.leaves, 1024)):
            least = 2 if name == "leaves" else 1
            if not least <= value <= most:
                raise UsageError(f"{name} is {value}, but it must be from {least} to {most}")
        if not 0 <= self.min_confidence <= 1:
            raise UsageError(f"min-confidence is {self.min_confidence:g}, but it must be from 0 to 1")
        if self.backend not in get_args(Backend):
            raise UsageError(f"backend is {self.backend!r}, but it must be one of {', '.join(get_args(Backend))}")


def require_backend(backend: Backend) -> None:
    """Raise MissingExtraError if the library that grows the trees is not installed."""
    if backend == "cuml" and importlib.util.find_spec("cuml") is None:
        raise MissingExtraError("cuml", "gpu")


def fit_cache_predictor(samples: BlockSamples, facts: BlockFacts, settings: FitSettings) -> CachePredictor:
    """Train a predictor.

    Args:
        samples: rows of a profile (`samples.load_samples`).
        facts: model, scheduler, patch size and blocks of the profile.
        settings: threshold, size of the forest, seed.

    Returns:
        The predictor, on the CPU. Its `report` contains the settings and, for the held-out requests (a fifth of all):
        precision (share of its reuses that stay within the threshold), recall (share of the rows within the threshold
        that it reuses), f1, reuse_share (share of all rows that it reuses; also by lag), the same for the baseline,
        importance (by how much f1 falls when a feature is shuffled among the rows), and curve (recall and precision as
        functions of the confidence, or of the baseline's cut). A figure without rows to compute it from is None.

    Raises:
        UsageError: the profile has rows of one request only, or too few rows on one side of the threshold.
        MissingExtraError: the backend is not installed.
    """
    require_backend(settings.backend)
    train, test = split_by_request(samples, settings.seed)
    _check_classes(train.output_mse, settings.threshold)
    labels = train.output_mse <= settings.threshold
    grow = _grow_cuml if settings.backend == "cuml" else _grow_sklearn
    forest, library = grow(train.features, labels, settings)

    truth = test.output_mse <= settings.threshold
    predictor = CachePredictor(
        forest, facts, settings.threshold, settings.min_confidence, max_lag=int(samples.lag.max())
    )
    is_reused = predictor.may_reuse(torch.from_numpy(test.features)).numpy()
    figures = _figures(is_reused, truth)
    votes = predictor.votes(torch.from_numpy(test.features)).numpy()
    report = {
        **asdict(settings),
        "library": library,
        "psctl": __version__,
        "rows": len(samples),
        "profiled_rows": samples.num_profiled,
        "train": {"rows": len(train), "requests": len(np.unique(train.request)), "share_within": _share(labels)},
        "test": {"rows": len(test), "requests": len(np.unique(test.request)), "share_within": _share(truth)},
        **figures,
        "reuse_share_by_lag": {str(lag): _share(is_reused[test.lag == lag]) for lag in np.unique(test.lag)},
        "baseline": _baseline(train.input_mse, labels, test.input_mse, truth, figures["precision"]),
        "importance": _importance(predictor, test.features, truth, settings.seed),
        "curve": {"predictor": _curve(votes, truth), "baseline": _curve(-test.input_mse, truth)},
    }
    return replace(predictor, report=report)


def split_by_request(samples: BlockSamples, seed: int) -> tuple[BlockSamples, BlockSamples]:
    """Split into four fifths of the requests for training and one fifth for evaluation; a request's rows stay together.

    Raises UsageError: there is one request only.
    """
    from sklearn.model_selection import GroupShuffleSplit

    requests = np.unique(samples.request)
    if len(requests) < 2:
        raise UsageError(
            f"the profile has rows of {len(requests)} request only, but training needs others to judge by; "
            "profile more with psctl profile blocks --num-prompts"
        )
    splitter = GroupShuffleSplit(1, test_size=_TEST_SHARE, random_state=seed)
    train, test = next(splitter.split(samples.request, groups=samples.request))
    return samples.where(train), samples.where(test)


def best_cut(input_mse: np.ndarray, labels: np.ndarray, precision: float) -> float | None:
    """Return the largest cut such that at least a share `precision` of the rows with `input_mse <= cut` is of class 1.

    Returns None if there is no such cut.
    """
    order = np.argsort(input_mse, kind="stable")
    values = input_mse[order]
    precisions = np.cumsum(labels[order]) / np.arange(1, len(values) + 1)
    # Rows of equal value are on the same side of a cut.
    is_last = np.append(values[1:] != values[:-1], True)
    fitting = np.flatnonzero(is_last & (precisions >= precision))
    return float(values[fitting[-1]]) if len(fitting) else None


def _check_classes(output_mse: np.ndarray, threshold: float) -> None:
    num, within = len(output_mse), int((output_mse <= threshold).sum())
    if min(within, num - within) >= MIN_ROWS_OF_CLASS:
        return
    problem = (
        f"threshold {threshold:g}: {within} of the {num} rows to train on stay within it and {num - within} do not, "
        f"but at least {MIN_ROWS_OF_CLASS} of each are needed; "
    )
    ordered = np.sort(output_mse).astype(np.float64)
    if num >= 2 * MIN_ROWS_OF_CLASS and ordered[MIN_ROWS_OF_CLASS - 1] < ordered[-MIN_ROWS_OF_CLASS]:
        # Rounded inwards, so that all thresholds in the range of the message are allowed.
        low = _rounded(ordered[MIN_ROWS_OF_CLASS - 1], math.ceil)
        high = _rounded(ordered[-MIN_ROWS_OF_CLASS], math.floor)
        if low < high:
            raise UsageError(f"{problem}choose a threshold above {low:g} and below {high:g}")
    raise UsageError(
        f"{problem}no threshold gives that, so profile more requests with psctl profile blocks --num-prompts"
    )


def _rounded(value: float, towards: Callable[[float], int]) -> float:
    """Round to three significant digits; 0 for values that are not positive."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return towards(value / unit) * unit


def _grow_sklearn(features: np.ndarray, labels: np.ndarray, settings: FitSettings) -> tuple[FlatForest, str]:
    import sklearn
    from sklearn.ensemble import RandomForestClassifier

    forest = RandomForestClassifier(
        settings.trees,
        max_depth=settings.depth,
        max_leaf_nodes=settings.leaves,
        max_features=None,  # pyright: ignore[reportArgumentType]  # annotated by its default
        random_state=settings.seed,
        n_jobs=torch.get_num_threads(),
    ).fit(features, labels)
    return _flat(forest), f"scikit-learn {sklearn.__version__}"


def _grow_cuml(features: np.ndarray, labels: np.ndarray, settings: FitSettings) -> tuple[FlatForest, str]:
    import cuml  # pyright: ignore[reportMissingImports]

    # One stream, as with several the trees differ from run to run.
    forest = cuml.ensemble.RandomForestClassifier(
        n_estimators=settings.trees,
        max_depth=settings.depth,
        max_leaves=settings.leaves,
        max_features=None,
        random_state=settings.seed,
        n_streams=1,
    ).fit(features, labels.astype(np.int32))
    return _flat(forest.as_sklearn()), f"cuML {cuml.__version__}"


def _flat(forest: Any) -> FlatForest:
    return FlatForest.of_trees([tree.tree_ for tree in forest.estimators_], len(FEATURES))


def _figures(is_reused: np.ndarray, truth: np.ndarray) -> dict[str, float | None]:
    both = int((is_reused & truth).sum())
    precision = both / int(is_reused.sum()) if is_reused.any() else None
    recall = both / int(truth.sum()) if truth.any() else None
    either = int(is_reused.sum()) + int(truth.sum())
    f1 = 2 * both / either if either else None
    return {"precision": precision, "recall": recall, "f1": f1, "reuse_share": _share(is_reused)}


def _baseline(
    train_mse: np.ndarray, train_labels: np.ndarray, test_mse: np.ndarray, truth: np.ndarray, precision: float | None
) -> dict[str, float | None]:
    """Figures of a plain threshold that is as precise on the training requests as the predictor on held-out ones."""
    cut = None if precision is None else best_cut(train_mse, train_labels, precision)
    is_reused = np.zeros_like(truth) if cut is None else test_mse <= cut
    return {"cut": cut, **_figures(is_reused, truth)}


def _importance(predictor: CachePredictor, features: np.ndarray, truth: np.ndarray, seed: int) -> dict[str, float]:
    generator = np.random.default_rng(seed)

    def f1(rows: np.ndarray) -> float:
        return _figures(predictor.may_reuse(torch.from_numpy(rows)).numpy(), truth)["f1"] or 0.0

    whole = f1(features)
    importance: dict[str, float] = {}
    for column, name in enumerate(FEATURES):
        shuffled = features.copy()
        shuffled[:, column] = generator.permutation(features[:, column])
        importance[name] = whole - f1(shuffled)
    return importance


def _curve(score: np.ndarray, truth: np.ndarray) -> list[list[float]]:
    """Return pairs of recall and precision when the rows of the highest scores are reused, from few rows to all."""
    if not truth.any():
        return []
    order = np.argsort(-score, kind="stable")
    hits = np.cumsum(truth[order])
    is_last = np.append(np.diff(score[order]) != 0, True)
    places = np.flatnonzero(is_last)
    places = places[np.unique(np.linspace(0, len(places) - 1, min(_CURVE_POINTS, len(places))).astype(int))]
    return [[float(hits[i] / hits[-1]), float(hits[i] / (i + 1))] for i in places]


def _share(mask: np.ndarray) -> float | None:
    return float(mask.mean()) if len(mask) else None
