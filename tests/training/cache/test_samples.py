"""Training data of the cache predictor: its features, and samples of good and bad profiles."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from patchedserve.data.errors import UsageError
from patchedserve.data.tables.schemas import BLOCKS
from patchedserve.training.cache.predictor import FEATURES, INPUT_MSE_FLOOR, features_of
from patchedserve.training.cache.samples import BlockSamples, load_samples

from ...support.block_profiles import samples_of, write_profile


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_profile(tmp_path_factory.mktemp("profile") / "blocks.parquet")


@pytest.fixture(scope="module")
def samples(profile: Path) -> BlockSamples:
    return samples_of(profile)


def test_rows_of_larger_lags_can_be_excluded(tmp_path: Path) -> None:
    path = write_profile(tmp_path / "b.parquet", num_requests=2, num_steps=5, lags=(1, 2, 3))
    _, samples = load_samples(path, max_rows=10**6, seed=0, max_lag=2)
    assert set(samples.lag) == {1, 2}
    with pytest.raises(UsageError, match=r"has lags up to 3, but 4 reuses in a row .*; run psctl profile blocks --max"):
        load_samples(path, max_rows=10**6, seed=0, max_lag=4)


def test_features_are_the_named_columns() -> None:
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


def test_nan_changes_count_as_infinite() -> None:
    given = torch.tensor([math.nan, math.inf, 0.5])
    features = features_of(given, 0, torch.zeros(3), torch.zeros(3), torch.ones(3))
    assert features[:, 0].tolist() == [math.inf, math.inf, pytest.approx(math.log10(0.5))]
    assert given[2] == 0.5, "the argument is left alone"
    assert given[0].isnan()


def test_half_precision_and_no_rows() -> None:
    features = features_of(torch.tensor([0.25], dtype=torch.bfloat16), 3, *torch.ones(3, 1))
    assert features.tolist() == [[pytest.approx(math.log10(0.25)), 3, 1, 1, 1]]
    assert features_of(torch.empty(0), 3, *torch.ones(3, 0)).shape == (0, 5)


def test_samples_equal_the_profile(profile: Path, samples: BlockSamples) -> None:
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
    # The sample is unbiased: it has about equal shares of each request, block and lag.
    for column in ("request", "lag"):
        shares = [np.unique(getattr(s, column), return_counts=True)[1] / len(s) for s in (one, samples)]
        np.testing.assert_allclose(shares[0], shares[1], atol=0.04)


def test_half_of_a_sample_are_whole_model_rows(profile: Path, samples: BlockSamples) -> None:
    facts, some = load_samples(profile, max_rows=1000, seed=0)
    assert some.is_whole(facts).mean() == pytest.approx(0.5, abs=0.05)
    assert samples.is_whole(facts).mean() == pytest.approx(0.25, abs=0.01)


def test_profile_without_whole_model_rows_is_too_old(tmp_path: Path) -> None:
    path = write_profile(tmp_path / "b.parquet", num_requests=2, num_steps=3, block_index=0, block="down0")
    with pytest.raises(UsageError, match="has no rows of the whole model; run psctl profile blocks again"):
        load_samples(path, max_rows=1000, seed=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lag": 0}, "column lag holds 0, but it must be at least 1"),
        ({"input_mse_normalised": -0.5}, "column input_mse_normalised holds -0.5, but it must be at least 0"),
        ({"step_fraction": 1.5}, "column step_fraction holds 1.5, but it must be from 0 to 1"),
        ({"width": 0}, "column width holds 0, but it must be at least 1"),
        ({"block_index": 4}, "column block_index holds 4, but there are 3 blocks"),
        ({"block_index": -1}, "column block_index holds -1, but there are 3 blocks"),
        ({"block": "up9"}, "block 0 is called up9, but its head says down0"),
        ({"scheduler": "DDIMScheduler"}, "rows of the scheduler DDIMScheduler, but its head says EulerDiscrete"),
    ],
)
def test_inconsistent_profiles_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write_profile(tmp_path / "b.parquet", num_requests=2, num_steps=3, **changes)
    with pytest.raises(UsageError, match=message) as caught:
        load_samples(path, max_rows=1000, seed=0)
    assert str(caught.value).startswith(f"{path}: ")


def test_malformed_profiles_are_refused(tmp_path: Path) -> None:
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
