"""JSON file of a comparison of two configurations, which `psctl gate` and `psctl eval report` read."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from ...data.errors import UsageError
from ...data.figures import write_figures
from ...data.files import write_json
from ...data.parsing import parse
from ...data.statistics import Estimate
from ..result_files import COMPARE_FILE, COMPARE_KIND, VERSION, read_result, require_kind
from ..results import MetricResult
from .paired import PairedResult

FID_TO_FIRST = "fid_to_first"
"""FID of the second side's images against the first's; `fid` is always to real images."""


@dataclass(frozen=True, slots=True)
class ComparedSide:
    """One of the two configurations.

    Attributes:
        path: path of its images, or of its result.
        settings: settings with which its images were drawn.
        metrics: metrics of this side alone or against real images: CLIP score, `fid`, `lpips`.
        cache_use: as in `EvalResults`.
    """

    path: str
    settings: dict[str, Any]
    metrics: dict[str, MetricResult]
    cache_use: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of two configurations.

    Attributes:
        first, second: the two sides.
        metrics: distances of the second side's images to the first's, by metric.
        differences: paired differences, by metric.
        changed: settings that differ, by name: the first's and the second's value.
        warnings: warnings, for example of omitted pairs.
        prompts_digest: digest of ids, prompts, seeds and sizes, which both sides share; None if a side lacks it.
        per_image: distances of each image of the second side to its partner, by metric and image id.
    """

    first: ComparedSide
    second: ComparedSide
    metrics: dict[str, MetricResult] = field(default_factory=dict)
    differences: dict[str, PairedResult] = field(default_factory=dict)
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    prompts_digest: str | None = None
    per_image: dict[str, dict[str, float]] = field(default_factory=dict)

    def figures(self) -> dict[str, Estimate]:
        """Return distances by metric, and differences as `clip[...].difference` and `clip[...].win_rate`."""
        found = {name: each.estimate for name, each in self.metrics.items()}
        for name, each in self.differences.items():
            found[f"{name}.difference"] = each.estimate
            if each.wins is not None:
                found[f"{name}.win_rate"] = each.wins
        return found

    def to_json(self) -> dict[str, Any]:
        """Return a mapping that can be serialized as JSON and that gates can read."""
        content = {"kind": COMPARE_KIND, "version": VERSION, **asdict(self)}
        sides = [content["first"], content["second"]]
        content |= {"first": self.first.path, "second": self.second.path, "sides": sides}
        return write_figures(content, self.figures())

    def save(self, path: Path) -> None:
        """Write the file atomically. Raises OSError."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load a comparison that `save` wrote; a folder stands for its `compare.json`.

        Raises:
            UsageError: there is no such file, or it is not a result of `psctl eval compare`.
        """
        return cls.from_json(*read_result(path, COMPARE_FILE))

    @classmethod
    def from_json(cls, content: Mapping[str, Any], file: Path) -> Self:
        """Return the comparison in the content of a file, which errors name. Raises UsageError."""
        require_kind(content, file, COMPARE_KIND, "psctl eval compare")
        sides = content.get("sides")
        if sides is None:
            raise UsageError(f"{file}: was written by an older psctl, without its sides; run psctl eval compare again")
        if not isinstance(sides, list) or len(sides) != 2:
            raise UsageError(f"{file}: sides must be a list of two")
        content = {**content, "first": sides[0], "second": sides[1]}
        if missing := [each.name for each in fields(cls) if each.name not in content]:
            raise UsageError(f"{file}: {missing[0]!r} is missing")
        return parse(cls, content, str(file))
