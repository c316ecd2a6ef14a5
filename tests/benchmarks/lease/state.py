"""Results of a lease so far: a JSON file for each part, the manifest, the tables, and one tar of all of them."""

import json
import tarfile
from pathlib import Path
from typing import Any

from patchedserve.data.errors import UsageError
from patchedserve.data.files import atomic_write, write_json, write_text
from patchedserve.profiling.report.table import Table

from .context import Row
from .forms import tables_of
from .plan import Part
from .versions import versions

TAR = "lease.tar.gz"
_MANIFEST = "manifest.json"


class State:
    """The folder of a lease, which its runs share.

    Args:
        folder: state folder; created if it does not exist.
        out: folder for the tar.
        is_rehearsal: whether this run is a rehearsal; earlier runs must be of the same kind.

    Raises:
        UsageError: the folder holds another kind of run, or its manifest is damaged.
    """

    def __init__(self, folder: Path, out: Path, *, is_rehearsal: bool) -> None:
        self.folder, self._out = folder, out
        (folder / "results").mkdir(parents=True, exist_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        path = folder / _MANIFEST
        self.manifest: dict[str, Any] = {"is_rehearsal": is_rehearsal, "runs": [], "parts": {}}
        if path.exists():
            try:
                self.manifest = json.loads(path.read_text(encoding="utf-8"))
                before = bool(self.manifest["is_rehearsal"])
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(f"{path} is damaged ({error}); delete {folder}") from error
            if before != is_rehearsal:
                kind = "a rehearsal" if before else "a real run"
                raise UsageError(f"{folder} holds {kind}; name another folder, or delete it")
        self.manifest["versions"] = versions()
        self.manifest["runs"].append({"seconds": 0.0})

    def status_of(self, part: Part) -> str | None:
        """Return how the part ended when it last ran or was left out; None if neither has happened."""
        return self.manifest["parts"].get(part.name, {}).get("status")

    def result_of(self, name: str) -> dict[str, Any]:
        """Return a part's rows so far, the errors of its last run, and its notes."""
        path = self.folder / "results" / f"{name}.json"
        if not path.exists():
            return {"part": name, "rows": [], "errors": [], "notes": {}}
        return json.loads(path.read_text(encoding="utf-8"))

    def keep_row(self, result: dict[str, Any], row: Row) -> None:
        """Add a row to a part's result and file."""
        result["errors" if "error" in row else "rows"].append(row)
        self._write(result)

    def keep_end(self, result: dict[str, Any], status: str, reason: str, notes: dict[str, Any], seconds: float) -> None:
        """Store the end of a part that ran or was left out."""
        result["notes"] |= notes
        if status != "left out":
            self._write(result)
        before = self.manifest["parts"].get(result["part"], {}).get("seconds", 0.0)
        about = {"status": status, "reason": reason, "rows": len(result["rows"]), "seconds": round(before + seconds, 1)}
        self.manifest["parts"][result["part"]] = about

    def tables(self, name: str) -> list[Table]:
        """Return the tables of a part's result."""
        return tables_of(name, self.result_of(name))

    def save(self, elapsed_s: float) -> None:
        """Write manifest, tables and tar, so that a run that is killed leaves its results."""
        self.manifest["runs"][-1]["seconds"] = round(elapsed_s, 1)
        write_json(self.folder / _MANIFEST, self.manifest)
        parts = [table.to_markdown() for name in self.manifest["parts"] for table in self.tables(name)]
        write_text(self.folder / "tables.md", "\n\n".join(["# Results of a lease", *parts]) + "\n")
        with atomic_write(self._out / TAR) as temporary, tarfile.open(temporary, "w:gz", compresslevel=3) as tar:
            for path in (_MANIFEST, "tables.md", "results"):
                tar.add(self.folder / path, arcname=path)
            for log in sorted(self.folder.glob("*.log")):
                tar.add(log, arcname=f"logs/{log.name}")

    def _write(self, result: dict[str, Any]) -> None:
        write_json(self.folder / "results" / f"{result['part']}.json", result)
