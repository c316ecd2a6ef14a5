"""Files of a served or simulated run in its folder of the workspace."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...data.files import write_json
from ...data.tables.schemas import RECORDS, STEPS, write_table
from ...serving.core.request_state import RequestRecord
from ...serving.core.step_row import StepRow


def write_run(
    run_dir: Path,
    records: Sequence[RequestRecord],
    steps: Sequence[StepRow],
    summary: Mapping[str, Any],
    images: Iterable[tuple[Path, str]] = (),
    *,
    with_report: bool = True,
) -> Path:
    """Write `records.parquet`, `steps.parquet`, `summary.json` and, if `with_report`, `report.html` with the images and
    their captions. Returns the report's path. Raises OSError.
    """
    write_table(run_dir / "records.parquet", RECORDS, (record.to_row() for record in records))
    write_table(run_dir / "steps.parquet", STEPS, (row.to_row() for row in steps))
    write_json(run_dir / "summary.json", dict(summary))
    if with_report:
        from ..report.html import write_report

        write_report(run_dir, summary, records, steps, images=list(images))
    return run_dir / "report.html"
