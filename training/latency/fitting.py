"""Fits the latency predictor to a table of step latencies (PatchedServe section 6.1.2).

Of the combinations 20 % are held out; a cross-validated search over the others chooses the parameters, and whether the
regression is worth keeping beside the linear model that it stands on. What is kept is the model that was fitted to the
80 %, not one fitted to all: so every reported error is one of the very model that predicts, on combinations that it has
not seen, and can be worked out again from the file. The corners of the table (the smallest and the largest batch of
each resolution alone) are never held out, because beyond its outermost data a kernel model falls back to its mean.
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
"""Mean relative error above which a predictor is of no use to a scheduler."""
_WORSE_THAN_LOOK_UP = 1.1
"""A fifth of a small table is a dozen rows, on which two equals differ by so much."""
_FOLDS = 5
GRID = {"C": (0.1, 1.0), "gamma": (0.01, 0.03, 0.1, 0.3), "epsilon": (0.005, 0.02, 0.05)}
"""Parameters that are tried; epsilon and C are in units of the logarithm of measured over linear. With a C of 10
the error is lower by 0.05 points at most, but a request more makes some batches faster by 1 to 3 %."""


def fit_latency_predictor(
    rows: Sequence[LatencyRow], *, seed: int = 0, circumstances: RunFacts | None = None
) -> LatencyPredictor:
    """Fit the predictor; its `about.fit` says how well.

    `about.fit` holds `seed`, `num_train`, `held_out` (labels of the rows), `parameters`, `kept` ("svr", or "linear"
    unless the former is better on the training rows by one standard error, cross-validated, and not worse on those that
    are held out), `noise_floor` of the table (see `tables.latency`), and `errors`: for `svr` and the baselines `linear`
    (what it stands on: non-negative least squares of relative errors on the paper's features) and `pixels` (a look-up
    by the number of pixels alone, interpolated), all fitted to the same rows, the held-out `mse_ms2`, `mape` and `r2`.

    Args:
        rows: of one table.
        seed: of the split and of the folds.
        circumstances: what the table was measured on, None if that is not known.

    Raises:
        UsageError: there are too few rows, or the same combination twice.
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
    """Why `about.fit` says that a predictor should not be served with; None where nothing speaks against it."""
    found, look_up = fit["errors"][fit["kept"]]["mape"], fit["errors"]["pixels"]["mape"]
    said = f"it is off by {found:.1%} on combinations that it has not seen"
    if found > MOST_ERROR:
        return f"{said}, more than {MOST_ERROR:.0%}"
    if found > max(_WORSE_THAN_LOOK_UP * look_up, fit["noise_floor"] or 0.0):
        return f"{said}, a look-up by pixels by {look_up:.1%} only"
    return None


def features_of(about: PredictorAbout, row: LatencyRow) -> list[float]:
    """Return the features of a row whose resolutions are all profiled."""
    return about.features([row.counts.get(resolution, 0) for resolution in about.resolutions], len(row.counts))


def time_predictions(predictor: LatencyPredictor, rows: Sequence[LatencyRow]) -> float:
    """Median microseconds of one prediction that is not remembered."""
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
    """Draw the indices of the rows that the fit does not see, in rising order."""
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
    """Cross-validate: the best parameters of the grid, the mean relative errors of "svr" with them and "linear", and
    whether the former is better by more than one standard error: the best of many is better by chance.
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
    """Weights of non-negative least squares of relative errors, first the constant; patches and logarithm have none."""
    *counts, distinct, _, _ = features.T
    # Patches are the counts once more, and have no weight: lines on the counts are all those on both.
    columns = np.stack([*counts, np.ones(len(features)), distinct], axis=1)
    *weights, constant, per_distinct = relative_line(columns, measured_ms)
    return np.array([constant, *weights, per_distinct, 0.0, 0.0])


def _fit_svr(
    features: np.ndarray, measured_ms: np.ndarray, parameters: dict[str, float], linear: StepModel | None = None
) -> StepModel:
    """Fit the regression to what the linear model leaves, which is fitted first unless it is given."""
    from sklearn.pipeline import Pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVR

    linear = linear or StepModel(_fit_linear(features, measured_ms))
    pipeline = Pipeline([("scaler", StandardScaler()), ("svr", SVR(kernel="rbf", **parameters))])  # type: ignore[arg-type]
    pipeline.fit(features, np.log(measured_ms / linear.ms(features)))
    return replace(linear, vectors=flat_arrays(pipeline))


def flat_arrays(pipeline: Any) -> SupportVectors:
    """Take a fitted scikit-learn pipeline of StandardScaler and SVR (RBF) apart."""
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
        # None where there is nothing to explain: all held-out combinations take equally long.
        "r2": 1 - float(np.square(residuals).sum()) / spread if spread else None,
    }
