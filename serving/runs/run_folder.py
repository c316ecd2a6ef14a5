"""Files of a served or simulated run in its folder of the workspace."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ...data.files import write_json
from ...data.tables.schemas import RECORDS, STEPS, write_table
from ..core.request_state import RequestRecord
from ..core.step_row import StepRow


class WriteReport(Protocol):
    """Function that writes the report of a run, such as `profiling.report.html.write_report`."""

    def __call__(
        self,
        run_dir: Path,
        summary: Mapping[str, Any],
        records: Sequence[RequestRecord],
        steps: Sequence[StepRow],
        *,
        images: Sequence[tuple[Path, str]] = (),
    ) -> Path:
        """Write `report.html` into the run's folder, with the images and their captions, and return its path.

        Raises OSError.
        """
        ...


def write_run(
    run_dir: Path,
    records: Sequence[RequestRecord],
    steps: Sequence[StepRow],
    summary: Mapping[str, Any],
    images: Iterable[tuple[Path, str]] = (),
    *,
    write_report: WriteReport | None,
) -> None:
    """Write `records.parquet`, `steps.parquet`, `summary.json` and, unless `write_report` is None, the report with the
    images and their captions. Raises OSError.
    """
    write_table(run_dir / "records.parquet", RECORDS, (record.to_row() for record in records))
    write_table(run_dir / "steps.parquet", STEPS, (row.to_row() for row in steps))
    write_json(run_dir / "summary.json", dict(summary))
    if write_report is not None:
        write_report(run_dir, summary, records, steps, images=list(images))
