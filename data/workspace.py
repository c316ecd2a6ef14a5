"""Workspace: one folder in which commands store, per model and device, files that other commands use.

<root>/<model>/<device>/tables/       measured tables, such as standalone latencies
<root>/<model>/<device>/predictors/   fitted predictors
<root>/<model>/<device>/templates/<id>/   records of images that edits read
<root>/<model>/<device>/runs/<kind>-<UTC time>/   the output of one run
"""

import hashlib
import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from .errors import UsageError

DEFAULT_WORKSPACE = "psctl-workspace"

_KIND = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_RUN_NAME = re.compile(r"(?P<kind>.+)-(?P<stamp>\d{8}T\d{6}Z)(-(?P<number>\d+))?")
_MAX_SLUG = 100


@dataclass(frozen=True, slots=True)
class Workspace:
    """Root folder of a workspace; nothing is created until something is stored."""

    root: Path

    def __init__(self, root: str | os.PathLike[str] = DEFAULT_WORKSPACE) -> None:
        if not os.fspath(root):
            raise UsageError("the workspace path is empty; give the path of a folder")
        object.__setattr__(self, "root", Path(root).expanduser())

    def for_model(self, model_name: str, device: str) -> "ModelWorkspace":
        """Return the part of one model (bundled name, path or hub id) on one device ("cpu", "cuda:0").

        Raises UsageError if either is empty.
        """
        return ModelWorkspace(self.root / _slug(model_name, "model name") / _slug(device.replace(":", "-"), "device"))


@dataclass(frozen=True, slots=True)
class ModelWorkspace:
    """Part of a workspace that belongs to one model on one device."""

    root: Path

    @property
    def tables(self) -> Path:
        """Folder of measured tables, created on first access. Raises OSError."""
        return self._folder("tables")

    @property
    def predictors(self) -> Path:
        """Folder of fitted predictors, created on first access. Raises OSError."""
        return self._folder("predictors")

    @property
    def runs(self) -> Path:
        """Folder of runs, created on first access. Raises OSError."""
        return self._folder("runs")

    @property
    def templates(self) -> Path:
        """Folder of the records of templates. Creates nothing."""
        return self.root / "templates"

    def newest_table(self, pattern: str) -> Path | None:
        """Return the table whose file name fits a pattern (`latency-*.parquet`) and that was written last, or None.

        Creates nothing.
        """
        return next(iter(self.newest_tables(pattern)), None)

    def newest_tables(self, pattern: str) -> list[Path]:
        """Return all tables whose file names fit a pattern, the newest first."""
        found = [path for path in (self.root / "tables").glob(pattern) if path.is_file()]
        return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)

    def find_predictor(self, name: str) -> Path | None:
        """Return the file of a fitted predictor, or None if there is none. Creates nothing."""
        path = self.root / "predictors" / name
        return path if path.is_file() else None

    def new_run(self, kind: str) -> Path:
        """Create and return the folder of a new run, `runs/<kind>-<UTC time>`, for example `serve-20260131T094500Z`.

        Runs that start within one second, also in other processes, get `-2`, `-3` and so on at the end.

        Raises:
            UsageError: if `kind` is anything but lower-case words with hyphens between.
            OSError: if the folder cannot be created.
        """
        _check_kind(kind)
        name = f"{kind}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        number = 1
        while True:
            folder = self.runs / (name if number == 1 else f"{name}-{number}")
            try:
                # mkdir is atomic, so two processes cannot both take the same name.
                folder.mkdir()
            except FileExistsError:
                number += 1
            else:
                return folder

    def latest_run(self, kind: str, containing: str | None = None) -> Path | None:
        """Return the newest run of a kind, or None if there is none. Creates nothing.

        Args:
            kind: as given to `new_run`.
            containing: a file name that the run must hold; name the file that a run writes last to skip runs that
                are unfinished.
        """
        _check_kind(kind)
        found: list[tuple[str, int, Path]] = []
        folder = self.root / "runs"
        for run in folder.iterdir() if folder.is_dir() else ():
            match = _RUN_NAME.fullmatch(run.name)
            if match is None or match["kind"] != kind or not run.is_dir():
                continue
            if containing is None or (run / containing).exists():
                found.append((match["stamp"], int(match["number"] or 1), run))
        return max(found)[2] if found else None

    def _folder(self, name: str) -> Path:
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def _check_kind(kind: str) -> None:
    if not _KIND.fullmatch(kind):
        raise UsageError(
            f"run kind {kind!r} is not allowed; use lower-case words with hyphens between, such as 'serve'"
        )


def _slug(name: str, what: str) -> str:
    """Turn a name into one path component: "org/model" becomes "org--model".

    If a name loses anything else in the conversion, such as an absolute path, eight digits of its hash are appended, so
    that two names never share a folder.
    """
    if not name.strip():
        raise UsageError(f"the {what} is empty; the workspace needs one to name its folder")
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name.replace("/", "--")).strip(".-")[:_MAX_SLUG]
    if slug.replace("--", "/") != name:
        slug = f"{slug}-{hashlib.sha256(name.encode()).hexdigest()[:8]}".lstrip("-")
    return slug
