"""Coarse step latencies for a run that has none. Torch is imported only to measure, as commands import this early."""

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...data.resolution import Resolution
from ...data.tables.latency import LatencyTable
from ...data.workspace import ModelWorkspace
from ...serving.runs.step_latencies import COARSE_BUDGET_S, COARSE_COMBINATIONS

if TYPE_CHECKING:
    from ...serving.models.served import ServedModel


def measure_latencies(
    model: "ServedModel",
    workspace: ModelWorkspace,
    resolutions: tuple[Resolution, ...],
    max_batch_size: int,
    *,
    budget_s: float = COARSE_BUDGET_S,
    remeasure: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> LatencyTable:
    """Profile a few combinations of requests once each, keep the table in the workspace, and return it.

    Args:
        model, workspace: the loaded model, and its workspace.
        resolutions: resolutions of the requests.
        max_batch_size: largest batch.
        budget_s: seconds after which no further combination is measured, once there are the smallest.
        remeasure: discard the measurements in the table.
        on_progress: called with the number of measured combinations, and that of all.

    Raises as `profile_latency`; KeyboardInterrupt also if only a part is measured.
    """
    from .latency import LatencySettings, profile_latency

    settings = LatencySettings(resolutions, COARSE_COMBINATIONS, max_batch_size, repeats=1)
    done = itertools.count(1)
    num_all = len(settings.drawn())
    outcome = profile_latency(
        model,
        settings,
        workspace,
        budget_s=budget_s,
        remeasure=remeasure,
        on_visit=lambda: on_progress(next(done), num_all),
    )
    if outcome.was_interrupted:
        raise KeyboardInterrupt
    return outcome.table
