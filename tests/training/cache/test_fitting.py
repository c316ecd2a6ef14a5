"""The cache predictor trained on a profile with a known rule: its decisions, figures, and refusals."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.ensemble import RandomForestClassifier

from patchedserve.data.errors import MissingExtraError, UsageError
from patchedserve.training.cache.fitting import (
    MIN_ROWS_OF_CLASS,
    FitSettings,
    best_cut,
    fit_cache_predictor,
    split_by_request,
)
from patchedserve.training.cache.predictor import CachePredictor, features_of
from patchedserve.training.cache.samples import BlockSamples, load_samples

from ...support.block_profiles import FACTS, GAIN, THRESHOLD, samples_of, write_profile


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> BlockSamples:
    return samples_of(write_profile(tmp_path_factory.mktemp("profile") / "blocks.parquet"))


@pytest.fixture(scope="module")
def predictor(samples: BlockSamples) -> CachePredictor:
    return fit_cache_predictor(samples, FACTS, FitSettings(THRESHOLD))


def rows_of(change: list[float], block: int, reuses: int = 0) -> torch.Tensor:
    num = len(change)
    return features_of(
        torch.tensor(change), block, torch.full((num,), 0.5), torch.full((num,), reuses), torch.full((num,), 128**2)
    )


def test_rule_generalises_to_unseen_requests(predictor: CachePredictor) -> None:
    report = predictor.report
    # The noise is a tenth of a decade, the spread 0.8 decades, so that a few percent of the rows are undecidable.
    assert report["precision"] > 0.95
    assert report["recall"] > 0.95
    assert report["f1"] == pytest.approx(2 / (1 / report["precision"] + 1 / report["recall"]))
    assert abs(report["reuse_share"] - report["test"]["share_within"]) < 0.03
    # A plain threshold ignores blocks: at equal precision it finds at most the reuses of the mildest block.
    baseline = report["baseline"]
    assert baseline["precision"] > report["precision"] - 0.03
    assert baseline["recall"] < 0.6
    assert predictor.max_lag == 3
    shares = [report["reuse_share_by_lag"][lag] for lag in ("1", "2", "3")]
    assert shares == sorted(shares, reverse=True)
    ranked = sorted(report["importance"], key=report["importance"].__getitem__, reverse=True)
    assert set(ranked[:2]) == {"log10_input_mse_normalised", "block_index"}
    assert (report["train"]["requests"], report["test"]["requests"]) == (12, 3)
    assert report["train"]["rows"] + report["test"]["rows"] == report["rows"] == report["profiled_rows"]
    for curve in report["curve"].values():
        recalls = [recall for recall, _ in curve]
        assert recalls == sorted(recalls)
        assert recalls[-1] == 1
    json.dumps(report, allow_nan=False)


@pytest.mark.parametrize("block", range(3))
def test_decisions_follow_the_rule(predictor: CachePredictor, block: int) -> None:
    edge = THRESHOLD / GAIN[block]
    decided = predictor.may_reuse(rows_of([edge / 4, edge * 4, 0.0, math.nan, math.inf, edge / 3], block))
    assert decided.tolist() == [True, False, True, False, False, True]
    assert predictor.may_reuse(torch.empty(0, 5)).shape == (0,)


def test_figures_match_the_decisions(predictor: CachePredictor, samples: BlockSamples) -> None:
    _, test = split_by_request(samples, 0)
    truth = test.output_mse <= THRESHOLD
    is_reused = predictor.may_reuse(torch.from_numpy(test.features)).numpy()
    report = predictor.report
    assert report["precision"] == pytest.approx(truth[is_reused].mean())
    assert report["recall"] == pytest.approx(is_reused[truth].mean())
    assert report["reuse_share"] == pytest.approx(is_reused.mean())
    assert report["reuse_share_by_lag"]["2"] == pytest.approx(is_reused[test.lag == 2].mean())
    cut = report["baseline"]["cut"]
    assert report["baseline"]["recall"] == pytest.approx((test.input_mse <= cut)[truth].mean())


def test_forest_equals_scikit_learn(predictor: CachePredictor, samples: BlockSamples) -> None:
    train, test = split_by_request(samples, 0)
    settings = FitSettings()
    forest = RandomForestClassifier(
        settings.trees,
        max_depth=settings.depth,
        max_leaf_nodes=settings.leaves,
        max_features=None,  # pyright: ignore[reportArgumentType]
        random_state=0,
    ).fit(train.features, train.output_mse <= THRESHOLD)
    found = predictor.may_reuse(torch.from_numpy(test.features)).numpy()
    np.testing.assert_array_equal(found, forest.predict(test.features))


def test_rows_of_a_request_stay_together(samples: BlockSamples) -> None:
    for seed in range(5):
        train, test = split_by_request(samples, seed)
        assert not set(train.request) & set(test.request)
        assert set(train.request) | set(test.request) == set(samples.request)
        assert len(set(test.request)) == 3


def test_fitting_is_seeded(samples: BlockSamples, predictor: CachePredictor) -> None:
    again, other = (fit_cache_predictor(samples, FACTS, FitSettings(THRESHOLD, seed=seed)) for seed in (0, 1))
    assert again.report == predictor.report
    for name, array in again.forest.nodes().items():
        assert torch.equal(array, predictor.forest.nodes()[name])
    assert other.report != predictor.report


def test_confidence_trades_recall_for_precision(samples: BlockSamples) -> None:
    reports = [
        fit_cache_predictor(samples, FACTS, FitSettings(THRESHOLD, trees=8, min_confidence=confidence)).report
        for confidence in (0.1, 0.5, 0.9, 1.0)
    ]
    assert [r["precision"] for r in reports[:3]] == sorted(r["precision"] for r in reports[:3])
    assert [r["recall"] for r in reports] == sorted((r["recall"] for r in reports), reverse=True)
    # No vote exceeds this confidence: nothing is reused, and precision is undefined.
    assert (reports[3]["precision"], reports[3]["recall"], reports[3]["reuse_share"]) == (None, 0, 0)
    assert (reports[3]["baseline"]["cut"], reports[3]["baseline"]["recall"]) == (None, 0)


def test_lags_determine_the_allowed_input_change(tmp_path: Path) -> None:
    """The profile's output exceeds the threshold after two reuses regardless of the input."""
    path = write_profile(tmp_path / "b.parquet", num_requests=6, lags=(1, 2, 3, 4))
    facts, samples = load_samples(path, max_rows=10**6, seed=0)
    output = np.where(samples.lag <= 2, 0.5, 2) * THRESHOLD
    trained = fit_cache_predictor(replace(samples, output_mse=output), facts, FitSettings(THRESHOLD, trees=4))
    decided = [bool(trained.may_reuse(rows_of([0.01], 0, reuses))) for reuses in range(4)]
    assert decided == [True, True, False, False]
    assert trained.max_lag == 4


def test_best_cut() -> None:
    mse = np.array([0.3, 0.1, 0.2, 0.2, 0.4])
    labels = np.array([True, True, True, False, False])
    assert best_cut(mse, labels, 1.0) == pytest.approx(0.1)
    # A cut cannot separate the two rows at 0.2, only one of which is good.
    assert best_cut(mse, labels, 0.7) == pytest.approx(0.3)
    assert best_cut(mse, labels, 0.6) == pytest.approx(0.4)
    assert best_cut(mse, ~labels, 0.9) is None


@pytest.mark.parametrize("threshold", [1e-12, 1e9])
def test_too_few_rows_of_one_class(samples: BlockSamples, threshold: float) -> None:
    with pytest.raises(UsageError, match="at least 50 of each are needed; choose a threshold above") as caught:
        fit_cache_predictor(samples, FACTS, FitSettings(threshold, trees=1))
    words = str(caught.value).split()
    within, low, high = int(words[2]), float(words[-4]), float(words[-1])
    assert within == (0 if threshold < 1 else len(split_by_request(samples, 0)[0]))
    # The message is right: just inside the range, both classes exist.
    for inside in (low * 1.0001, high * 0.9999):
        trained = fit_cache_predictor(samples, FACTS, FitSettings(inside, trees=1))
        share = trained.report["train"]["share_within"] * trained.report["train"]["rows"]
        assert min(share, trained.report["train"]["rows"] - share) > MIN_ROWS_OF_CLASS - 1


def test_outputs_without_a_separating_threshold(samples: BlockSamples) -> None:
    same = replace(samples, output_mse=np.full(len(samples), 0.5, dtype=np.float32))
    with pytest.raises(UsageError, match="no threshold gives that, so profile more requests"):
        fit_cache_predictor(same, FACTS, FitSettings(THRESHOLD))
    few = samples.where(np.arange(0, len(samples), 200))
    with pytest.raises(UsageError, match="no threshold gives that"):
        fit_cache_predictor(few, FACTS, FitSettings(THRESHOLD))


def test_rows_of_one_request_are_refused(samples: BlockSamples) -> None:
    with pytest.raises(UsageError, match="has rows of 1 request only"):
        fit_cache_predictor(samples.where(samples.request == 4), FACTS, FitSettings(THRESHOLD))
    two = samples.where(samples.request <= 1)
    assert fit_cache_predictor(two, FACTS, FitSettings(THRESHOLD)).report["test"]["requests"] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"threshold": 0.0}, "threshold is 0, but it must be a number above 0"),
        ({"threshold": -1.0}, "threshold is -1,"),
        ({"threshold": math.nan}, "threshold is nan,"),
        ({"threshold": math.inf}, "threshold is inf,"),
        ({"trees": 0}, "trees is 0, but it must be from 1 to 128"),
        ({"depth": 17}, "depth is 17, but it must be from 1 to 16"),
        ({"leaves": 1}, "leaves is 1, but it must be from 2 to 1024"),
        ({"min_confidence": 1.5}, "min-confidence is 1.5, but it must be from 0 to 1"),
        ({"min_confidence": math.nan}, "min-confidence is nan"),
        ({"backend": "xgboost"}, "backend is 'xgboost', but it must be one of sklearn, cuml"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        FitSettings(**changes)


def test_missing_cuml_is_reported(samples: BlockSamples) -> None:
    try:
        import cuml  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        with pytest.raises(
            MissingExtraError, match=r"cuml is not installed; install it with: pip install 'psctl\[gpu\]'"
        ):
            fit_cache_predictor(samples, FACTS, FitSettings(backend="cuml"))
    else:
        assert fit_cache_predictor(samples, FACTS, FitSettings(backend="cuml")).report["recall"] > 0.9
