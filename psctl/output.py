"""The object that does all printing: results to stdout; notes, warnings and progress to stderr."""

import dataclasses
import json as jsonlib
import math
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import date
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from ..data.checks import writes_all_text
from ..data.files import write_json
from .flags import flag
from .progress import Phases

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from ..data.workspace import ModelWorkspace
    from ..profiling.experiment.experiment import Experiment, Outcome

Json = Annotated[bool, flag("--json", "Print the result as JSON.", is_shared=True)]
Quiet = Annotated[bool, flag("--quiet -q", "Print no progress and no notes.", is_shared=True)]

# A pipe has no width; 80 columns would cut the cells of wide tables that people grep.
_PIPE_WIDTH = 160


@dataclasses.dataclass(eq=False)
class Output:
    """Prints the results and the progress of one command.

    Attributes:
        json: print results as JSON instead of text.
        quiet: print no notes and no progress; results, warnings and errors are still shown.
    """

    PANEL: ClassVar = "Output"
    json: Json = False
    quiet: Quiet = False

    def data(
        self,
        payload: Any,
        *,
        table: "RenderableType | Callable[[], RenderableType] | None" = None,
        file: Path | None = None,
    ) -> None:
        """Print a result on stdout.

        Args:
            payload: content that `--json` prints: mappings, sequences, dataclasses, paths, numbers (numpy's too). NaN
                and infinity, which JSON cannot represent, become null.
            table: text output: an object that rich can print, or a function that returns one. Without it, a mapping is
                printed as lines of `name: value` and anything else with `str`.
            file: file to which the payload is written as JSON first.
        """
        if file is not None:
            write_json(file, payload)
        if self.json:
            is_ascii = not writes_all_text(sys.stdout)
            sys.stdout.write(jsonlib.dumps(plain(payload), indent=2, ensure_ascii=is_ascii, allow_nan=False) + "\n")
        elif table is not None:
            self.stdout.print(table() if callable(table) else table)
        elif isinstance(payload, Mapping):
            for name, value in payload.items():
                sys.stdout.write(f"{name}: {value}\n")
        else:
            sys.stdout.write(f"{payload}\n")
        # Flushed here, so that a full disk or a closed pipe fails while the error table can still report it.
        sys.stdout.flush()

    def experiment(self, experiment: "Experiment[Any]", place: "ModelWorkspace", file: Path | None) -> None:
        """Run an experiment with its progress on stderr, and print its outcome as `outcome` does."""
        with self.phases() as start:
            advance = start(experiment.unit, len(experiment.cells))
            done = experiment.run(place, on_start=lambda cell: advance.show(experiment.label(cell)), on_row=advance)
        self.outcome(done, file)

    def outcome(self, done: "Outcome", file: Path | None) -> None:
        """Print the result of an experiment on stdout, and its place on stderr. The result is written to `file` first.

        Raises KeyboardInterrupt if Ctrl-C ended the experiment.
        """
        from ..profiling.report.table import to_rich

        self.data(done.result, table=lambda: to_rich(done.tables(done.result)), file=file)
        self.note(f"{done.products}: {done.place}")
        if done.was_interrupted:
            if done.hint:
                self.note(done.hint)
            raise KeyboardInterrupt

    def note(self, message: str) -> None:
        """Print a note about progress or next steps on stderr; `--quiet` hides it."""
        if not self.quiet:
            self.stderr.print(message, markup=False, highlight=False, soft_wrap=True)

    def warn(self, message: str) -> None:
        """Warn on stderr about something that the user should know; shown under `--quiet` too."""
        self.stderr.print(f"Warning: {message}", style="yellow", markup=False, highlight=False, soft_wrap=True)

    def phases(self) -> Phases:
        """Return a context manager that shows the progress of long work on stderr.

        with out.phases() as start:
            advance = start("images", total=8)
            advance()
        """
        return Phases(self.stderr, self.note, is_quiet=self.quiet)

    def status(self, message: str) -> AbstractContextManager[Any]:
        """Return a context manager that shows `message` while something of unknown length runs.

        On a terminal it is a spinner on stderr, otherwise a note.
        """
        if not self.quiet and self.stderr.is_terminal:
            return self.stderr.status(message, spinner="line" if self.stderr.options.ascii_only else "dots")
        self.note(message)
        return _Nothing()

    @cached_property
    def stdout(self) -> "Console":
        """rich console of results."""
        from rich.console import Console

        is_pipe = not sys.stdout.isatty() and "COLUMNS" not in os.environ
        return Console(file=sys.stdout, width=_PIPE_WIDTH if is_pipe else None)

    @cached_property
    def stderr(self) -> "Console":
        """rich console of everything that is not a result."""
        from rich.console import Console

        # Without `file`, rich looks up `sys.stderr` at each print, and a server replaces it.
        return Console(stderr=True)


class _Nothing(AbstractContextManager[None]):
    def __exit__(self, *details: object) -> None:
        return None


def plain(value: Any) -> Any:
    """Convert a payload to types that JSON can represent."""
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, date):
        return value.isoformat()
    # numpy arrays and scalars, and torch tensors, without importing either.
    to_list = getattr(value, "tolist", None)
    if callable(to_list):
        return plain(to_list())
    raise TypeError(f"cannot print {type(value).__name__} as JSON")
