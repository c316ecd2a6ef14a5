"""FID, KID and their intervals on features, compared with independent computations."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch

from patchedserve.data.errors import UsageError
from patchedserve.eval.metrics.bootstrap import bootstrap_centred
from patchedserve.eval.metrics.fid import counts_of, fid, fid_infinity, frechet_distance, frechet_influence, paired_fid
from patchedserve.eval.metrics.kid import kid

from ...support.eval_cases import torchmetrics_fid

pytest.importorskip("torchmetrics", reason="the extra `eval` is not installed")


def _features(count: int, seed: int, *, width: int = 16, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
    mixing = np.random.default_rng(9).normal(size=(width, width)) / width**0.5
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, width)) @ mixing * scale + shift)


def _scipy_frechet(real: torch.Tensor, generated: torch.Tensor) -> float:
    one, other = real.numpy(), generated.numpy()
    covariances = np.cov(one, rowvar=False), np.cov(other, rowvar=False)
    root = scipy.linalg.sqrtm(covariances[0] @ covariances[1])
    means = one.mean(0) - other.mean(0)
    return float(means @ means + np.trace(covariances[0] + covariances[1]) - 2 * np.trace(np.real(root)))


@pytest.mark.parametrize(("counts", "width"), [((300, 200), 16), ((40, 50), 64), ((30, 200), 64), ((64, 65), 64)])
def test_frechet_distance_equals_scipy_and_torchmetrics(counts: tuple[int, int], width: int) -> None:
    real, generated = _features(counts[0], 0, width=width), _features(counts[1], 1, width=width, scale=1.2, shift=0.1)
    found = frechet_distance(real, generated)
    assert found == pytest.approx(_scipy_frechet(real, generated), rel=1e-3)
    assert found == pytest.approx(torchmetrics_fid(real, generated), rel=1e-4)
    assert frechet_distance(real, real) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("counts", "width"), [((40, 30), 64), ((300, 200), 16)])
def test_duplicate_images_are_counted(counts: tuple[int, int], width: int) -> None:
    sides = [torch.randn(count, width, generator=torch.Generator().manual_seed(count)) for count in counts]
    sides[0][:, 3] = 1.0  # a constant feature
    rng = np.random.default_rng(0)
    drawn = [rng.integers(0, count, 2 * count) for count in counts]
    repeated = [side[indices] for side, indices in zip(sides, drawn, strict=True)]
    found = frechet_distance(*sides, *(counts_of(each, len(side)) for each, side in zip(drawn, sides, strict=True)))
    assert found == pytest.approx(frechet_distance(*repeated), rel=1e-6)
    assert found == pytest.approx(torchmetrics_fid(*repeated), rel=1e-4)


def test_influence_of_an_image_is_the_derivative_by_its_weight() -> None:
    real, generated = _features(3000, 0), _features(2000, 1, scale=1.2, shift=0.1)
    influence = frechet_influence(real, generated)
    # Relative to a million copies of the set, 100,000 more copies of an image are a small step.
    copies, more = torch.full((2000,), 10**6), 10**5
    before = frechet_distance(real, generated, None, copies)
    for place in range(0, 2000, 200):
        counts = copies.clone()
        counts[place] += more
        changed = frechet_distance(real, generated, None, counts) - before
        assert changed / (more / int(counts.sum())) == pytest.approx(float(influence[place]), rel=0.02, abs=0.01)
    assert float(influence.mean()) == pytest.approx(0, abs=0.05)


def test_frechet_distance_refuses_too_few_images() -> None:
    for real, generated, word in ((1, 5, "1 real"), (5, 0, "0 generated")):
        with pytest.raises(UsageError, match=word):
            frechet_distance(torch.zeros(real, 2), torch.zeros(generated, 2))
    with pytest.raises(UsageError, match="must be"):
        frechet_distance(torch.zeros(3, 2), torch.zeros(3, 3))


def test_fid_interval_has_coverage_and_narrows() -> None:
    widths = []
    for count in (60, 600):
        real, generated = _features(count, 2), _features(count, 3, scale=1.3)
        found = fid(real, generated, seed=5, num_resamples=100)
        low, high = found.interval or (0, 0)
        assert low < found.value < high
        assert (found.value, found.n) == (frechet_distance(real, generated), count)
        assert found == fid(real, generated, seed=5, num_resamples=100)
        assert found.interval != fid(real, generated, seed=6, num_resamples=100).interval
        widths.append(high - low)
    assert widths[1] < widths[0] / 2


def test_fid_interval_contains_the_fid_of_new_images() -> None:
    """For 40 independent pairs of sets, FID lies in its neighbour's interval about as often as intervals promise."""
    # For two independent draws of equal spread, the 95 % interval of one contains the other in 83 % of cases.
    hits = 0
    found = [
        fid(_features(80, 100 + seed), _features(80, 200 + seed, scale=1.2), num_resamples=60) for seed in range(40)
    ]
    for one, neighbour in zip(found, found[1:] + found[:1], strict=True):
        low, high = one.interval or (0, 0)
        hits += low <= neighbour.value <= high
    assert 25 <= hits <= 40


def test_paired_fid_has_its_own_interval_width() -> None:
    rng = np.random.default_rng(0)
    first = _features(60, 0, width=64)
    second = first + torch.from_numpy(rng.normal(size=(60, 64))) * 0.01
    found = paired_fid(first, second, num_resamples=40)
    value, (low, high) = found.value, found.interval or (0, 0)
    assert value == frechet_distance(first, second)
    assert 0 <= low <= value <= high < 3 * value
    # If both are resampled independently, they are as far apart as any two sets, which gives no information.
    apart = fid(first, second, num_resamples=40).interval or (0, 0)
    assert apart[1] - apart[0] > 50 * (high - low)
    # The interval also covers the result for other prompts.
    other = _features(60, 1, width=64)
    again = frechet_distance(other, other + torch.from_numpy(rng.normal(size=(60, 64))) * 0.01)
    assert again == pytest.approx(value, abs=2 * (high - low))
    with pytest.raises(UsageError, match="pairs need as many"):
        paired_fid(first, second[:9])


@pytest.mark.exhaustive
@pytest.mark.slow
def test_fid_interval_of_few_resamples_has_nominal_coverage() -> None:
    """With 40 resamples, the outermost quantiles cover about 90 %; standard deviations cover 95 %."""
    rng = np.random.default_rng(3)
    for num_resamples in (40, 200):
        hits = 0
        for _ in range(400):
            sample = rng.normal(size=50)
            found = bootstrap_centred(
                float(sample.mean()),
                [50],
                lambda index, sample=sample: float(sample[index].mean()),
                seed=int(rng.integers(1 << 30)),
                num_resamples=num_resamples,
            )
            low, high = found.interval or (0, 0)
            hits += low <= 0 <= high
        assert 0.92 <= hits / 400 <= 0.97


def _diagonal(count: int, seed: int, scales: np.ndarray, means: np.ndarray | float = 0.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, len(scales))) * scales + means)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("power", [0, 1])
@pytest.mark.parametrize("per_feature", [2, 3])
def test_fid_infinity_interval_contains_the_known_distance(power: int, per_feature: int) -> None:
    # Normal features with diagonal covariances: the distance is |m1 - m2|^2 + |s1 - s2|^2.
    width = 32
    variances = np.arange(1, width + 1.0) ** -power
    one = np.sqrt(variances * width / variances.sum())
    for other, means in ((one, 0.0), (one * (1 + 0.3 * np.cos(np.arange(width))), one / 4)):
        known = float(np.square(one - other).sum() + np.square(means * np.ones(width)).sum())
        estimates, biased, hits = [], [], 0
        for seed in range(20):
            real = _diagonal(per_feature * width, seed, one)
            generated = _diagonal(per_feature * width, seed + 50, other, means)
            whole = fid(real, generated, num_resamples=40)
            assert whole.high is not None
            biased.append(whole.value)
            found = fid_infinity(real, generated, (whole.high - whole.value) / 1.96, seed=seed)
            if isinstance(found, str):
                assert "no straight line" in found
                continue
            assert found.counts[0] >= width
            assert (found.counts[-1], len(found.counts)) == (per_feature * width, 7)
            estimates.append(found.estimate.value)
            low, high = found.estimate.interval or (0, 0)
            hits += low <= known <= high
        # The bias is at least as large as the whole distance, and the remaining error is close to zero.
        bias = float(np.mean(biased)) - known
        spread = float(np.std(estimates)) / len(estimates) ** 0.5
        assert bias > 1.5
        assert abs(np.mean(estimates) - known) < 0.03 * bias + 2.5 * spread
        assert len(estimates) >= 16
        assert hits >= len(estimates) - 2


def test_missing_fid_infinity_states_the_reason() -> None:
    too_few = fid_infinity(_features(31, 0), _features(400, 1), 0.1)
    assert too_few == "too few images: 31, but 32 are needed"
    # A thousand images with Inception's 2,048 features are too few, even if their points lie on a line.
    assert fid_infinity(torch.zeros(1000, 2048), torch.zeros(1000, 2048), 0.1) == (
        "too few images: 1000, but 4096 are needed"
    )
    # Very many images have hardly any bias, so that the fit only sees noise.
    scattered = fid_infinity(_features(4000, 0, width=2), _features(4000, 51, width=2, shift=3.0), 0.1)
    assert isinstance(scattered, str)
    assert scattered.startswith("no straight line over 1 / N: r2 is ")


def test_kid_equals_torchmetrics_and_manual_values() -> None:
    from torchmetrics.image.kid import poly_mmd

    real, generated = _features(30, 0), _features(30, 1, scale=1.3)
    result = kid(real, generated)
    assert result.estimate.value == pytest.approx(float(poly_mmd(real, generated)), rel=1e-9)
    assert (result.subset_size, result.num_subsets, result.subset_std) == (30, 1, 0)
    # Different numbers on both sides, with the formula written out.
    real = real[:20]
    kernel = lambda a, b: (float(a @ b) / 16 + 1) ** 3  # noqa: E731
    within = [
        np.mean([kernel(a, b) for i, a in enumerate(side) for j, b in enumerate(side) if i != j])
        for side in (real, generated)
    ]
    across = np.mean([kernel(a, b) for a in real for b in generated])
    result = kid(real, generated)
    assert result.estimate.value == pytest.approx(within[0] + within[1] - 2 * across, rel=1e-9)
    # The spread of the jackknife, by leaving out each image in turn.
    leave = []
    for side, count in ((0, 20), (1, 30)):
        values = []
        for i in range(count):
            parts = [real, generated]
            parts[side] = torch.cat([parts[side][:i], parts[side][i + 1 :]])
            values.append(kid(*parts).estimate.value)
        leave.append((count - 1) / count * np.square(np.array(values) - np.mean(values)).sum())
    spread = math.sqrt(sum(leave))
    low, high = result.estimate.interval or (0, 0)
    assert high - result.estimate.value == pytest.approx(1.959964 * spread, rel=1e-6)
    assert result.estimate.value - low == pytest.approx(1.959964 * spread, rel=1e-6)


def test_kid_subsets_are_seeded_and_agree_with_all_images() -> None:
    real, generated = _features(300, 0), _features(300, 1, scale=1.3)
    one, again, other = (kid(real, generated, seed=seed, subset_size=50, num_subsets=60) for seed in (1, 1, 2))
    assert one == again
    assert one.estimate.value != other.estimate.value
    whole = kid(real, generated).estimate
    low, high = whole.interval or (0, 0)
    assert one.estimate.value == pytest.approx(whole.value, abs=0.3 * (high - low))
    low, high = one.estimate.interval or (0, 0)
    assert low < whole.value < high
    # A subset gives torchmetrics' value of the same images.
    from torchmetrics.image.kid import poly_mmd

    rng = np.random.default_rng(1)
    subset = [side[rng.permutation(300)[:50]] for side in (real, generated)]
    first = kid(real, generated, seed=1, subset_size=50, num_subsets=1)
    assert first.estimate.value == pytest.approx(float(poly_mmd(subset[0], subset[1])), rel=1e-9)
    assert (one.subset_size, one.num_subsets) == (50, 60)
    assert one.subset_std > 0
    low, high = kid(_features(200, 4), _features(200, 5)).estimate.interval or (0, 0)
    assert low < 0 < high
    with pytest.raises(UsageError, match="1 generated"):
        kid(real, generated[:1])
    assert kid(real[:2], generated).estimate.interval is None
