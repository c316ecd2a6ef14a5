"""Fits the latency predictor to a table of step latencies (PatchedServe section 6.1.2).

Of the combinations 20 % are held out; a cross-validated search over the others chooses the parameters. What is kept is
the model that was fitted to the 80 %, not one fitted to all: so every reported error is one of the very model that
predicts, on combinations that it has not seen, and can be worked out again from the file. The corners of the table (the
smallest and the largest batch of each resolution alone) are never held out, because beyond its outermost data a kernel
model falls back to its mean.
"""

import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...data.errors import UsageError
from ...data.resolution import Resolution
from ...data.run_facts import RunFacts
from ...data.tables.latency import LatencyRow
from .file import PredictorAbout, SupportVectors
from .predictor import LatencyPredictor

MIN_ROWS = 10
HELD_OUT_SHARE = 0.2
_FOLDS = 5
GRID = {
    "regressor__svr__C": (10.0, 50.0),
    "regressor__svr__gamma": (0.01, 0.03, 0.1, 0.3),
    "regressor__svr__epsilon": (0.005, 0.02),
}
"""Parameters that are tried; epsilon and C are in units of the logarithm of milliseconds. On tables drawn from measured
latencies of emoji-xl with 2 % noise the best lay inside of these; a C of 300 took long and won nothing."""


def fit_latency_predictor(
    rows: Sequence[LatencyRow], *, seed: int = 0, circumstances: RunFacts | None = None
) -> LatencyPredictor:
    """Fit the predictor; its `about.fit` says how well.

    `about.fit` holds `seed`, `num_train`, `held_out` (labels of the rows), `parameters`, and `errors`: for `svr` and
    the baselines `linear` (least squares on the same features) and `pixels` (a look-up by the number of pixels alone,
    interpolated), all fitted to the same rows, the held-out `mse_ms2`, `mape` and `r2`.

    Args:
        rows: of one table.
        seed: of the split and of the folds.
        circumstances: what the table was measured on, None if that is not known.

    Raises:
        UsageError: there are too few rows, or the same combination twice.
    """
    from sklearn.linear_model import LinearRegression

    _check(rows)
    resolutions = tuple(sorted({each for row in rows for each in row.counts}, key=lambda each: (each.pixels, each)))
    largest = tuple(max(row.counts.get(resolution, 0) for row in rows) for resolution in resolutions)
    about = PredictorAbout(resolutions, largest, max(row.num_requests for row in rows), circumstances)
    features = np.array([features_of(about, row) for row in rows])
    measured_ms = np.array([row.median_ms for row in rows])
    test = _held_out(rows, resolutions, seed)
    train = np.setdiff1d(np.arange(len(rows)), test)

    vectors, parameters = _fit_svr(features[train], measured_ms[train], seed)
    linear = LinearRegression().fit(features[train], measured_ms[train])
    pixels = np.array([sum(size.pixels * count for size, count in row.counts.items()) for row in rows])
    predicted_ms = {
        "svr": np.exp(vectors.log_ms(features[test])),
        "linear": linear.predict(features[test]),
        "pixels": _look_up(pixels[train], measured_ms[train], pixels[test]),
    }
    fit = {
        "seed": seed,
        "num_train": len(train),
        "held_out": [rows[index].label for index in test],
        "parameters": parameters,
        "target": "log_ms",
        "num_support_vectors": len(vectors.dual),
        "errors": {name: _errors(measured_ms[test], ms) for name, ms in predicted_ms.items()},
    }
    return LatencyPredictor(vectors, replace(about, fit=fit))


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


def _fit_svr(features: np.ndarray, measured_ms: np.ndarray, seed: int) -> tuple[SupportVectors, dict[str, float]]:
    """Search the grid by cross-validation and fit the best to all rows given."""
    from sklearn.compose import TransformedTargetRegressor
    from sklearn.model_selection import GridSearchCV, KFold
    from sklearn.pipeline import Pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVR

    pipeline = Pipeline([("scaler", StandardScaler()), ("svr", SVR(kernel="rbf"))])
    search = GridSearchCV(
        TransformedTargetRegressor(pipeline, func=np.log, inverse_func=np.exp),
        {name: list(values) for name, values in GRID.items()},
        scoring="neg_mean_absolute_percentage_error",
        cv=KFold(_FOLDS, shuffle=True, random_state=seed),
        error_score="raise",  # type: ignore[arg-type]
    )
    search.fit(features, measured_ms)
    return flat_arrays(search.best_estimator_.regressor_), {
        **{name.rpartition("__")[2]: value for name, value in search.best_params_.items()},
        "cross_validated_mape": -float(search.best_score_),
    }


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
