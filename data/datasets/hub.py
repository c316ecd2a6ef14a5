"""Data sets that the `datasets` package opens: from the hub, or saved by its `save_to_disk`."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..errors import MissingExtraError, RunError, UsageError
from .base import choose_split

DISK_MARKS = ("dataset_info.json", "dataset_dict.json")
"""Files that identify a folder written by `save_to_disk`."""

_ROWS_AT_A_TIME = 256


@dataclass(frozen=True, slots=True)
class ArrowRows:
    """Rows of a `datasets.Dataset` in memory-mapped Arrow files. A location is the number of the row."""

    name: str
    rows_on_disk: Any
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def schema(self) -> pa.Schema:
        """Columns and their Arrow types."""
        return self.rows_on_disk.features.arrow_schema

    def rows(self, columns: Sequence[str], path_of: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (location, row) for all rows. The bytes of images are mapped, and only their paths are read."""
        wanted = [*columns] if path_of is None else [*columns, path_of]
        chosen = self.rows_on_disk.select_columns(wanted).with_format("arrow")
        row = 0
        for batch in chosen.iter(batch_size=_ROWS_AT_A_TIME):
            if path_of is not None:
                paths = pa.chunked_array(
                    [chunk.field("path") for chunk in batch.column(path_of).chunks], type=pa.string()
                )
                batch = batch.drop_columns([path_of]).append_column("path", paths)
            for record in batch.to_pylist():
                yield f"{row:09d}", record
                row += 1

    def cell(self, location: str, column: str) -> Any:
        """Return one value of one row. Safe for several threads."""
        with self._lock:
            table = self.rows_on_disk.select_columns([column]).with_format("arrow")[int(location) : int(location) + 1]
        return table.column(0)[0].as_py()

    def fingerprint(self) -> dict[str, Any]:
        """Return names, sizes and times of the Arrow files, and the number of rows."""
        files = {}
        for cached in self.rows_on_disk.cache_files:
            state = Path(cached["filename"]).stat()
            files[cached["filename"]] = [state.st_size, state.st_mtime_ns]
        return {"name": self.name, "files": files, "rows": len(self.rows_on_disk)}


def rows_from_hub(repository: str, config: str | None, split: str, revision: str | None = None) -> ArrowRows:
    """Download a data set of the hub, or read it from the local cache of `datasets`.

    Raises:
        MissingExtraError: `datasets` is not installed.
        RunError: the data set can neither be reached nor is it in the cache, or it cannot be loaded.
    """
    datasets = _datasets()
    try:
        loaded = datasets.load_dataset(repository, config, split=split, revision=revision)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise RunError(
            f"cannot load the data set {repository} ({config}) from the hub: {reason}; without a connection, give the "
            "path of a local copy"
        ) from error
    chosen = ", ".join(filter(None, (config, split, revision)))
    return ArrowRows(f"{repository} ({chosen})", loaded)


def rows_from_disk(path: Path, split: str | None) -> ArrowRows:
    """Open a data set that `save_to_disk` has written.

    Raises:
        MissingExtraError: `datasets` is not installed.
        UsageError: the data set is damaged, a split must be chosen, or the chosen split does not exist.
    """
    datasets = _datasets()
    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"{path}: cannot open the saved data set: {reason}") from error
    if isinstance(loaded, datasets.DatasetDict):
        name, rows = choose_split(path, {name: (name, rows) for name, rows in loaded.items()}, split)
        return ArrowRows(f"{path} ({name})", rows)
    if split is not None:
        raise UsageError(f"{path}: split is {split!r}, but the saved data set has no splits")
    return ArrowRows(str(path), loaded)


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("datasets", "eval") from error
    return datasets
