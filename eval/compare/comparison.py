"""The JSON file of a comparison of two configurations: what `psctl gate` and `psctl eval report` read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ...data.errors import UsageError
from ...data.files import write_json
from ..result_files import COMPARE_FILE, COMPARE_KIND, read_result
from ..results import MetricResult
from .paired import PairedResult

FID_TO_FIRST = "fid_to_first"
"""FID of the second side's images against the first's; `fid` is always to real images."""
VERSION = 1


@dataclass(frozen=True, slots=True)
class ComparedSide:
    """One of the two configurations.

    Attributes:
        path: its images, or its result.
        settings: how its images were drawn.
        metrics: what was measured of it alone or against real images: CLIP score, `fid`, `lpips`.
        cache_use: as in `EvalResults`.
    """

    path: str
    settings: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, MetricResult] = field(default_factory=dict)
    cache_use: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """A mapping that JSON can hold."""
        return {
            "path": self.path,
            "settings": self.settings,
            "cache_use": self.cache_use,
            "metrics": {name: each.to_json() for name, each in self.metrics.items()},
        }

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """The side that `to_json` made `content` of. Raises UsageError, KeyError, TypeError, ValueError."""
        metrics = {str(name): MetricResult.from_json(each) for name, each in content["metrics"].items()}
        return cls(str(content["path"]), dict(content["settings"]), metrics, content["cache_use"])


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the second side changed.

    Attributes:
        first, second: the two sides.
        metrics: distances of the second side's images to the first's, by metric.
        differences: paired differences, by metric.
        changed: settings that differ, by name: the first's and the second's value.
        warnings: what was left out.
        prompts_digest: of ids, prompts, seeds and sizes, which both sides share; None if a side does not tell.
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

    def to_json(self) -> dict[str, Any]:
        """A mapping that JSON can hold, and that gates can read."""
        return {
            "kind": COMPARE_KIND,
            "version": VERSION,
            "first": self.first.path,
            "second": self.second.path,
            "prompts_digest": self.prompts_digest,
            "changed": {name: list(values) for name, values in self.changed.items()},
            "metrics": {name: each.to_json() for name, each in self.metrics.items()},
            "differences": {name: each.to_json() for name, each in self.differences.items()},
            "warnings": self.warnings,
            "sides": [self.first.to_json(), self.second.to_json()],
            "per_image": self.per_image,
        }

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all. Raises OSError."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` has written; a folder stands for its `compare.json`.

        Raises:
            UsageError: there is no such file, or it is no result of `psctl eval compare`.
        """
        return cls.from_json(*read_result(path, COMPARE_FILE))

    @classmethod
    def from_json(cls, content: Mapping[str, Any], file: Path) -> Self:
        """The comparison in the content of a file, which is named in errors. Raises UsageError."""
        if content.get("kind") != COMPARE_KIND or content.get("version") != VERSION:
            raise UsageError(f"{file}: is no result of psctl eval compare, version {VERSION}")
        if "sides" not in content:
            raise UsageError(f"{file}: was written by an older psctl, without its sides; run psctl eval compare again")
        try:
            first, second = (ComparedSide.from_json(each) for each in content["sides"])
            return cls(
                first,
                second,
                {str(name): MetricResult.from_json(each) for name, each in content["metrics"].items()},
                {str(name): PairedResult(**each) for name, each in content["differences"].items()},
                {str(name): (values[0], values[1]) for name, values in content["changed"].items()},
                list(content["warnings"]),
                content["prompts_digest"],
                {str(name): dict(values) for name, values in content["per_image"].items()},
            )
        except UsageError as error:
            raise UsageError(f"{file}: {error}") from error
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise UsageError(f"{file}: is damaged: {type(error).__name__}: {error}") from error
