"""Folder of a cascade's run, simulated or served: records, legs, plans, summary and report. This module imports no
torch.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ....data.files import write_json
from ....data.tables.cascade import LEGS as LEGS_TABLE
from ....data.tables.cascade import PLANS
from ....data.tables.schemas import RECORDS, write_table
from ...cascade.legs import Leg, LegSpec, cascade_name
from ...cascade.result import CascadeResult
from ...core.metrics import summarize
from .deployment import CascadeDeployment, CascadeRun

WriteCascadeReport = Callable[[Path, Mapping[str, Any], CascadeResult], Path]
"""Writes the report of a run with this summary into its folder, and returns the report's path."""


def cascade_summary(
    run: CascadeRun,
    deployment: CascadeDeployment,
    specs: Mapping[Leg, LegSpec],
    *,
    dataset: str,
    config: Mapping[str, Any],
    quality: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the figures of a run: those of any served run, and those specific to a cascade."""
    records = run.result.records
    duration_s = max(record.finish_s or 0.0 for record in records)
    return {
        **summarize(records, duration_s, slo_scale=deployment.slo_scale, model=cascade_name(specs), dataset=dataset),
        **run.figures(),
        "quality": None if quality is None else dict(quality),
        "num_workers": deployment.num_workers,
        "was_interrupted": False,
        "config": dict(config),
    }


def write_cascade_run(
    run_dir: Path,
    run: CascadeRun,
    specs: Mapping[Leg, LegSpec],
    summary: dict[str, Any],
    write_report: WriteCascadeReport,
) -> Path:
    """Write records, legs, plans, summary and report into a run's folder. Returns the report's path. Raises OSError."""
    result = run.result
    summary["run_dir"] = str(run_dir)
    write_table(run_dir / "records.parquet", RECORDS, (record.to_row() for record in result.records))
    write_table(run_dir / "legs.parquet", LEGS_TABLE, _leg_rows(result, specs))
    write_table(run_dir / "plans.parquet", PLANS, _plan_rows(result))
    write_json(run_dir / "summary.json", summary)
    return write_report(run_dir, summary, result)


def _leg_rows(result: CascadeResult, specs: Mapping[Leg, LegSpec]) -> list[dict[str, Any]]:
    """Return the rows of the table LEGS."""
    return [
        {
            "request_id": row.request_id,
            "leg": row.leg,
            "model": str(specs[row.leg]),
            "worker": row.worker,
            "start_s": row.start_s,
            "end_s": row.end_s,
            "status": row.status,
            "confidence": None if row.confidence is None or math.isnan(row.confidence) else row.confidence,
            "threshold": row.threshold,
            "is_deferred": row.is_deferred,
        }
        for row in result.legs
    ]


def _plan_rows(result: CascadeResult) -> list[dict[str, Any]]:
    """Return the rows of the table PLANS."""
    return [
        {
            "start_s": row.start_s,
            "demand": row.observed.demand,
            "light_queue": row.observed.light_queue,
            "heavy_queue": row.observed.heavy_queue,
            "light_workers": row.plan.num_light,
            "heavy_workers": row.plan.num_heavy,
            "light_batch": row.plan.light_batch,
            "heavy_batch": row.plan.heavy_batch,
            "threshold": row.plan.threshold,
            "share": row.plan.share,
            "status": row.plan.status,
            "solve_s": row.solve_s,
        }
        for row in result.plans
    ]
