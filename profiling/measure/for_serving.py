"""Coarse step latencies for a run that has none. Torch is imported only to measure, as commands import this early."""

from typing import TYPE_CHECKING

from ...data.resolution import Resolution
from ...data.tables.latency import LatencyTable
from ...data.workspace import ModelWorkspace
from ...serving.runs.step_latencies import COARSE_BUDGET_S, COARSE_COMBINATIONS

if TYPE_CHECKING:
    from ...serving.models.served import ServedModel


def measure_latencies(
    model: "ServedModel", workspace: ModelWorkspace, resolutions: tuple[Resolution, ...], max_batch_size: int
) -> LatencyTable:
    """Profile a few combinations of requests once each, keep the table in the workspace, and return it.

    Raises as `profile_latency`; KeyboardInterrupt also if only a part is measured.
    """
    from .latency import LatencySettings, profile_latency

    settings = LatencySettings(resolutions, COARSE_COMBINATIONS, max_batch_size, repeats=1)
    outcome = profile_latency(model, settings, workspace, budget_s=COARSE_BUDGET_S)
    if outcome.was_interrupted:
        raise KeyboardInterrupt
    return outcome.table
