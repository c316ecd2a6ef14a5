"""`psctl train-predictor latency`: fit the predictor of step latencies to what was profiled."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...data.errors import UsageError
from ...data.files import require_folder, write_bytes
from ...data.workspace import DEFAULT_WORKSPACE, Workspace
from ..options.common import Device, Json, Model, Quiet, Seed, WorkspaceRoot
from ..output import Output

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...data.tables.latency import LatencyTable

_CV_NAME = "cross_validated_mape"
_NAMES = {"svr": "SVR", "linear": "linear baseline", "pixels": "look-up by pixels"}


def train_predictor_latency(
    table: Annotated[
        Path | None,
        typer.Option(
            "--table",
            help="Table of psctl profile latency, or CSV or parquet with combination and ms. "
            "Default: the newest of the workspace.",
            dir_okay=False,
        ),
    ] = None,
    output_file: Annotated[
        Path | None,
        typer.Option(
            "--output-file", help="Write the predictor here. Default: the workspace's predictors.", dir_okay=False
        ),
    ] = None,
    seed: Seed = 0,
    model: Model = "emoji-xl",
    device: Device = "auto",
    workspace: WorkspaceRoot = Path(DEFAULT_WORKSPACE),
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fit the predictor of step latencies to a table, and say how far it is off on combinations that it has not seen.

    A support vector regression is fitted to 80 % of the combinations and tested on the others. Predictor and plot go to
    the workspace, where serving and simulating find them.

    Examples:

        psctl train-predictor latency

        psctl train-predictor latency --model emoji-3 --seed 1 --json

        psctl train-predictor latency --table h100.csv --output-file h100.safetensors
    """
    out = Output(json=json, quiet=quiet)
    from ...data.tables.latency import TABLE_PATTERN, read_latencies
    from ...training.latency.predictor import PREDICTOR_FILE

    # A table may be of a device that is not here, if its predictor goes somewhere else.
    device_name = _device_name(device) if table is None or output_file is None else device
    part = Workspace(workspace).for_model(model, device_name)
    table_file = part.newest_table(TABLE_PATTERN) if table is None else table.expanduser()
    if table_file is None:
        raise UsageError(
            f"no table of step latencies for {model} on {device_name} is in {workspace}; measure one: "
            f"psctl profile latency --model {model} --device {device_name} --workspace {workspace}"
        )
    measured = read_latencies(table_file)
    if output_file is None:
        _check_owner(measured, table_file, model, device_name)
    if measured.share_done < 1:
        out.warn(
            f"{table_file} is {measured.share_done:.0%} measured; the psctl profile latency that began it goes on there"
        )
    target = part.predictors / PREDICTOR_FILE if output_file is None else output_file.expanduser()
    require_folder(target.absolute().parent)
    with out.status(f"Fitting to {len(measured.rows)} combinations of {table_file} ..."):
        from ...profiling.report.latency_plots import plot_predictions
        from ...training.latency.fitting import fit_latency_predictor, time_predictions

        predictor = fit_latency_predictor(measured.rows, seed=seed, circumstances=measured.circumstances)
    predictor.save(target)
    plot_file = target.with_suffix(".png")
    write_bytes(plot_file, plot_predictions(measured, predictor))
    result = {
        **predictor.about.to_json(),
        "prediction_us": time_predictions(predictor, measured.rows),
        "table": str(table_file),
        "predictor": str(target),
        "plot": str(plot_file),
    }
    out.data(result, table=lambda: _table(result))
    out.note(f"Predictor: {target}")
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


def _table(result: dict[str, Any]) -> "RenderableType":
    from rich.table import Table

    from ...profiling.machine import describe

    fit = result["fit"]
    title = "imported table" if result["circumstances"] is None else describe(result["circumstances"])
    parameters = ", ".join(f"{name} {value:g}" for name, value in fit["parameters"].items() if name != _CV_NAME)
    caption = (
        f"fitted to {fit['num_train']} combinations, errors on {len(fit['held_out'])} others; SVR of log ms: "
        f"{parameters}, {fit['num_support_vectors']} support vectors; one prediction takes "
        f"{result['prediction_us']:.0f} us"
    )
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    table.add_column("held out")
    for name in ("MAPE", "R2", "MSE"):
        table.add_column(name, justify="right")
    for name, label in _NAMES.items():
        errors = fit["errors"][name]
        r2 = "-" if errors["r2"] is None else f"{errors['r2']:.4f}"
        table.add_row(label, f"{errors['mape']:.2%}", r2, f"{errors['mse_ms2']:.3g} ms2")
    return table
