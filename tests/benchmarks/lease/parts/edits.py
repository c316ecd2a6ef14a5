"""Steps of four edits that read records, with and without graphs, of one template and of four."""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from patchedserve.profiling.steps.sides import patched_stepper
from patchedserve.serving.models.build import with_engine
from patchedserve.serving.options import EngineOptions
from patchedserve.tests.benchmarks.bench_edit_steps import EditBench, edit_points

from ..context import Context, Row

_SHARE = 0.1
_MEMORY_MB = 40_000.0
"""Limit on records in memory; four records of four steps at 1024 px have 23 GB."""
_IN_MEMORY = Path("/dev/shm")


def edits(context: Context) -> Iterator[Row]:
    """Yield a row for each number of templates, with graphs first."""
    with tempfile.TemporaryDirectory(dir=_folder()) as folder:
        yield from context.measured(
            (
                f"{count} template{'s' * (count > 1)}, {'graphs' if is_recorded else 'eager'}",
                partial(_point, context, Path(folder), count, is_recorded),
            )
            for is_recorded in (True, False)
            for count in context.scale.templates
        )


def _point(context: Context, folder: Path, num_templates: int, is_recorded: bool) -> Row:
    model, scale = with_engine(context.model, EngineOptions(cuda_graphs=False)), context.scale
    if is_recorded:
        patched_stepper(model).model.use_graphs(context.make_recorder(context.device), patience=1)
    bench = EditBench(scale.edit_side, scale.edit_batch, [_SHARE], num_templates, repeats=max(2, scale.repeats // 2))
    (point,) = edit_points(model, bench, folder, _MEMORY_MB)
    found = asdict(point)
    times = {
        f"{name.removesuffix('_s')}_ms": value and value * 1e3 for name, value in found.items() if name[-2:] == "_s"
    }
    about = {"templates": num_templates, "is_recorded": is_recorded, "side": scale.edit_side, "batch": scale.edit_batch}
    about["recording_failure"] = patched_stepper(model).recording_failure
    return about | {"active_share": point.active_share, "ratio": point.ratio} | times


def _folder() -> Path | None:
    """Return the folder for records: in memory if it has room, because the disk of a borrowed machine may be slow."""
    has_room = _IN_MEMORY.is_dir() and shutil.disk_usage(_IN_MEMORY).free > _MEMORY_MB * 1e6
    return _IN_MEMORY if has_room else None
