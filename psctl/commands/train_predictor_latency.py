"""`psctl train-predictor latency`: fit the predictor of step latencies to what was profiled."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...data.errors import UsageError
from ...data.files import require_folder, write_bytes
from ..flags import flag
from ..options.common import Seed
from ..options.target import WHERE, Target
from ..output import Output

if TYPE_CHECKING:
    from ...data.tables.latency import LatencyTable

_FIT_S = 0.02
"""About what fitting takes for each combination, on one core."""


def train_predictor_latency(
    *,
    table: Annotated[
        Path | None,
        flag(
            "--table",
            "Table of psctl profile latency, or CSV or parquet with combination and ms. Default: the newest of the "
            "workspace.",
            dir_okay=False,
        ),
    ] = None,
    output_file: Annotated[
        Path | None,
        flag("--output-file", "Write the predictor here. Default: the workspace's predictors.", dir_okay=False),
    ] = None,
    seed: Seed = 0,
    target: Annotated[Target, WHERE.without("dtype")],
    out: Output,
) -> None:
    """Fit the predictor of step latencies to a table, and say how far it is off on combinations that it has not seen.

    A support vector regression is fitted to 80 % of the combinations and tested on the others. Predictor and plot go to
    the workspace, where serving and simulating find them.

    Examples:

        psctl train-predictor latency
        psctl train-predictor latency --model emoji-3 --seed 1 --json
        psctl train-predictor latency --table h100.csv --output-file h100.safetensors
    """
    from ...data.tables.latency import TABLE_PATTERN, read_latencies
    from ...training.latency.predictor import PREDICTOR_FILE

    # A table may be of a device that is not here, if its predictor goes somewhere else.
    device_name = _device_name(target.device) if table is None or output_file is None else target.device
    part = target.root.for_model(target.model, device_name)
    table_file = part.newest_table(TABLE_PATTERN) if table is None else table
    if table_file is None:
        raise UsageError(
            f"no table of step latencies for {target.model} on {device_name} is in {target.workspace}; measure one: "
            f"psctl profile latency --model {target.model} --device {device_name} --workspace {target.workspace}"
        )
    measured = read_latencies(table_file)
    if output_file is None:
        _check_owner(measured, table_file, target.model, device_name)
    if measured.share_done < 1:
        out.warn(
            f"{table_file} is {measured.share_done:.0%} measured; the psctl profile latency command that began it will "
            "finish it"
        )
    place = part.predictors / PREDICTOR_FILE if output_file is None else output_file
    require_folder(place.absolute().parent)
    from ...profiling.report.latency_plots import plot_predictions
    from ...profiling.report.tables import latency_training_table
    from ...training.latency.fitting import fit_latency_predictor, time_predictions

    with out.phases() as start:
        fitted = start(f"combinations of {table_file}", len(measured.rows), expected_s=len(measured.rows) * _FIT_S)
        predictor = fit_latency_predictor(measured.rows, seed=seed, circumstances=measured.circumstances)
        fitted(len(measured.rows))
    predictor.save(place)
    plot_file = place.with_suffix(".png")
    write_bytes(plot_file, plot_predictions(measured, predictor))
    result = {
        **predictor.about.to_json(),
        "prediction_us": time_predictions(predictor, measured.rows),
        "table": str(table_file),
        "predictor": str(place),
        "plot": str(plot_file),
    }
    out.data(result, table=lambda: latency_training_table(result).to_rich())
    out.note(f"Predictor: {place}")
    out.note(f"Plot: {plot_file}")


def _device_name(device: str) -> str:
    """The device as loaded models name it, which names its part of the workspace."""
    from ...serving.models.loading import resolve_device

    resolved = resolve_device(device)
    return "cpu" if resolved.type == "cpu" else f"{resolved.type}:{resolved.index or 0}"


def _check_owner(measured: "LatencyTable", table_file: Path, model: str, device_name: str) -> None:
    """Raise UsageError unless the table was measured for this part of the workspace."""
    owner = measured.circumstances
    if owner is None:
        raise UsageError(
            f"{table_file} does not say which model and device it is of; give --output-file for its predictor"
        )
    if (owner.model, owner.device) != (model, device_name):
        raise UsageError(
            f"{table_file} is of {owner.model} on {owner.device}, not of {model} on {device_name}; give "
            f"--model {owner.model} --device {owner.device}, or --output-file for its predictor"
        )
