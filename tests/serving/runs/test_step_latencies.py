"""Step latencies of runs that name no table."""

from pathlib import Path

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.resolution import Resolution, parse_list
from patchedserve.data.tables.latency import LatencyRow, LatencyTable, read_latencies, write_latencies
from patchedserve.data.workspace import Workspace
from patchedserve.profiling.measure.for_serving import measure_latencies
from patchedserve.profiling.measure.latency import LatencySettings
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.runs.step_latencies import latencies_for_serving, table_for_simulation

from ...support.tiny_models import save_tiny, tiny_sdxl

SIZES = tuple(parse_list("32,48"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return load_model(str(save_tiny(tmp_path_factory.mktemp("models") / "tiny", tiny_sdxl())), "cpu", "float32")


@pytest.mark.slow
def test_coarse_table_is_measured_once_and_saved(model: ServedModel, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path).for_model(model.name, "cpu")
    notes: list[str] = []
    warnings: list[str] = []

    def latencies(*sizes: Resolution) -> object:
        return latencies_for_serving(
            model, workspace, sizes, 3, measure=measure_latencies, on_note=notes.append, on_warning=warnings.append
        )

    first = latencies(*SIZES)
    assert len(notes) == 1
    assert "measuring a coarse table, at most 20 s" in notes[0]
    (file,) = workspace.tables.glob("latency-*.parquet")
    assert {1, 3} <= {row.num_requests for row in read_latencies(file).rows}
    again = latencies(*SIZES[::-1])
    assert notes[1:] == [f"Step latencies: {file}"]
    for batch in ((SIZES[0],), (SIZES[0], SIZES[1])):
        assert first.step_latency_s(batch) == again.step_latency_s(batch) > 0  # type: ignore[attr-defined]
    # The table lacks another size, which is measured; the old table stays.
    latencies(Resolution(64, 64))
    assert "measuring a coarse table" in notes[2]
    assert len(list(workspace.tables.glob("latency-*.parquet"))) == 2
    assert all("while the table was measured" in warning for warning in warnings), "others may run beside the tests"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_mismatched_predictor_is_reported_and_skipped(model: ServedModel, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path).for_model(model.name, "cpu")
    (workspace.predictors / "latency.safetensors").write_bytes(b"no predictor")
    notes: list[str] = []
    latencies_for_serving(
        model, workspace, SIZES, 2, measure=measure_latencies, on_note=notes.append, on_warning=notes.append
    )
    assert notes[0].startswith("The workspace's latency predictor is not used: ")
    assert "measuring a coarse table" in notes[1]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_time_budget_ends_the_profile_after_the_required_minimum(model: ServedModel, tmp_path: Path) -> None:
    from patchedserve.profiling.measure.latency import profile_latency

    workspace = Workspace(tmp_path).for_model(model.name, "cpu")
    settings = LatencySettings(SIZES, 16, 4, repeats=1)
    table = profile_latency(model, settings, workspace, budget_s=0.0).table
    assert [row.counts for row in table.rows] == [{SIZES[0]: 1}, {SIZES[1]: 1}, {SIZES[0]: 4}]


def test_simulations_use_the_newest_table_with_all_sizes(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    small, large = SIZES
    notes: list[str] = []
    for device, sizes in (("cpu", (small,)), ("cuda:0", (small, large))):
        rows = tuple(LatencyRow({size: count}, (10.0 * count,), ()) for size in sizes for count in (1, 2))
        write_latencies(workspace.for_model("some/model", device).tables / "latency-1.parquet", LatencyTable(rows))
    for sizes, device in (([small], "cpu"), ([large, small], "cuda-0")):
        table = table_for_simulation(workspace, "some/model", sizes, on_note=notes.append)
        assert table.parts[-3:-1] == (device, "tables")
    with pytest.raises(UsageError, match=r"no table of step latencies has 96x96 for some/model, .* \(--latency\)"):
        table_for_simulation(workspace, "some/model", [Resolution(96, 96)], on_note=notes.append)
    with pytest.raises(UsageError, match="no table of step latencies has"):
        table_for_simulation(workspace, "another/model", [small], on_note=notes.append)
    assert [note.startswith("Step latencies: ") for note in notes] == [True, True]
