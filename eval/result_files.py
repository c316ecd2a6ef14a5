"""The JSON file of an evaluation: metrics, values of single images, settings. Written whole, read with checks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ..data.errors import UsageError
from ..data.figures import write_figures
from ..data.files import write_json
from ..data.parsing import parse
from ..data.records import read_json
from .results import MetricResult

RESULTS_FILE = "results.json"
RESULTS_KIND = "psctl-eval"
COMPARE_FILE = "compare.json"
COMPARE_KIND = "psctl-compare"
VERSION = 1


@dataclass(frozen=True, slots=True)
class EvalResults:
    """What `psctl eval` found out about one set of images.

    Attributes:
        metrics: results by name.
        per_image: values of single images by metric and image name, for paired comparisons; metrics of whole sets
            have none.
        settings: what was evaluated, and how.
        warnings: what a reader must know, such as too few images for FID.
        cache_use: what the patch cache saved while the images were drawn (`CacheUse.describe`); None without a cache.
    """

    metrics: dict[str, MetricResult]
    per_image: dict[str, dict[str, float]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    cache_use: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """A mapping that JSON can hold."""
        content = {
            "kind": RESULTS_KIND,
            "version": VERSION,
            "settings": self.settings,
            **({} if self.cache_use is None else {"cache_use": self.cache_use}),
            "metrics": {name: metric.to_json() for name, metric in self.metrics.items()},
            "warnings": self.warnings,
        }
        write_figures(content, {name: metric.estimate for name, metric in self.metrics.items()})
        return content | {"per_image": self.per_image}

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all. Raises OSError."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` has written; a folder stands for its `results.json`.

        Raises:
            UsageError: there is no such file, or it is not a result of `psctl eval`.
        """
        return cls.from_json(*read_result(path, RESULTS_FILE))

    @classmethod
    def from_json(cls, content: Mapping[str, Any], file: Path) -> Self:
        """The results in the content of a file, which is named in errors. Raises UsageError."""
        require_kind(content, file, RESULTS_KIND, "psctl eval")
        return parse(cls, content, str(file))


def require_kind(content: Mapping[str, Any], file: Path, kind: str, command: str, version: int = VERSION) -> None:
    """Raise UsageError unless this is the content of a file that a command writes, in this version or one before."""
    if content.get("kind") != kind:
        raise UsageError(f"{file}: is not a result of {command} (its kind is not {kind!r})")
    if content.get("version") not in range(1, version + 1):
        raise UsageError(f"{file}: is version {content.get('version')!r}, but this psctl reads version {version}")


def read_result(path: Path, file_name: str) -> tuple[dict[str, Any], Path]:
    """The content of a result and its file, which is `file_name` in a folder. Raises UsageError, as `read_json`."""
    file = path / file_name if path.is_dir() else path
    return read_json(file, "a result"), file
