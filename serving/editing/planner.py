"""Load plans for batches of edits, from passes measured at the start (InstGenIE sections 4.2 and 4.4)."""

import math
from collections.abc import Sequence

from ...data.templates import LoadPlan
from ...data.work import Work
from ..patched.part_times import MeasuredPass
from .plan import PLANS, ReusePlan, UnitTimes, latency_of, optimal_plan
from .step_latency import fitted_line, on_line, terms_of


class LoadPlanner:
    """Plans which parts of a batch of edits load their records.

    The record of a step is loaded while the previous step is computed, so plans are made for loads that begin in the
    previous pass. Only the paper's algorithm assumes that loads begin with the pass.

    Args:
        measured: measured passes of one model, at least one.
        plan: name of the plan.
        link_mbps: megabytes per second at which records are read.
        returns: see `MaskedPasses`.
    """

    def __init__(self, measured: Sequence[MeasuredPass], plan: LoadPlan, link_mbps: float, *, returns: bool) -> None:
        self._plan: LoadPlan = plan
        self._bytes_per_s, self._returns = link_mbps * 1e6, returns
        self._bytes_per_cell = measured[0].bytes_per_cell
        works = [[Work(each.width, each.height, each.active_share)] * each.rows for each in measured]
        self._whole, self._active = (
            [fitted_line(terms, part_s) for part_s in zip(*times_s, strict=True)]
            for terms, times_s in (
                ([terms_of(_whole(rows)) for rows in works], [each.whole_s for each in measured]),
                ([terms_of(rows) for rows in works], [each.active_s for each in measured]),
            )
        )

    def units(self, rows: Sequence[Work], num_cells: int) -> list[UnitTimes]:
        """Return the predicted times of each part of a pass.

        Args:
            rows: computed work of each row.
            num_cells: number of loaded cells over all rows; rows that read the same cells count once.
        """
        whole, active = terms_of(_whole(rows)), terms_of(rows)
        return_s = 0.0 if self._returns else math.inf
        found = []
        for of_all, of_active, num_bytes in zip(self._whole, self._active, self._bytes_per_cell, strict=True):
            load_s = num_bytes * num_cells / self._bytes_per_s
            found.append(UnitTimes(on_line(of_all, whole), on_line(of_active, active), load_s, return_s))
        return found

    def plan(self, rows: Sequence[Work], num_cells: int) -> ReusePlan:
        """Return which parts reuse, and the expected latency of consecutive passes. Takes the arguments of `units`."""
        units = self.units(rows, num_cells)
        if self._plan == "optimal":
            return optimal_plan(units, is_ahead=True)
        reuses = PLANS[self._plan](units).reuses
        return ReusePlan(reuses, latency_of(units, reuses, is_ahead=True))


def _whole(rows: Sequence[Work]) -> list[Work]:
    return [Work(row.width, row.height, 1.0) for row in rows]
