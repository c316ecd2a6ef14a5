"""TOML file of quality gates.

results = ["results.json"]          # result files or folders of runs, relative to this file
baseline = "baseline.json"          # for relative bounds

[[gate]]
metric = "fid"
max = 30                            # or min, max_ratio, min_ratio, max_increase, max_decrease
min_samples = 256                   # optional, as are name, file, repeats and statistic

[[gate]]
metric = "psnr"
statistic = "min"                   # the worst image, exactly; or max, p05; the default is the mean
min = 75
"""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from ...data.errors import UsageError
from ...data.parsing import parse
from .judging import ABSOLUTE, RELATIVE, Gate
from .results import Statistic

_HEADER = re.compile(r"\s*\[\[\s*gate\s*\]\]")
_EXAMPLE = '[[gate]] with metric = "fid" and max = 30, say'
_Relative = Annotated[FiniteFloat, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class GateFile:
    """Content of a gate file: the gates, the result files to read, and the baseline; paths are absolute."""

    path: Path
    gates: tuple[Gate, ...]
    results: tuple[Path, ...]
    baseline: Path | None


class _Content(BaseModel):
    """The file as it is written."""

    model_config = ConfigDict(extra="forbid")

    results: list[str] = []
    baseline: str | None = None
    gate: list[dict[str, Any]] = []


class _Entry(BaseModel):
    """One gate as it is written."""

    model_config = ConfigDict(extra="forbid")

    metric: Annotated[str, Field(min_length=1)]
    name: str | None = None
    file: str | None = None
    statistic: Statistic = "mean"
    repeats: bool = False
    min_samples: Annotated[int, Field(ge=0)] = 0
    max: FiniteFloat | None = None
    min: FiniteFloat | None = None
    max_ratio: _Relative | None = None
    min_ratio: _Relative | None = None
    max_increase: _Relative | None = None
    max_decrease: _Relative | None = None

    @property
    def bounds(self) -> dict[str, float]:
        kinds = (*ABSOLUTE, *RELATIVE)
        return {kind: getattr(self, kind) for kind in kinds if getattr(self, kind) is not None}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.bounds:
            raise ValueError(f"the gate of {self.metric} has no bound; give one of {', '.join((*ABSOLUTE, *RELATIVE))}")
        if self.repeats and self.statistic != "mean":
            raise ValueError(f"statistic {self.statistic!r} is of the images of one file, so repeats must be false")
        return self

    def to_gate(self, folder: Path) -> Gate:
        figure = self.metric if self.statistic == "mean" else f"{self.metric}.{self.statistic}"
        name = self.name or " ".join([figure, *(f"{kind} {bound:g}" for kind, bound in self.bounds.items())])
        file = None if self.file is None else folder / self.file
        return Gate(self.metric, self.bounds, name, file, self.repeats, self.min_samples, self.statistic)


def read_gates(path: Path) -> GateFile:
    """Read a gate file.

    Raises:
        UsageError: it cannot be read, is not TOML (the line is named), or a gate has no metric, no bound, or a key or
            value that is not allowed (the line of its header is named).
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: is not valid TOML: {error}") from error
    read = parse(_Content, content, str(path))
    if not read.gate:
        raise UsageError(f"{path}: there is no gate; write {_EXAMPLE}")
    folder = path.absolute().parent
    lines = [number for number, line in enumerate(text.splitlines(), 1) if _HEADER.match(line)]
    gates = []
    for index, entry in enumerate(read.gate):
        # Gates may also be written as an inline list, which has no headers.
        where = f"{path}, line {lines[index]}" if len(lines) == len(read.gate) else f"{path}, gate {index + 1}"
        if not entry.get("metric"):
            raise UsageError(f"{where}: a gate needs a metric, as in {_EXAMPLE}")
        gates.append(parse(_Entry, entry, where).to_gate(folder))
    names = [gate.name for gate in gates]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise UsageError(f"{path}: two gates are called {twice[0]!r}; give each its own name")
    baseline = None if read.baseline is None else folder / read.baseline
    return GateFile(path, tuple(gates), tuple(folder / item for item in read.results), baseline)
