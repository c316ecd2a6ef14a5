"""The cache predictor: training on a profile whose rule is known, figures, bad profiles, files and their damage."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sklearn.ensemble import RandomForestClassifier

from patchedserve.data.errors import MissingExtraError, UsageError
from patchedserve.data.tables import BLOCKS
from patchedserve.kernels.forest import forest_predict
from patchedserve.kernels.forest_tables import FlatForest
from patchedserve.training.cache_predictor import FEATURES, INPUT_MSE_FLOOR, CachePredictor, features_of
from patchedserve.training.cache_samples import BlockSamples, load_samples
from patchedserve.training.cache_training import (
    MIN_ROWS_OF_CLASS,
    FitSettings,
    best_cut,
    fit_cache_predictor,
    split_by_request,
)

from .block_profiles import FACTS, GAIN, write_profile

THRESHOLD = 0.01


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_profile(tmp_path_factory.mktemp("profile") / "blocks.parquet")


@pytest.fixture(scope="module")
def samples(profile: Path) -> BlockSamples:
    facts, samples = load_samples(profile, max_rows=10**6, seed=0)
    assert facts == FACTS
    return samples


@pytest.fixture(scope="module")
def predictor(samples: BlockSamples) -> CachePredictor:
    return fit_cache_predictor(samples, FACTS, FitSettings(THRESHOLD))


@pytest.fixture
def saved(predictor: CachePredictor, tmp_path: Path) -> Path:
    predictor.save(tmp_path / "new" / "cache.safetensors")
    return tmp_path / "new" / "cache.safetensors"


def rows_of(change: list[float], block: int, reuses: int = 0) -> torch.Tensor:
    num = len(change)
    return features_of(
        torch.tensor(change), block, torch.full((num,), 0.5), torch.full((num,), reuses), torch.full((num,), 128**2)
    )


# --- features


def test_features_are_the_columns_that_their_names_say() -> None:
    features = features_of(
        torch.tensor([0.01, 1.0, 0.0, INPUT_MSE_FLOOR / 10], dtype=torch.float64),
        torch.tensor([0, 1, 2, 3]),
        torch.tensor([0.25, 0.5, 0.75, 1.0]),
        torch.tensor([0, 1, 2, 3]),
        torch.tensor([128 * 128, 192 * 192, 1024 * 1024, 2048 * 2048]),
    )
    assert features.dtype == torch.float32
    assert features.shape == (4, len(FEATURES))
    floor = math.log10(INPUT_MSE_FLOOR)
    torch.testing.assert_close(features[:, 0], torch.tensor([-2.0, 0.0, floor, floor]))
    assert features[:, 1].tolist() == [0, 1, 2, 3]
    assert features[:, 2].tolist() == [0.25, 0.5, 0.75, 1.0]
    assert features[:, 3].tolist() == [0, 1, 2, 3]
    assert features[:, 4].tolist() == [16384, 36864, 1048576, 4194304]


def test_changes_that_are_no_number_count_as_infinite() -> None:
    given = torch.tensor([math.nan, math.inf, 0.5])
    features = features_of(given, 0, torch.zeros(3), torch.zeros(3), torch.ones(3))
    assert features[:, 0].tolist() == [math.inf, math.inf, pytest.approx(math.log10(0.5))]
    assert given[2] == 0.5, "the argument is left alone"
    assert given[0].isnan()


def test_half_precision_and_no_rows() -> None:
    features = features_of(torch.tensor([0.25], dtype=torch.bfloat16), 3, *torch.ones(3, 1))
    assert features.tolist() == [[pytest.approx(math.log10(0.25)), 3, 1, 1, 1]]
    assert features_of(torch.empty(0), 3, *torch.ones(3, 0)).shape == (0, 5)


# --- reading a profile


def test_samples_are_the_profile(profile: Path, samples: BlockSamples) -> None:
    table = pq.read_table(profile).to_pandas()
    assert len(samples) == samples.num_profiled == len(table)
    np.testing.assert_array_equal(samples.request, table.request_id)
    np.testing.assert_array_equal(samples.output_mse, table.output_mse_normalised)
    np.testing.assert_array_equal(samples.features[:, 1], table.block_index)
    np.testing.assert_array_equal(samples.features[:, 3], table.lag - 1)
    np.testing.assert_array_equal(samples.features[:, 4], table.width * table.height)
    np.testing.assert_allclose(samples.features[:, 0], np.log10(table.input_mse_normalised), rtol=1e-5, atol=1e-5)


def test_large_profiles_are_sampled(profile: Path, samples: BlockSamples) -> None:
    one, two = (load_samples(profile, max_rows=2000, seed=seed)[1] for seed in (1, 2))
    again = load_samples(profile, max_rows=2000, seed=1)[1]
    assert abs(len(one) - 2000) < 6 * math.sqrt(2000)
    assert one.num_profiled == len(samples)
    np.testing.assert_array_equal(one.features, again.features)
    assert len(one) != len(two) or not np.array_equal(one.features, two.features)
    # Without favour: about as many of each request, block and lag as of the others.
    for column in ("request", "lag"):
        shares = [np.unique(getattr(s, column), return_counts=True)[1] / len(s) for s in (one, samples)]
        np.testing.assert_allclose(shares[0], shares[1], atol=0.04)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lag": 0}, "column lag holds 0, but it must be at least 1"),
        ({"input_mse_normalised": -0.5}, "column input_mse_normalised holds -0.5, but it must be at least 0"),
        ({"step_fraction": 1.5}, "column step_fraction holds 1.5, but it must be from 0 to 1"),
        ({"width": 0}, "column width holds 0, but it must be at least 1"),
        ({"block_index": 3}, "column block_index holds 3, but there are 3 blocks"),
        ({"block_index": -1}, "column block_index holds -1, but there are 3 blocks"),
        ({"block": "up9"}, "block 0 is called up9, but its head says down0"),
        ({"scheduler": "DDIMScheduler"}, "rows of the scheduler DDIMScheduler, but its head says EulerDiscrete"),
    ],
)
def test_profiles_that_make_no_sense(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write_profile(tmp_path / "b.parquet", num_requests=2, num_steps=3, **changes)
    with pytest.raises(UsageError, match=message) as caught:
        load_samples(path, max_rows=1000, seed=0)
    assert str(caught.value).startswith(f"{path}: ")


def test_profiles_with_nan_or_other_columns_or_none(tmp_path: Path) -> None:
    path = tmp_path / "b.parquet"
    with pytest.raises(UsageError, match=r"no block profile .*b.parquet; make one with: psctl profile blocks"):
        load_samples(path, max_rows=1000, seed=0)
    table = pq.read_table(write_profile(path, num_requests=2, num_steps=3))
    values = table.column("output_mse_normalised").to_numpy().copy()
    values[5] = math.nan
    place = BLOCKS.names.index("output_mse_normalised")
    pq.write_table(table.set_column(place, table.schema.field(place), [values]), path)
    with pytest.raises(UsageError, match=r"b.parquet: column output_mse_normalised holds nan in row 5"):
        load_samples(path, max_rows=1000, seed=0)
    pq.write_table(table.append_column("more", table.column("lag")), path)
    with pytest.raises(UsageError, match=r"lag.*, more, which is not the blocks table's schema"):
        load_samples(path, max_rows=1000, seed=0)
    pq.write_table(table.slice(0, 0), path)
    with pytest.raises(UsageError, match="the block profile has no rows"):
        load_samples(path, max_rows=1000, seed=0)


# --- training


def test_the_rule_is_found_on_requests_that_were_not_seen(predictor: CachePredictor) -> None:
    report = predictor.report
    # The noise is a tenth of a decade against a spread of 0.8 decades, so a few in a hundred rows cannot be told.
    assert report["precision"] > 0.95
    assert report["recall"] > 0.95
    assert report["f1"] == pytest.approx(2 / (1 / report["precision"] + 1 / report["recall"]))
    assert abs(report["reuse_share"] - report["test"]["share_within"]) < 0.03
    # A plain threshold does not know the blocks: as precise, it finds the reuses of the mildest block at most.
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
def test_what_it_decides_is_the_rule(predictor: CachePredictor, block: int) -> None:
    edge = THRESHOLD / GAIN[block]
    decided = predictor.may_reuse(rows_of([edge / 4, edge * 4, 0.0, math.nan, math.inf, edge / 3], block))
    assert decided.tolist() == [True, False, True, False, False, True]
    assert predictor.may_reuse(torch.empty(0, 5)).shape == (0,)


def test_figures_are_those_of_the_decisions(predictor: CachePredictor, samples: BlockSamples) -> None:
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


def test_the_forest_is_scikit_learns(predictor: CachePredictor, samples: BlockSamples) -> None:
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


def test_the_seed_decides_everything(samples: BlockSamples, predictor: CachePredictor) -> None:
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
    # Nobody can be surer than that: nothing is reused, and there is no precision.
    assert (reports[3]["precision"], reports[3]["recall"], reports[3]["reuse_share"]) == (None, 0, 0)
    assert (reports[3]["baseline"]["cut"], reports[3]["baseline"]["recall"]) == (None, 0)


def test_lags_teach_how_far_the_input_may_have_moved(tmp_path: Path) -> None:
    """A profile whose output leaves the threshold after two reuses whatever the input says."""
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
    # Of the two rows at 0.2 not just the good one can be taken.
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
    # What it says is true: just inside the range both classes are there.
    for inside in (low * 1.0001, high * 0.9999):
        trained = fit_cache_predictor(samples, FACTS, FitSettings(inside, trees=1))
        share = trained.report["train"]["share_within"] * trained.report["train"]["rows"]
        assert min(share, trained.report["train"]["rows"] - share) > MIN_ROWS_OF_CLASS - 1


def test_outputs_that_no_threshold_divides(samples: BlockSamples) -> None:
    same = replace(samples, output_mse=np.full(len(samples), 0.5, dtype=np.float32))
    with pytest.raises(UsageError, match="no threshold gives that, so profile more requests"):
        fit_cache_predictor(same, FACTS, FitSettings(THRESHOLD))
    few = samples.where(np.arange(0, len(samples), 200))
    with pytest.raises(UsageError, match="no threshold gives that"):
        fit_cache_predictor(few, FACTS, FitSettings(THRESHOLD))


def test_one_request_only(samples: BlockSamples) -> None:
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
def test_wrong_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        FitSettings(**changes)


def test_cuml_that_is_not_installed(samples: BlockSamples) -> None:
    try:
        import cuml  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        with pytest.raises(
            MissingExtraError, match=r"cuml is not installed; install it with: pip install 'psctl\[gpu\]'"
        ):
            fit_cache_predictor(samples, FACTS, FitSettings(backend="cuml"))
    else:
        assert fit_cache_predictor(samples, FACTS, FitSettings(backend="cuml")).report["recall"] > 0.9


# --- files


def test_a_file_is_read_back_equal(predictor: CachePredictor, saved: Path, samples: BlockSamples) -> None:
    again = CachePredictor.load(saved, expect=FACTS)
    assert replace(again, forest=predictor.forest) == predictor
    features = torch.from_numpy(samples.features)
    assert torch.equal(again.may_reuse(features), predictor.may_reuse(features))
    assert again.feature_names == FEATURES
    assert again.to("cpu").facts == FACTS
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
    assert saved.stat().st_size < 200_000


def test_a_file_needs_no_scikit_learn(saved: Path, repository: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from patchedserve.training.cache_predictor import CachePredictor; "
        f"CachePredictor.load({str(saved)!r}); sys.exit('sklearn' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=repository.parent, check=False).returncode == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": "another"}, "was made for other weights of emoji-xl"),
        ({"model": "emoji-3", "fingerprint": "another"}, "was made for emoji-xl, not for emoji-3"),
        ({"scheduler": "DDIMScheduler"}, "runs with DDIMScheduler"),
        ({"patch_size": 4}, "was made for patches of 8 latent pixels, but they have 4 now"),
        ({"blocks": ("down0", "mid")}, "was made for 3 blocks"),
    ],
)
def test_a_predictor_for_something_else(saved: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        CachePredictor.load(saved, expect=replace(FACTS, **change))
    assert str(caught.value).startswith(str(saved))
    assert "\n" not in str(caught.value)


def test_truncated_and_missing_files(saved: Path, tmp_path: Path) -> None:
    content = saved.read_bytes()
    for length in (0, 7, 8, 100, len(content) // 2, len(content) - 1):
        saved.write_bytes(content[:length])
        with pytest.raises(UsageError, match="truncated, damaged or no safetensors file"):
            CachePredictor.load(saved)
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UsageError, match=r"there is no cache predictor .*; train one with: psctl train-predictor"):
            CachePredictor.load(path)


def test_flipped_bits(saved: Path) -> None:
    content = saved.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    generator = np.random.default_rng(0)
    for place in [start, len(content) - 1, *generator.integers(start, len(content), 10)]:
        broken = bytearray(content)
        broken[place] ^= 1
        saved.write_bytes(broken)
        with pytest.raises(UsageError, match="its checksum is wrong"):
            CachePredictor.load(saved)


def test_edited_heads(saved: Path) -> None:
    content = saved.read_bytes()
    for old, new in ((b"0.01", b"0.09"), (b"emoji-xl", b"emoji-xs"), (b"log10", b"log11")):
        assert old in content
        saved.write_bytes(content.replace(old, new, 1))
        with pytest.raises(UsageError, match="its checksum is wrong"):
            CachePredictor.load(saved)


def rewritten(saved: Path, content: dict[str, Any], arrays: dict[str, torch.Tensor], **head: str) -> None:
    """Write the file again with changes and a checksum that is right."""
    from patchedserve.training.cache_predictor import _checksum

    with safe_open(saved, "pt") as file:
        old = file.metadata()
    text = json.dumps(json.loads(old["psctl.content"]) | content)
    arrays = load_file(saved) | arrays
    head = old | {"psctl.content": text, "psctl.sha256": _checksum(text, arrays)} | head
    save_file(arrays, saved, head)


@pytest.mark.parametrize(
    ("content", "arrays", "head", "message"),
    [
        ({"features": ["input_mse"]}, {}, {}, r"was trained on the features \['input_mse'\], but this psctl uses"),
        ({"input_mse_floor": 1e-3}, {}, {}, "was trained on the features"),
        ({}, {}, {"psctl.kind": "latency predictor"}, "is a safetensors file, but no cache predictor"),
        ({}, {}, {"psctl.format": "2"}, "is of format 2, but this psctl reads format 1"),
        ({"blocks": "mid"}, {}, {}, "blocks is 'mid', but it must be of type list"),
        ({"threshold": "low"}, {}, {}, "threshold is 'low', but it must be a number"),
        ({"min_confidence": None}, {}, {}, "min_confidence is None"),
        ({"max_lag": 0}, {}, {}, "max_lag or report is missing"),
        ({}, {"feature": torch.full((5,), 7, dtype=torch.int32)}, {}, "is damaged: .* of the forest is"),
        ({}, {"roots": torch.zeros(0, dtype=torch.int32)}, {}, "the roots of the forest must ascend"),
        ({}, {"more": torch.zeros(1)}, {}, "is damaged"),
    ],
)
def test_files_made_by_something_else(
    saved: Path, content: dict[str, Any], arrays: dict[str, torch.Tensor], head: dict[str, str], message: str
) -> None:
    rewritten(saved, {}, {})
    CachePredictor.load(saved)
    rewritten(saved, content, arrays, **head)
    with pytest.raises(UsageError, match=message) as caught:
        CachePredictor.load(saved)
    assert "\n" not in str(caught.value)


def test_other_safetensors_files(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(UsageError, match="is a safetensors file, but no cache predictor"):
        CachePredictor.load(tmp_path / "a.safetensors")


def test_decisions_are_the_kernels(predictor: CachePredictor, samples: BlockSamples) -> None:
    features = torch.from_numpy(samples.features[:500])
    assert torch.equal(predictor.may_reuse(features, kernels="torch"), forest_predict(features, predictor.forest))
    with pytest.raises(ValueError, match=r"must be \(rows, 5\)"):
        predictor.may_reuse(features[:, :4])
    assert isinstance(predictor.forest, FlatForest)
