"""The latency predictor: accuracy on a known law, equality with scikit-learn, extrapolation, and files."""

import math
import random
import statistics
import subprocess
import sys
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from patchedserve.data.errors import UsageError
from patchedserve.data.resolution import Resolution, parse_list
from patchedserve.data.tables.latency import LatencyRow
from patchedserve.data.work import Work, work_of
from patchedserve.data.workspace import ModelWorkspace
from patchedserve.serving.runs.outside_profile import predictions_outside
from patchedserve.training.latency import fitting
from patchedserve.training.latency.file import SupportVectors
from patchedserve.training.latency.fitting import (
    MIN_ROWS,
    features_of,
    fit_latency_predictor,
    flat_arrays,
    time_predictions,
)
from patchedserve.training.latency.online_correction import OnlineCorrection
from patchedserve.training.latency.predictor import LatencyPredictor, load_workspace_predictor

from ...support.latency_tables import CIRCUMSTANCES, SIZES, law_ms, law_rows

S, M, L = SIZES


@pytest.fixture(scope="module")
def rows() -> list[LatencyRow]:
    return law_rows()


@pytest.fixture(scope="module")
def fitted(rows: list[LatencyRow]) -> LatencyPredictor:
    return fit_latency_predictor(rows, seed=0, circumstances=CIRCUMSTANCES)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fits do not search, for tests that do not depend on their accuracy."""
    grid = {"C": (10.0,), "gamma": (0.05,), "epsilon": (0.01,)}
    monkeypatch.setattr(fitting, "GRID", grid)


@pytest.fixture
def predictor(fitted: LatencyPredictor) -> LatencyPredictor:
    """A predictor without earlier predictions."""
    return LatencyPredictor(fitted.model, fitted.about)


@pytest.fixture
def saved(predictor: LatencyPredictor, tmp_path: Path) -> Path:
    predictor.save(tmp_path / "latency.safetensors")
    return tmp_path / "latency.safetensors"


def vectors_of(predictor: LatencyPredictor) -> SupportVectors:
    assert predictor.model.vectors is not None
    return predictor.model.vectors


def spread(row: LatencyRow) -> list[Resolution]:
    return [size for size, count in row.counts.items() for _ in range(count)]


@pytest.mark.slow
def test_known_law_is_learned(fitted: LatencyPredictor) -> None:
    fit = fitted.about.fit
    errors = fit["errors"]
    # The noise alone has a mean error of 1.6 %.
    assert errors["svr"]["mape"] <= 0.03
    assert errors["svr"]["r2"] >= 0.98
    assert errors["svr"]["mape"] < min(errors["linear"]["mape"], errors["pixels"]["mape"])
    assert (fit["num_train"], len(fit["held_out"])) == (240, 60)
    # Compared with the law itself on all possible batches, not only on those of the table.
    worst = [
        abs(fitted.step_latency_s([S] * s + [M] * m + [L] * large) * 1e3 / law_ms(counts) - 1)
        for s in range(17)
        for m in range(17 - s)
        for large in range(17 - s - m)
        if (counts := {size: count for size, count in ((S, s), (M, m), (L, large)) if count})
    ]
    assert len(worst) == 968
    assert np.mean(worst) < 0.015
    assert max(worst) < 0.12


@pytest.mark.slow
def test_reported_errors_are_measured_on_unseen_rows(fitted: LatencyPredictor, rows: list[LatencyRow]) -> None:
    unseen = [row for row in rows if row.label in fitted.about.fit["held_out"]]
    assert len(unseen) == 60
    measured = np.array([row.median_ms for row in unseen])
    predicted = np.array([fitted.step_latency_s(spread(row)) * 1e3 for row in unseen])
    errors = fitted.about.fit["errors"]["svr"]
    assert errors["mape"] == pytest.approx(np.mean(np.abs(predicted / measured - 1)))
    assert errors["mse_ms2"] == pytest.approx(np.mean((predicted - measured) ** 2))
    assert errors["r2"] == pytest.approx(1 - np.mean((predicted - measured) ** 2) / np.var(measured))


@pytest.mark.usefixtures("quick")
def test_held_out_rows_do_not_change_the_fit(rows: list[LatencyRow]) -> None:
    fitted = fit_latency_predictor(rows, seed=0)
    held_out = set(fitted.about.fit["held_out"])
    spoiled = [
        replace(row, samples_ms=tuple(ms * 9 for ms in row.samples_ms)) if row.label in held_out else row
        for row in rows
    ]
    again = fit_latency_predictor(spoiled, seed=0)
    assert np.array_equal(vectors_of(again).vectors, vectors_of(fitted).vectors)
    assert np.array_equal(vectors_of(again).dual, vectors_of(fitted).dual)
    assert again.about.fit["errors"]["svr"]["mape"] > 0.8


def test_corner_combinations_are_in_the_training_set(fitted: LatencyPredictor) -> None:
    corners = {"128x128", "192x192", "256x256", "16*128x128", "16*192x192", "16*256x256"}
    assert not corners & set(fitted.about.fit["held_out"])


def test_equal_to_scikit_learn_on_every_row(rows: list[LatencyRow], fitted: LatencyPredictor) -> None:
    from sklearn.pipeline import Pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVR

    features = np.array([features_of(fitted.about, row) for row in rows])
    target = np.log([row.median_ms for row in rows])
    for gamma in (0.05, "scale"):
        pipeline = Pipeline([("scaler", StandardScaler()), ("svr", SVR(C=50, gamma=gamma, epsilon=0.02))])  # type: ignore[arg-type]
        pipeline.fit(features[:200], target[:200])
        found = flat_arrays(pipeline).predict(features)
        np.testing.assert_allclose(np.exp(found), np.exp(pipeline.predict(features)), rtol=1e-9)


def test_features_equal_those_of_the_paper(fitted: LatencyPredictor) -> None:
    about = fitted.about
    assert about.feature_names == (
        *("requests_128x128", "requests_192x192", "requests_256x256"),
        *("distinct_resolutions", "patches", "log_patches"),
    )
    # Patches of 64 pixels: 4, 9 and 16 of them.
    assert about.patch_px == 64
    assert features_of(about, LatencyRow({S: 2, L: 1}, (1.0,))) == [2, 0, 1, 2, 24, math.log(24)]
    odd = replace(about, resolutions=parse_list("128x192,160"))
    assert odd.patch_px == 32


@pytest.mark.usefixtures("quick")
def test_fitting_is_seeded(rows: list[LatencyRow]) -> None:
    one, again, other = (fit_latency_predictor(rows, seed=seed) for seed in (3, 3, 4))
    assert again.about == one.about
    assert np.array_equal(vectors_of(again).dual, vectors_of(one).dual)
    assert other.about.fit["held_out"] != one.about.fit["held_out"]


@pytest.mark.slow
def test_predictions_are_cached_and_independent_of_order(predictor: LatencyPredictor) -> None:
    batch = [S, L, M, S, L, S]
    latency_s = predictor.step_latency_s(batch)
    assert predictor.step_latency_s(sorted(batch)) == latency_s == predictor.step_latency_s(tuple(reversed(batch)))
    assert len(predictor._known) == 1
    assert predictor.predict_ms([[3, 1, 2]]) == [pytest.approx(latency_s * 1e3)]
    assert predictor.step_latency_s([]) == 0.0


def test_memory_is_bounded(predictor: LatencyPredictor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchedserve.training.latency.predictor._MAX_CACHED", 5)
    for count in range(1, 17):
        predictor.step_latency_s([S] * count)
    assert len(predictor._known) <= 5


def test_more_pixels_take_longer(fitted: LatencyPredictor) -> None:
    sound = fit_latency_predictor(law_rows(noise=0.0))
    for known, fall in ((sound, 1.0), (fitted, 0.995)):  # noise of 2 % may shorten a step by a fraction of that
        predictor = LatencyPredictor(known.model, known.about, lambda message: None)
        for size in SIZES:
            times = [predictor.step_latency_s([size] * count) for count in range(1, 41)]
            assert all(after >= fall * before for before, after in pairwise(times))
    assert predictor.step_latency_s([S] * 3) < predictor.step_latency_s([M] * 3) < predictor.step_latency_s([L] * 3)


def test_larger_batches_are_extrapolated_counted_and_warned_of_once(fitted: LatencyPredictor) -> None:
    told: list[str] = []
    predictor = LatencyPredictor(fitted.model, fitted.about, told.append)
    assert predictor.step_latency_s([L] * 16) > 0
    assert told == []
    for batch in ([L] * 32, [S] * 10 + [L] * 10, [L] * 32):
        counts = {size: batch.count(size) for size in set(batch)}
        assert predictor.step_latency_s(batch) * 1e3 == pytest.approx(law_ms(counts), rel=0.2)
    assert predictor.step_latency_s([L] * 32) == pytest.approx(2 * predictor.step_latency_s([L] * 16))
    assert told == [
        "a batch of 32 requests is larger than all that were profiled (at most 16); its latency is extrapolated"
    ]
    assert (predictor.num_too_large, predictor.num_between) == (4, 0)


@pytest.mark.usefixtures("quick")
def test_more_of_one_resolution_than_was_profiled_counts_as_larger() -> None:
    few_large = [row for row in law_rows(500) if row.counts.get(L, 0) <= 4]
    told: list[str] = []
    fitted = fit_latency_predictor(few_large)
    predictor = LatencyPredictor(fitted.model, fitted.about, told.append)
    assert predictor.about.largest_counts == (16, 16, 4)
    assert predictor.step_latency_s([L] * 8) * 1e3 == pytest.approx(law_ms({L: 8}), rel=0.15)
    assert predictor.num_too_large == len(told) == 1


def test_resolutions_between_profiled_ones(fitted: LatencyPredictor) -> None:
    told: list[str] = []
    predictor = LatencyPredictor(fitted.model, fitted.about, told.append)
    tall, between = Resolution(96, 384), Resolution(160, 160)
    # The same number of pixels as 192x192 gives the same latency.
    assert predictor.step_latency_s([tall, S]) == pytest.approx(predictor.step_latency_s([M, S]))
    for count in (1, 4, 12):
        counts = {between: count, S: 2}
        found = predictor.step_latency_s([between] * count + [S, S])
        assert found * 1e3 == pytest.approx(law_ms(counts), rel=0.1)
    assert told == ["96x384 was not profiled; its latency is interpolated between 128x128, 192x192, 256x256"]
    assert (predictor.num_too_large, predictor.num_between) == (0, 4)
    # More different resolutions than were profiled.
    assert predictor.step_latency_s([S, M, L, between, tall]) > predictor.step_latency_s([S, M, L])
    # More requests than were profiled, at a resolution in between.
    assert predictor.step_latency_s([between] * 20) * 1e3 == pytest.approx(law_ms({between: 20}), rel=0.15)
    assert (len(told), predictor.num_too_large, predictor.num_between) == (2, 1, 6)


def test_run_reports_what_it_asked_beyond_the_profile(fitted: LatencyPredictor) -> None:
    predictor = LatencyPredictor(fitted.model, fitted.about, lambda message: None)
    correction = OnlineCorrection(predictor)
    assert predictions_outside(correction) == {"too_large": 0, "between": 0}
    correction.step_latency_s([S] * 17)
    correction.step_latency_s([Resolution(160, 160)])
    before = predictions_outside(correction)
    assert before == predictions_outside(predictor) == {"too_large": 1, "between": 1}
    # The predictions of the previous run are subtracted from those of the next.
    correction.step_latency_s([S] * 17)
    assert predictions_outside(correction, before) == {"too_large": 1, "between": 0}
    assert predictions_outside(None) is None


def test_without_a_listener_python_warns_once(predictor: LatencyPredictor) -> None:
    with pytest.warns(RuntimeWarning, match="17 requests is larger"):
        predictor.step_latency_s([S] * 17)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predictor.step_latency_s([S] * 18)
    assert predictor.num_too_large == 2


@pytest.mark.parametrize(("size", "word"), [(Resolution(64, 64), "smaller"), (Resolution(512, 512), "larger")])
def test_resolutions_beyond_the_profile_are_refused(predictor: LatencyPredictor, size: Resolution, word: str) -> None:
    message = f"{size} is {word} than all resolutions that the latency predictor knows .128x128, 192x192, 256x256."
    with pytest.raises(UsageError, match=message):
        predictor.step_latency_s([S, size])
    assert (predictor.num_between, predictor._known, predictor._outside) == (0, {}, {})


def test_parts_of_images_are_refused(fitted: LatencyPredictor) -> None:
    with pytest.raises(UsageError, match=r"knows whole images only, and not 25.0% of 128x128"):
        fitted.step_latency_s([Resolution(128, 128), Work(128, 128, 0.25)])


def test_references_count_as_parts_of_an_image(fitted: LatencyPredictor) -> None:
    size = Resolution(128, 128)
    few, many = (fitted.step_latency_s([size] * count) for count in (4, 12))
    assert few < fitted.step_latency_s([work_of(size, 2.0)] * 4) < many
    assert fitted.step_latency_s([work_of(size, 3.0)] * 4) == pytest.approx(many)


def test_one_resolution_is_enough() -> None:
    rows = law_rows(16, sizes=(S,), noise=0.0)
    fitted = fit_latency_predictor(rows)
    assert fitted.about.feature_names == ("requests_128x128", "distinct_resolutions", "patches", "log_patches")
    assert fitted.about.fit["errors"]["svr"]["mape"] < 0.02


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (law_rows(40)[:1], "holds one combination, but a latency predictor needs at least 10"),
        (law_rows(40)[: MIN_ROWS - 1], "holds 9 combinations"),
        (law_rows(40)[:20] + law_rows(40)[:1], "holds the combination 128x128 twice"),
        (law_rows(12, sizes=parse_list("64,72,80,88,96,104")), "14 combinations, but only 2 of them"),
    ],
)
def test_tables_that_cannot_be_fitted(rows: list[LatencyRow], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fit_latency_predictor(rows)


@pytest.mark.usefixtures("quick")
def test_constant_times_have_no_r2() -> None:
    rows = [replace(row, samples_ms=(5.0,)) for row in law_rows(40)]
    errors = fit_latency_predictor(rows).about.fit["errors"]
    assert errors["svr"]["r2"] is None
    assert errors["svr"]["mape"] < 0.01


def test_saved_predictors_predict_equally(fitted: LatencyPredictor, saved: Path) -> None:
    loaded = LatencyPredictor.load(saved, expect=CIRCUMSTANCES)
    assert loaded.about == fitted.about
    for batch in ([S], [S, M, L], [L] * 16):
        assert loaded.step_latency_s(batch) == fitted.step_latency_s(batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "emoji-3", "fingerprint": "def"}, "is for the model emoji-xl, but emoji-3 is served"),
        ({"device_name": "H200"}, "is for device a processor, but H200 is served"),
        ({"dtype": "bfloat16"}, "is for dtype float32, but bfloat16 is served"),
    ],
)
def test_predictors_of_other_models_are_refused(saved: Path, change: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        LatencyPredictor.load(saved, expect=replace(CIRCUMSTANCES, **change))
    assert str(caught.value).startswith(str(saved))
    assert "psctl train-predictor latency" in str(caught.value)


@pytest.mark.usefixtures("quick")
def test_predictor_of_an_imported_table_is_not_for_serving(rows: list[LatencyRow], tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    fit_latency_predictor(rows[:60]).save(path)
    assert LatencyPredictor.load(path).about.circumstances is None
    with pytest.raises(UsageError, match="was fitted to an imported table, which may be of any model and device"):
        LatencyPredictor.load(path, expect=CIRCUMSTANCES)


def test_damaged_files(saved: Path) -> None:
    content = saved.read_bytes()
    for length in (0, 5, 200, len(content) - 8):
        saved.write_bytes(content[:length])
        with pytest.raises(UsageError, match="cannot be read as a latency predictor") as caught:
            LatencyPredictor.load(saved)
        assert "\n" not in str(caught.value)
    generator = random.Random(0)
    header = int.from_bytes(content[:8], "little") + 8
    for _ in range(20):
        place = generator.randrange(header, len(content))
        saved.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(UsageError, match="is damaged or was edited"):
            LatencyPredictor.load(saved)
    saved.write_bytes(content.replace(b"emoji-xl", b"emoji-yl"))
    with pytest.raises(UsageError, match="is damaged or was edited"):
        LatencyPredictor.load(saved)
    saved.write_bytes(content)
    LatencyPredictor.load(saved)


@pytest.mark.slow
def test_files_of_other_kinds_are_refused(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(load_file(saved), tmp_path / "other.safetensors")
    with pytest.raises(UsageError, match="is not a latency predictor"):
        LatencyPredictor.load(tmp_path / "other.safetensors")
    with pytest.raises(UsageError, match="there is no such file"):
        LatencyPredictor.load(tmp_path / "none.safetensors")
    with pytest.raises(UsageError, match="cannot be read as a latency predictor"):
        LatencyPredictor.load(tmp_path)
    monkeypatch.setattr("patchedserve.training.latency.file._VERSION", 3)
    with pytest.raises(UsageError, match=r"is of another version of psctl \(version 2\)"):
        LatencyPredictor.load(saved)


def test_predictor_of_a_workspace(predictor: LatencyPredictor, tmp_path: Path) -> None:
    workspace = ModelWorkspace(tmp_path / "emoji-xl" / "cpu")
    with pytest.raises(UsageError, match=r"no latency predictor is in .* make one: psctl profile latency, then psctl"):
        load_workspace_predictor(workspace)
    assert not workspace.root.exists()
    predictor.save(workspace.predictors / "latency.safetensors")
    found = load_workspace_predictor(workspace, expect=CIRCUMSTANCES)
    assert found.step_latency_s([S]) == predictor.step_latency_s([S])
    with pytest.raises(UsageError, match="dtype"):
        load_workspace_predictor(workspace, expect=replace(CIRCUMSTANCES, dtype="bfloat16"))


def test_predicting_imports_neither_torch_nor_scikit_learn(saved: Path) -> None:
    code = (
        "import sys\n"
        "from patchedserve.data.resolution import Resolution\n"
        "from patchedserve.training.latency.predictor import LatencyPredictor\n"
        "from patchedserve.training.latency.online_correction import OnlineCorrection\n"
        f"predictor = OnlineCorrection(LatencyPredictor.load({str(saved)!r}))\n"
        "assert predictor.step_latency_s([Resolution(128, 128)]) > 0\n"
        "sys.exit(sorted({'torch', 'sklearn', 'scipy', 'pandas'} & set(sys.modules)))"
    )
    # An empty list exits with code 1 and is printed, so that the test compares the output.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == "[]\n"


@pytest.mark.slow
def test_timing_measures_single_predictions(fitted: LatencyPredictor, rows: list[LatencyRow]) -> None:
    assert 0 < time_predictions(fitted, rows[:50]) < 1e6


def test_linear_model_is_kept_if_no_worse(tmp_path: Path) -> None:
    """The law is linear with noise: the regression could only learn the noise."""
    generator = random.Random(5)

    def row(row: LatencyRow) -> LatencyRow:
        ms = 10 + 3 * len(row.counts) + sum(count * size.pixels / 4096 for size, count in row.counts.items())
        visits = tuple(ms * math.exp(generator.gauss(0, 0.1)) for _ in range(6))
        return LatencyRow(row.counts, visits, (1.0,) * 6)

    rows = [row(each) for each in law_rows(120)]
    fitted = fit_latency_predictor(rows)
    fit = fitted.about.fit
    assert fit["kept"] == fitted.model.kind == "linear"
    # The best of many is slightly better by chance.
    assert fit["cross_validated_mape"]["linear"] == pytest.approx(fit["cross_validated_mape"]["svr"], rel=0.1)
    # Six visits with noise of 10 %: the median has a standard deviation of 5 % and a mean error of 4 %.
    assert fit["noise_floor"] == pytest.approx(0.037, abs=0.006)
    assert fit["errors"]["linear"]["mape"] <= 1.5 * fit["noise_floor"]
    # The file stores the kind and gives the same predictions.
    fitted.save(tmp_path / "latency.safetensors")
    loaded = LatencyPredictor.load(tmp_path / "latency.safetensors")
    assert loaded.model.kind == "linear"
    assert loaded.step_latency_s([S, M, L]) == fitted.step_latency_s([S, M, L]) > 0
    assert "vectors" not in load_file(tmp_path / "latency.safetensors")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_accuracy_on_small_noisy_tables_is_limited_only_by_noise() -> None:
    """The tables are like a quick profile on a shared machine: 60 combinations with errors of 10 % each."""
    found = []
    for seed in range(6):
        fit = fit_latency_predictor(law_rows(60, noise=0.1, seed=seed), seed=seed).about.fit
        found.append(fit["errors"][fit["kept"]]["mape"])
        assert found[-1] <= fit["errors"]["linear"]["mape"]
    # The noise of the held-out rows contributes 8 %, or 5 to 11 % for the dozen rows of one table.
    assert statistics.fmean(found) <= 0.11
