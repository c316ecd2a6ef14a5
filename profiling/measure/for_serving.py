"""Step latencies for a run that has none. This module imports torch only to measure: commands import it early."""

from typing import TYPE_CHECKING

from ...data.resolution import Resolution
from ...data.tables.latency import LatencyTable
from ...data.workspace import ModelWorkspace

if TYPE_CHECKING:
    from ...serving.models.served import ServedModel


def measure_latencies(
    model: "ServedModel",
    workspace: ModelWorkspace,
    resolutions: tuple[Resolution, ...],
    *,
    combinations: int,
    max_batch_size: int,
    budget_s: float,
) -> LatencyTable:
    """Profile combinations once each within a budget: the coarse table of a run whose workspace has no step latencies
    (`MeasureLatencies`).

    Raises as `profile_latency`; KeyboardInterrupt also if only a part is measured.
    """
    from .latency import LatencySettings, profile_latency

    settings = LatencySettings(resolutions, combinations, max_batch_size, repeats=1)
    outcome = profile_latency(model, settings, workspace, budget_s=budget_s)
    if outcome.was_interrupted:
        raise KeyboardInterrupt
    return outcome.table
