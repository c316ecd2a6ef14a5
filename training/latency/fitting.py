"""Fits the latency predictor to a table of step latencies (PatchedServe section 6.1.2).

20 % of the combinations are held out. A cross-validated search over the others chooses the parameters, and whether the
regression is kept on top of the linear model. The saved model is the one fitted to the 80 %, not one fitted to all, so
every reported error is that of the saved model on held-out combinations, and can be recomputed from the file. The
corners of the table (the smallest and the largest batch of each resolution alone) are never held out, because beyond
its outermost data a kernel model falls back to its mean.
"""

import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from ...data.errors import UsageError
from ...data.resolution import Resolution
from ...data.run_facts import RunFacts
from ...data.tables.latency import LatencyRow, noise_floor
from .file import PredictorAbout, StepModel, SupportVectors
from .least_squares import relative_line
from .predictor import LatencyPredictor

MIN_ROWS = 10
HELD_OUT_SHARE = 0.2
MOST_ERROR = 0.25
"""Mean relative error above which a predictor is useless to a scheduler."""
_WORSE_THAN_LOOK_UP = 1.1
"""Tolerated ratio of the predictor's error to the look-up's: a fifth of a small table is a dozen rows, on which two
equally good models differ by this much."""
_FOLDS = 5
GRID = {"C": (0.1, 1.0), "gamma": (0.01, 0.03, 0.1, 0.3), "epsilon": (0.005, 0.02, 0.05)}
"""Parameters of the search; epsilon and C are in units of the logarithm of measured over linear. With a C of 10
the error is at most 0.05 points lower, but one more request makes some batches faster by 1 to 3 %."""


def fit_latency_predictor(
    rows: Sequence[LatencyRow], *, seed: int = 0, circumstances: RunFacts | None = None
) -> LatencyPredictor:
    """Fit the predictor; its `about.fit` reports the quality.

    `about.fit` contains `seed`, `num_train`, `held_out` (labels of the rows), `parameters`, `kept` ("linear", or "svr"
    if that is better by one standard error in cross-validation on the training rows, and not worse on the held-out
    ones), `noise_floor` of the table (see `tables.latency`), and `errors`: the held-out `mse_ms2`, `mape` and `r2` of
    `svr` and of two baselines fitted to the same rows, `linear` (the linear model below it: non-negative least squares
    of relative errors on the paper's features) and `pixels` (an interpolated look-up by the number of pixels alone).

    Args:
        rows: rows of one table.
        seed: seed of the split and of the folds.
        circumstances: model, device and engine of the measurements; None if unknown.

    Raises:
        UsageError: there are too few rows, or a combination occurs twice.
    """
    _check(rows)
    resolutions = tuple(sorted({each for row in rows for each in row.counts}, key=lambda each: (each.pixels, each)))
    largest = tuple(max(row.counts.get(resolution, 0) for row in rows) for resolution in resolutions)
    about = PredictorAbout(resolutions, largest, max(row.num_requests for row in rows), circumstances)
    features = np.array([features_of(about, row) for row in rows])
    measured_ms = np.array([row.median_ms for row in rows])
    test = _held_out(rows, resolutions, seed)
    train = np.setdiff1d(np.arange(len(rows)), test)

    parameters, validated, is_better = _search(features[train], measured_ms[train], seed)
    svr = _fit_svr(features[train], measured_ms[train], parameters)
    linear = StepModel(svr.weights)
    pixels = np.array([sum(size.pixels * count for size, count in row.counts.items()) for row in rows])
    predicted_ms = {
        "svr": svr.ms(features[test]),
        "linear": linear.ms(features[test]),
        "pixels": _look_up(pixels[train], measured_ms[train], pixels[test]),
    }
    errors = {name: _errors(measured_ms[test], ms) for name, ms in predicted_ms.items()}
    kept = svr if is_better and (errors["svr"]["mape"] or 0) <= (errors["linear"]["mape"] or 0) else linear
    assert svr.vectors is not None
    fit = {
        "seed": seed,
        "num_train": len(train),
        "held_out": [rows[index].label for index in test],
        "parameters": parameters | {"cross_validated_mape": validated["svr"]},
        "cross_validated_mape": validated,
        "kept": kept.kind,
        "target": "log_ratio_to_linear",
        "num_support_vectors": len(svr.vectors.dual),
        "noise_floor": noise_floor(rows),
        "errors": errors,
    }
    return LatencyPredictor(kept, replace(about, fit=fit))


def why_unfit(fit: Mapping[str, Any]) -> str | None:
    """Return the reason why a predictor with this `about.fit` should not be used for serving; None if there is none."""
    found, look_up = fit["errors"][fit["kept"]]["mape"], fit["errors"]["pixels"]["mape"]
    said = f"it is off by {found:.1%} on combinations that it has not seen"
    if found > MOST_ERROR:
        return f"{said}, more than {MOST_ERROR:.0%}"
    if found > max(_WORSE_THAN_LOOK_UP * look_up, fit["noise_floor"] or 0.0):
        return f"{said}, a look-up by pixels by {look_up:.1%} only"
    return None


def features_of(about: PredictorAbout, row: LatencyRow) -> list[float]:
    """Return the features of a row, all of whose resolutions are profiled."""
    return about.features([row.counts.get(resolution, 0) for resolution in about.resolutions], len(row.counts))


def time_predictions(predictor: LatencyPredictor, rows: Sequence[LatencyRow]) -> float:
    """Return the median microseconds of one uncached prediction."""
    times_s = []
    for row in rows:
        counts = [row.counts.get(resolution, 0) for resolution in predictor.about.resolutions]
        start = time.perf_counter()
        predictor.predict_ms([counts])
        times_s.append(time.perf_counter() - start)
    return statistics.median(times_s) * 1e6


def _check(rows: Sequence[LatencyRow]) -> None:
    if len(rows) < MIN_ROWS:
        found = "one combination" if len(rows) == 1 else f"{len(rows)} combinations"
        raise UsageError(
            f"the table holds {found}, but a latency predictor needs at least {MIN_ROWS} "
            "(psctl profile latency measures 300)"
        )
    labels = [row.label for row in rows]
    for label in labels:
        if labels.count(label) > 1:
            raise UsageError(f"the table holds the combination {label} twice")


def _held_out(rows: Sequence[LatencyRow], resolutions: Sequence[Resolution], seed: int) -> np.ndarray:
    """Draw the indices of the held-out rows, in ascending order."""
    corners: set[int] = set()
    for resolution in resolutions:
        alone = [index for index, row in enumerate(rows) if set(row.counts) == {resolution}]
        if alone:
            ranked = sorted(alone, key=lambda index: rows[index].num_requests)
            corners |= {ranked[0], ranked[-1]}
    inner = [index for index in range(len(rows)) if index not in corners]
    wanted = math.ceil(HELD_OUT_SHARE * len(rows))
    if len(inner) <= wanted:
        raise UsageError(
            f"the table holds {len(rows)} combinations, but only {len(inner)} of them are neither the smallest nor the "
            "largest batch of a resolution, which is too few to fit and to test a latency predictor"
        )
    return np.array(sorted(random.Random(seed).sample(inner, wanted)))


def _search(
    features: np.ndarray, measured_ms: np.ndarray, seed: int
) -> tuple[dict[str, float], dict[str, float], bool]:
    """Cross-validate the parameters of the grid.

    Returns:
        The best parameters, the mean relative errors of "svr" with them and of "linear", and whether the former is
        better by more than one standard error, as the best of many can be better by chance.
    """
    from sklearn.model_selection import KFold

    grid = [dict(zip(GRID, values, strict=True)) for values in product(*GRID.values())]
    errors: list[list[np.ndarray]] = [[] for _ in (*grid, "linear")]
    for train, test in KFold(_FOLDS, shuffle=True, random_state=seed).split(features):
        linear = StepModel(_fit_linear(features[train], measured_ms[train]))
        models = [_fit_svr(features[train], measured_ms[train], each, linear) for each in grid]
        for found, model in zip(errors, (*models, linear), strict=True):
            found.append(np.abs(model.ms(features[test]) / measured_ms[test] - 1))
    *tried, linear_errors = map(np.concatenate, errors)
    best = min(range(len(grid)), key=lambda index: tried[index].mean())
    gain = linear_errors - tried[best]
    validated = {"svr": float(tried[best].mean()), "linear": float(linear_errors.mean())}
    return grid[best], validated, bool(gain.mean() > gain.std() / math.sqrt(len(gain)))


def _fit_linear(features: np.ndarray, measured_ms: np.ndarray) -> np.ndarray:
    """Fit non-negative weights to relative errors by least squares.

    Returns the constant first; the weights of patches and logarithm are 0.
    """
    *counts, distinct, _, _ = features.T
    # The number of patches is a linear function of the counts, so it needs no weight of its own.
    columns = np.stack([*counts, np.ones(len(features)), distinct], axis=1)
    *weights, constant, per_distinct = relative_line(columns, measured_ms)
    return np.array([constant, *weights, per_distinct, 0.0, 0.0])


def _fit_svr(
    features: np.ndarray, measured_ms: np.ndarray, parameters: dict[str, float], linear: StepModel | None = None
) -> StepModel:
    """Fit the regression to the residual of the linear model, which is fitted first if it is not given."""
    from sklearn.pipeline import Pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVR

    linear = linear or StepModel(_fit_linear(features, measured_ms))
    pipeline = Pipeline([("scaler", StandardScaler()), ("svr", SVR(kernel="rbf", **parameters))])  # type: ignore[arg-type]
    pipeline.fit(features, np.log(measured_ms / linear.ms(features)))
    return replace(linear, vectors=flat_arrays(pipeline))


def flat_arrays(pipeline: Any) -> SupportVectors:
    """Extract the arrays of a fitted scikit-learn pipeline of StandardScaler and SVR (RBF)."""
    scaler, svr = pipeline.named_steps["scaler"], pipeline.named_steps["svr"]
    return SupportVectors(
        mean=scaler.mean_.astype(np.float64),
        scale=scaler.scale_.astype(np.float64),
        vectors=svr.support_vectors_.astype(np.float64),
        dual=svr.dual_coef_[0].astype(np.float64),
        gamma=np.array([svr._gamma], dtype=np.float64),
        intercept=svr.intercept_.astype(np.float64),
    )


def _look_up(known_pixels: np.ndarray, known_ms: np.ndarray, pixels: np.ndarray) -> np.ndarray:
    places, index = np.unique(known_pixels, return_inverse=True)
    means = np.bincount(index, weights=known_ms) / np.bincount(index)
    return np.interp(pixels, places, means)


def _errors(measured_ms: np.ndarray, predicted_ms: np.ndarray) -> dict[str, float | None]:
    residuals = predicted_ms - measured_ms
    spread = float(np.square(measured_ms - measured_ms.mean()).sum())
    return {
        "mse_ms2": float(np.square(residuals).mean()),
        "mape": float(np.abs(residuals / measured_ms).mean()),
        # None if there is no variance to explain: all held-out combinations take equally long.
        "r2": 1 - float(np.square(residuals).sum()) / spread if spread else None,
    }
