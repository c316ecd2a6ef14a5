"""`psctl train-predictor latency|cache`: trains the predictors of the scheduler and the cache."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from ...data.errors import RunError, UsageError
from ...data.files import require_folder, write_bytes
from ...serving.cache.options import CacheOptions
from ..flags import flag
from ..options.common import Seed
from ..options.groups import CACHE
from ..options.target import WHERE, Target
from ..output import Output

if TYPE_CHECKING:
    from ...data.tables.latency import LatencyTable

_FIT_S = 0.02
"""Approximate time to fit one combination on one core."""
_TREE_S = 4e-6
"""Approximate time of a tree for each training row, including the evaluation on held-out rows."""


def train_predictor_latency(
    *,
    table: Annotated[
        Path | None,
        flag(
            "--table",
            "Table of psctl profile latency, or CSV or parquet with the columns combination and ms. Default: the "
            "newest in the workspace.",
            dir_okay=False,
        ),
    ] = None,
    output_file: Annotated[
        Path | None,
        flag("--output-file", "File of the predictor. Default: in the workspace's predictors.", dir_okay=False),
    ] = None,
    force: Annotated[bool, flag("--force", "Save the predictor even if its error is large.")] = False,
    seed: Seed = 0,
    target: Annotated[Target, WHERE.without("dtype")],
    out: Output,
) -> None:
    """Fit the predictor of step latencies to a table, and report its error on held-out combinations.

    A support vector regression on top of a linear model is fitted to 80 % of the combinations and tested on the others;
    if it does not help, the linear model alone is kept. The report includes the noise floor, the table's own error.
    Predictor and plot are written to the workspace, where serve and simulate find them. A predictor with an error above
    25 %, or above that of a look-up by pixels, is saved only with --force.

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
    from ...training.latency.fitting import fit_latency_predictor, time_predictions, why_unfit

    with out.phases() as start:
        fitted = start(f"combinations of {table_file}", len(measured.rows), expected_s=len(measured.rows) * _FIT_S)
        predictor = fit_latency_predictor(measured.rows, seed=seed, circumstances=measured.circumstances)
        fitted(len(measured.rows))
    if (reason := why_unfit(predictor.about.fit)) is not None:
        if not force:
            raise RunError(
                f"the predictor is not saved: {reason}; measure the table again while nothing else runs (psctl profile "
                "latency), or save it all the same with --force"
            )
        out.warn(f"the predictor is saved all the same: {reason}")
    predictor.save(place)
    plot_file = place.with_suffix(".png")
    write_bytes(plot_file, plot_predictions(measured, predictor))
    result = {
        **predictor.about.to_json(),
        "kind": predictor.model.kind,
        "prediction_us": time_predictions(predictor, measured.rows),
        "table": str(table_file),
        "predictor": str(place),
        "plot": str(plot_file),
    }
    out.data(result, table=lambda: latency_training_table(result).to_rich())
    out.note(f"Predictor: {place}")
    out.note(f"Plot: {plot_file}")


def _device_name(device: str) -> str:
    """Return the device's name in the form of loaded models, which names its part of the workspace."""
    from ...serving.models.placement import resolve_device

    return str(resolve_device(device))


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


def train_predictor_cache(
    *,
    table: Annotated[
        Path | None,
        flag(
            "--table",
            "Block profile to train on. Default: tables/blocks.parquet of the model's workspace.",
            dir_okay=False,
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        flag(
            "--threshold",
            "Largest mean square error of a cached output, divided by its mean square, at which it may be used. "
            "Default: 0.2, or the best of several with --target-ssim.",
        ),
    ] = None,
    target_ssim: Annotated[
        float | None,
        flag(
            "--target-ssim",
            "Draw images, and choose the threshold and confidence that save most at this mean SSIM to images without "
            "a cache.",
            show_default=False,
        ),
    ] = None,
    target_prompts: Annotated[
        int, flag("--target-prompts", "Number of requests that are drawn for each choice.", min=2)
    ] = 24,
    cache: Annotated[CacheOptions, CACHE.only("max_reuse", "warmup_steps").fixing(mode="patch", threshold=0.0)],
    trees: Annotated[int, flag("--trees", "Number of trees.", min=1, max=128)] = 16,
    depth: Annotated[int, flag("--depth", "Maximum depth of a tree.", min=1, max=16)] = 8,
    min_confidence: Annotated[
        float, flag("--min-confidence", "Vote above which the cached output is used.", min=0, max=1)
    ] = 0.5,
    max_rows: Annotated[
        int, flag("--max-rows", "Approximate maximum number of rows; larger profiles are sampled at random.", min=100)
    ] = 400_000,
    backend: Annotated[
        Literal["sklearn", "cuml"], flag("--backend", "Library that trains the forest; cuml needs a GPU.")
    ] = "sklearn",
    output_file: Annotated[
        Path | None,
        flag(
            "--output-file",
            "File of the predictor. Default: predictors/cache.safetensors in the model's workspace.",
            dir_okay=False,
        ),
    ] = None,
    seed: Seed = 0,
    target: Annotated[Target, WHERE.without("dtype")],
    out: Output,
) -> None:
    """Train the cache predictor on a block profile, and evaluate it on held-out requests.

    The predictor is a random forest that predicts whether the output of a block stays within the threshold. It is
    compared with the best plain threshold on the change of the input. A plot is saved next to the predictor.
    --target-ssim measures the effect of the threshold on images of requests outside the training set.

    Examples:

        psctl train-predictor cache
        psctl train-predictor cache --threshold 0.01 --min-confidence 0.7
        psctl train-predictor cache --target-ssim 0.97
        psctl train-predictor cache --model emoji-3 --threshold 0.05 --output-file cache-0.05.safetensors --json
    """
    # What was given is looked at before anything is read, and torch is imported for the first time here.
    from ...eval.cache.target import TargetSettings, train_to_target
    from ...serving.cache.options import CACHE_PREDICTOR_FILE
    from ...serving.models.placement import resolve_device
    from ...training.cache.fitting import FitSettings, fit_cache_predictor, require_backend
    from ...training.cache.samples import load_samples

    settings = FitSettings(
        threshold=FitSettings().threshold if threshold is None else threshold,
        trees=trees,
        depth=depth,
        min_confidence=min_confidence,
        seed=seed,
        backend=backend,
    )
    wanted = None
    if target_ssim is not None:
        wanted = TargetSettings(target_ssim, target_prompts, () if threshold is None else (threshold,))
    require_backend(backend)
    place = target.root.for_model(target.model, str(resolve_device(target.device)))
    table = place.root / "tables" / "blocks.parquet" if table is None else table
    if not table.is_file():
        raise UsageError(
            f"there is no block profile {table}; make one with: psctl profile blocks --model {target.model}"
        )
    file = output_file or place.root / "predictors" / CACHE_PREDICTOR_FILE
    require_folder(file.absolute().parent)
    with out.status(f"Reading {table} ..."):
        facts, samples = load_samples(table, max_rows=max_rows, seed=seed, max_lag=cache.max_reuse)
    if output_file is None and facts.model != target.model:
        raise UsageError(
            f"{table} is a profile of {facts.model}; train its predictor with --model {facts.model}, "
            "or say with --output-file where it is to go"
        )
    if wanted is not None:
        served, _ = target.load(out)
        facts.check_fits(served.block_facts(facts.patch_size), source=str(table))
        with out.phases() as start:
            advance = start("draws at most", wanted.max_draws)

            def on_draw(label: str) -> None:
                advance.show(label)
                advance()

            predictor = train_to_target(served, samples, facts, settings, cache, place, wanted, on_draw=on_draw)
    else:
        with out.phases() as start:
            trained = start("rows to train on", len(samples), expected_s=len(samples) * trees * _TREE_S)
            predictor = fit_cache_predictor(samples, facts, settings)
            trained(len(samples))
    predictor.save(file)
    from ...profiling.report.cache_plots import plot_cache_training
    from ...profiling.report.tables import cache_training_table

    report = dict(predictor.report)
    plot = file.with_suffix(".png")
    write_bytes(plot, plot_cache_training(report, facts.model))
    result = {
        "predictor": file,
        "plot": plot,
        **facts.to_json(),
        "max_lag": predictor.max_lag,
        **{name: value for name, value in report.items() if name != "curve"},
    }
    out.data(result, table=lambda: cache_training_table(result).to_rich())
    out.note(f"Predictor: {file}, plot: {plot}")
