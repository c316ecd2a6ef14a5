"""Predictions outside the profile: they are made, warned of once, and counted. This module imports no torch."""

from collections.abc import Callable, Mapping
from pathlib import Path

from ...training.latency.online_correction import OnlineCorrection
from ...training.latency.predictor import LatencyPredictor
from ..editing.step_latency import EditStepLatency
from ..scheduling.policies import StepLatencyPredictor
from ..scheduling.step_latency import TableLatency


def predictions_outside(predictor: object, before: Mapping[str, int] | None = None) -> dict[str, int] | None:
    """Return the number of predictions of a run that a step latency predictor made outside its profile. The engine
    requests a prediction each time, the simulator once for every batch.

    Args:
        predictor: a latency predictor or a table, possibly wrapped in an `OnlineCorrection` or an `EditStepLatency`.
        before: value that this function returned before the run; None if the predictor was new.

    Returns:
        `too_large`: number of batches with more requests than any profiled one. `between`: number of batches with
        resolutions between the profiled ones, which a table refuses. None for a predictor without a profile.
    """
    if isinstance(predictor, OnlineCorrection):
        predictor = predictor.predictor
    if isinstance(predictor, EditStepLatency):
        predictor = predictor.whole
    if isinstance(predictor, LatencyPredictor):
        found = {"too_large": predictor.num_too_large, "between": predictor.num_between}
    elif isinstance(predictor, TableLatency):
        found = {"too_large": predictor.num_too_large, "between": 0}
    else:
        return None
    return {name: count - (before or {}).get(name, 0) for name, count in found.items()}


def warn_of_small_table(
    predictor: StepLatencyPredictor, path: Path, max_batch_size: int, on_warning: Callable[[str], None]
) -> None:
    """Warn that batches may be larger than any in a latency table. A fitted predictor warns when it is called."""
    if isinstance(predictor, TableLatency) and max_batch_size > predictor.max_batch_size:
        on_warning(
            f"--max-batch-size is {max_batch_size}, but the largest batch in {path} has {predictor.max_batch_size}: "
            "beyond it latencies are extrapolated"
        )
