"""kernels/forest.py compared with scikit-learn's RandomForestClassifier: equal to the last bit on every row."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from sklearn.ensemble import RandomForestClassifier

from patchedserve.kernels.forest import forest_predict, forest_proba, forest_proba_torch, forest_votes
from patchedserve.kernels.forest_tables import SEGMENT_LEAVES, FlatForest

from .conftest import RunTriton

# (trees, depth, leaves, features) of every forest; with leaves None, the depth alone limits them.
SHAPES = [
    (1, 1, None, 1),
    (1, 10, None, 2),
    (2, 3, None, 3),
    (5, 2, 3, 7),
    (7, 6, 63, 5),
    (16, 8, 63, 5),
    (24, 8, 40, 5),
    (30, 10, None, 4),
    (3, 10, None, 12),
]
IDS = ["-".join(map(str, shape)) for shape in SHAPES]


def random_rows(num_rows: int, num_features: int, seed: int) -> np.ndarray:
    """Return alternately continuous columns, columns of few values, and columns of nearly equal float32 values."""
    rng = np.random.default_rng(seed)
    columns = []
    for k in range(num_features):
        kind = k % 3
        if kind == 0:
            columns.append(rng.normal(-3, 2, num_rows))
        elif kind == 1:
            columns.append(rng.integers(0, 5, num_rows) / 7)
        else:
            columns.append(1 + rng.integers(0, 40, num_rows) * 2.0**-22)
    return np.stack(columns, axis=1).astype(np.float32)


def fit(trees: int, depth: int, leaves: int | None, num_features: int, seed: int = 0) -> RandomForestClassifier:
    rows = random_rows(3000, num_features, seed)
    rng = np.random.default_rng(seed + 1)
    # With noise, leaves are not pure, and probabilities are fractions that float64 must round.
    labels = rows[:, 0] + rows[:, num_features // 2] + rng.normal(0, 1.5, len(rows)) > -2
    forest = RandomForestClassifier(
        trees, max_depth=depth, max_leaf_nodes=leaves, random_state=seed, bootstrap=trees > 1, min_samples_leaf=3
    )
    return forest.fit(rows, labels)


def num_features_of(forest: RandomForestClassifier) -> int:
    return int(forest.n_features_in_)  # type: ignore[attr-defined]


def flat(forest: RandomForestClassifier) -> FlatForest:
    return FlatForest.of_trees([tree.tree_ for tree in forest.estimators_], num_features_of(forest))


def adversarial_rows(forest: RandomForestClassifier, seed: int = 0) -> np.ndarray:
    """Return rows made of thresholds: the nearest float32 values and their neighbours."""
    rng = np.random.default_rng(seed)
    columns = []
    for k in range(num_features_of(forest)):
        cuts = [tree.tree_.threshold[tree.tree_.feature == k] for tree in forest.estimators_]
        cut = np.concatenate([*cuts, [0.0]]).astype(np.float32)
        below, above = np.nextafter(cut, np.float32(-np.inf)), np.nextafter(cut, np.float32(np.inf))
        extremes = np.array([-0.0, 0.0, -1e30, 1e30, 1e-45], dtype=np.float32)
        columns.append(np.concatenate([below, cut, above, extremes]))
    # Every value of every feature occurs at least once, together with random values of the others.
    num_rows = max(130, *map(len, columns))
    pad = [np.concatenate([c, rng.choice(c, num_rows - len(c))]) for c in columns]
    return np.stack([rng.permutation(c) for c in pad], axis=1)


def assert_equal_to_sklearn(forest: RandomForestClassifier, rows: np.ndarray, proba: torch.Tensor) -> None:
    assert proba.dtype == torch.float64
    np.testing.assert_array_equal(proba.numpy(), forest.predict_proba(rows))


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_proba_of_every_row_equals_scikit_learn(shape: tuple[int, int, int | None, int]) -> None:
    forest = fit(*shape)
    tables = flat(forest)
    assert tables.depth <= shape[1]
    for rows in (random_rows(5000, shape[3], seed=9), adversarial_rows(forest)):
        features = torch.from_numpy(rows)
        assert_equal_to_sklearn(forest, rows, forest_proba(features, tables))
        np.testing.assert_array_equal(forest_predict(features, tables).numpy(), forest.predict(rows))
        np.testing.assert_array_equal(
            forest_votes(features, tables).numpy(), np.asarray(forest.predict_proba(rows))[:, 1]
        )


@pytest.mark.parametrize("seed", range(6))
def test_random_shapes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(3):
        leaves = None if rng.random() < 0.5 else int(rng.integers(2, 100))
        shape = (int(rng.integers(1, 31)), int(rng.integers(1, 11)), leaves, int(rng.integers(1, 9)))
        forest = fit(*shape, seed=seed)
        for rows in (random_rows(1000, shape[3], seed + 50), adversarial_rows(forest)):
            assert_equal_to_sklearn(forest, rows, forest_proba_torch(torch.from_numpy(rows), flat(forest)))


@pytest.mark.product
@pytest.mark.slow
@pytest.mark.parametrize("shape", [SHAPES[i] for i in (0, 2, 3, 4, 6)], ids=[IDS[i] for i in (0, 2, 3, 4, 6)])
@pytest.mark.parametrize("num_rows", [0, 1, 17, 130])
def test_triton_equals_scikit_learn(
    shape: tuple[int, int, int | None, int], num_rows: int, run_triton: RunTriton
) -> None:
    forest = fit(*shape)
    rows = adversarial_rows(forest)[:num_rows]
    proba = run_triton(forest_proba, torch.from_numpy(rows), flat(forest))
    if num_rows:
        assert_equal_to_sklearn(forest, rows, proba)
    assert proba.shape == (num_rows, 2)


@pytest.mark.slow
def test_triton_with_more_trees_than_a_tile(run_triton: RunTriton) -> None:
    forest = fit(37, 2, None, 3)
    rows = random_rows(33, 3, seed=4)
    assert_equal_to_sklearn(forest, rows, run_triton(forest_proba, torch.from_numpy(rows), flat(forest)))
    predicted = run_triton(forest_predict, torch.from_numpy(rows), flat(forest), min_confidence=0.5)
    np.testing.assert_array_equal(predicted.numpy(), forest.predict(rows))


@pytest.mark.parametrize("leaves", [SEGMENT_LEAVES - 1, SEGMENT_LEAVES, SEGMENT_LEAVES + 1, 2 * SEGMENT_LEAVES + 1])
def test_numbers_of_leaves_around_a_segment(leaves: int) -> None:
    forest = fit(3, 30, leaves, 3)
    assert {tree.tree_.n_leaves for tree in forest.estimators_} == {leaves}
    tables = flat(forest)
    assert tables.masks[0].shape[1] == 3 * -(-leaves // SEGMENT_LEAVES)
    # Every leaf has a row.
    rows = random_rows(3000, 3, seed=0)
    assert all(set(column) == set(range(leaves)) for column in leaf_numbers(forest, rows).T)
    assert_equal_to_sklearn(forest, rows, forest_proba(torch.from_numpy(rows), tables))


def leaf_numbers(forest: RandomForestClassifier, rows: np.ndarray) -> np.ndarray:
    """Return (rows, trees): the index of the leaf into which each row falls, from 0."""
    nodes = forest.apply(rows)
    return np.stack([np.unique(column, return_inverse=True)[1] for column in nodes.T], axis=1)


class Stump:
    """A tree in scikit-learn's arrays with one probability for all rows."""

    def __init__(self, probability: float) -> None:
        self.children_left = self.children_right = self.feature = np.array([-1])
        self.threshold = np.array([-2.0])
        self.value = np.array([[[1 - probability, probability]]])


class Split:
    """A tree with one split of feature 0; the left leaf has class 1, the right one class 0."""

    def __init__(self, threshold: float) -> None:
        self.children_left, self.children_right = np.array([1, -1, -1]), np.array([2, -1, -1])
        self.feature, self.threshold = np.array([0, -2, -2]), np.array([threshold, -2.0, -2.0])
        self.value = np.array([[[0.5, 0.5]], [[0.0, 1.0]], [[1.0, 0.0]]])


def test_trees_of_one_leaf_and_ties(run_triton: RunTriton) -> None:
    rows = torch.zeros(3, 2)
    for probabilities in ((0.5,), (0.25, 0.75), (0.2, 0.9, 0.4)):
        tables = FlatForest.of_trees([Stump(p) for p in probabilities], 2)
        assert tables.depth == 0
        # Ties give class 0; 0.2 + 0.9 + 0.4 is a tie, too, but not in float64.
        sums = [[0.0, 0.0], [0.0, 0.0]]
        for p in probabilities:
            sums[0][0] += 1 - p
            sums[0][1] += p
        expected = np.array([sums[0]] * 3) / len(probabilities)
        for proba in (forest_proba(rows, tables), run_triton(forest_proba, rows, tables)):
            np.testing.assert_array_equal(proba.numpy(), expected)
        assert forest_predict(rows, tables).tolist() == [bool(expected[0, 1] > expected[0, 0])] * 3
    assert not forest_predict(rows, FlatForest.of_trees([Stump(0.5)], 2)).any()


def test_sums_follow_the_order_of_the_trees() -> None:
    """The order of the sum affects the last bit; sklearn sums in the order of the trees."""
    probabilities = [1e-17] * 20 + [1.0]
    rows = torch.zeros(1, 1)
    totals = set()
    for order in (probabilities, probabilities[::-1]):
        total = 0.0
        for p in order:
            total += p
        totals.add(total)
        votes = forest_votes(rows, FlatForest.of_trees([Stump(p) for p in order], 1))
        assert votes.item() == total / 21
    assert len(totals) == 2, "too easy a test"


@pytest.mark.parametrize("threshold", [0.1, -0.1, 1 + 2.0**-24, 1 + 3 * 2.0**-24, -1 - 2.0**-24, 0.0, 1e-46, -1e-46])
def test_thresholds_between_two_floats(threshold: float, run_triton: RunTriton) -> None:
    nearest = np.float32(threshold)
    values = np.array([np.nextafter(nearest, np.float32(-np.inf)), nearest, np.nextafter(nearest, np.float32(np.inf))])
    expected = values.astype(np.float64) <= threshold
    assert expected.tolist() in ([True, False, False], [True, True, False])
    tables = FlatForest.of_trees([Split(threshold)], 1)
    features = torch.from_numpy(values)[:, None]
    assert forest_predict(features, tables).tolist() == expected.tolist()
    assert run_triton(forest_predict, features, tables).tolist() == expected.tolist()


def test_nan_and_infinity_exceed_every_threshold(run_triton: RunTriton) -> None:
    features = torch.tensor([[float("nan")], [float("inf")], [3.4e38], [-float("inf")], [0.0]])
    tables = FlatForest.of_trees([Split(0.0)], 1)
    for predicted in (forest_predict(features, tables), run_triton(forest_predict, features, tables)):
        assert predicted.tolist() == [False, False, False, True, True]


def test_decision_follows_min_confidence() -> None:
    forest = fit(9, 5, None, 3)
    rows = random_rows(2000, 3, seed=2)
    features, tables = torch.from_numpy(rows), flat(forest)
    votes = forest_votes(features, tables)
    shares = []
    for confidence in (0.0, 0.3, 0.5, 0.8, 1.0):
        predicted = forest_predict(features, tables, min_confidence=confidence)
        is_clear = (votes - confidence).abs() > 1e-12
        assert torch.equal(predicted[is_clear], (votes > confidence)[is_clear])
        shares.append(float(predicted.float().mean()))
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > shares[2] > shares[-1] == 0


def test_strides_and_empty_batches(run_triton: RunTriton) -> None:
    forest = fit(3, 4, None, 4)
    rows = torch.from_numpy(random_rows(60, 4, seed=3))
    strided = rows.t().contiguous().t()[::2]
    assert not strided.is_contiguous()
    for run in (forest_proba, lambda *given: run_triton(forest_proba, *given)):
        assert torch.equal(run(strided, flat(forest)), forest_proba_torch(rows[::2].contiguous(), flat(forest)))
        assert run(torch.empty(0, 4), flat(forest)).shape == (0, 2)


@pytest.mark.slow
def test_rows_are_independent_of_their_batch() -> None:
    forest = fit(8, 6, None, 5)
    rows = torch.from_numpy(random_rows(50, 5, seed=3))
    together = forest_proba(rows, flat(forest))
    assert torch.equal(together, torch.cat([forest_proba(row[None], flat(forest)) for row in rows]))


def test_forest_is_rebuilt_from_its_nodes() -> None:
    tables = flat(fit(4, 5, None, 3))
    again = FlatForest.of(**tables.nodes(), num_features=3)
    for field in dataclasses.fields(FlatForest):
        one, other = getattr(tables, field.name), getattr(again, field.name)
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other), field.name
        elif isinstance(one, tuple):
            assert all(map(torch.equal, one, other)), field.name
        else:
            assert one == other, field.name
    assert tables.num_bytes > sum(array.nbytes for array in tables.nodes().values())


def broken(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return FlatForest.of_trees([Split(0.5), Stump(0.25)], 1).nodes() | changes


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (broken(feature=ints(1, 0, 0, 0)), "looks at a feature outside 0 to 0"),
        (broken(feature=ints(-1, 0, 0, 0)), "looks at a feature outside 0 to 0"),
        (broken(feature=ints(0, 0, 0)), r"threshold of the forest is \(4,\) of float32, but it must be \(3,\)"),
        (broken(feature=torch.zeros(4)), "feature of the forest is .* of float32, but it must be .* of int32"),
        (broken(threshold=torch.tensor([float("nan"), 0, 0, 0])), "threshold of the forest is not finite"),
        (broken(children=ints(1, 4, 1, 1, 2, 2, 3, 3).view(4, 2)), "child outside its tree"),
        (broken(children=ints(1, 3, 1, 1, 2, 2, 3, 3).view(4, 2)), "child outside its tree"),
        (broken(children=ints(1, 2, 1, 1, 2, 0, 3, 3).view(4, 2)), "a leaf of the forest has a child"),
        (broken(children=ints(1, 1, 1, 1, 2, 2, 3, 3).view(4, 2)), "no parent or several"),
        (broken(children=ints(1, 2, 0, 2, 2, 2, 3, 3).view(4, 2)), "before itself"),
        (broken(roots=ints(0)), "no parent or several"),
        (broken(roots=ints(1, 3)), "ascend from node 0"),
        (broken(roots=ints(0, 4)), "ascend from node 0"),
        (broken(roots=ints(0, 0)), "ascend from node 0"),
        (broken(roots=ints()), "ascend from node 0"),
        (broken(proba=torch.full((4, 2), 0.7, dtype=torch.float64)), "do not add up to 1"),
        (broken(proba=torch.tensor([[-1.0, 2.0]] * 4, dtype=torch.float64)), "do not add up to 1"),
        (broken(proba=torch.full((4, 2), float("nan"), dtype=torch.float64)), "do not add up to 1"),
    ],
)
def test_invalid_forest_arrays_are_refused(nodes: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlatForest.of(**nodes, num_features=1)


def test_empty_and_too_large_forests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="has no trees"):
        FlatForest.of_trees([], 1)
    monkeypatch.setattr("patchedserve.kernels.forest_tables._MAX_MASK_BYTES", 100)
    with pytest.raises(ValueError, match="use fewer trees or leaves"):
        flat(fit(3, 4, None, 2))


def test_invalid_arguments_are_refused() -> None:
    tables = FlatForest.of_trees([Split(0.5)], 2)
    for features in (torch.zeros(2), torch.zeros(2, 3), torch.zeros(2, 2).double()):
        with pytest.raises(ValueError, match=r"they must be \(rows, 2\) of torch.float32"):
            forest_proba(features, tables)
    with pytest.raises(ValueError, match="features are on meta, but the forest is on cpu"):
        forest_proba(torch.zeros(2, 2, device="meta"), tables)
    with pytest.raises(ValueError, match="kernels is 'numpy'"):
        forest_proba(torch.zeros(2, 2), tables, kernels="numpy")


def test_reference_equals_scikit_learn_in_every_leaf_interval() -> None:
    """Test all intervals of a small forest, each with a row in its middle and at its upper end."""
    forest = fit(5, 3, None, 2)
    tables = flat(forest)
    grid = []
    for cut in tables.cuts:
        ends = np.concatenate([[-100], cut.numpy(), [100]]).astype(np.float32)
        grid.append(np.concatenate([(ends[:-1] + ends[1:]) / 2, ends[1:]]))
    rows = np.array(list(itertools.product(*grid)), dtype=np.float32)
    assert_equal_to_sklearn(forest, rows, forest_proba(torch.from_numpy(rows), tables))
