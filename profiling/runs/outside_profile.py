"""Predictions beyond what was profiled: they are made, warned of once, and counted. No torch."""

from collections.abc import Callable, Mapping
from pathlib import Path

from ...serving.editing.step_latency import EditStepLatency
from ...serving.scheduling.policies import StepLatencyPredictor
from ...serving.scheduling.step_latency import TableLatency
from ...training.latency.online_correction import OnlineCorrection
from ...training.latency.predictor import LatencyPredictor


def predictions_outside(predictor: object, before: Mapping[str, int] | None = None) -> dict[str, int] | None:
    """How many questions of a run a predictor of step latencies has answered by more than what was profiled. The engine
    asks anew each time, the simulator once about every batch.

    Args:
        predictor: a latency predictor or a table, perhaps within an `OnlineCorrection`, and beside a line for edits.
        before: what this function returned before the run; None: the predictor was new.

    Returns:
        `too_large`: batches with more requests than were profiled; `between`: with resolutions between the profiled
        ones, which a table refuses. None for a predictor that knows of no profile.
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
    """Say that batches may be larger than all of a latency table; a fitted predictor says so when it is asked."""
    if isinstance(predictor, TableLatency) and max_batch_size > predictor.max_batch_size:
        on_warning(
            f"--max-batch-size is {max_batch_size}, but the largest batch in {path} has {predictor.max_batch_size}: "
            "beyond it latencies are extrapolated"
        )
