"""Result files as gates read them: figures with their intervals, and the values of single images.

Every command writes its figures under `figures`, with the interval that its measurement supports; a measured figure
without an interval is not evidence. Numbers in files of other programs count as exact. Names of figures:

    results.json  fid, clip[JUDGE], ...           compare.json  psnr, clip[JUDGE].difference, clip[JUDGE].win_rate
    summary.json  slo_attainment, throughput, goodput, latency_p95, per_resolution.128x128.latency_p95, ...
    result.json   patchedserve@2.slo_attainment, patchedserve.rate_at_95, patchedserve.ratio_at_95, ... (bench slo)
    steps.json    SML.ratio, ...   cache.json   SML.interval 3.speedup, SML.interval 3.clip_change, ...
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...data.errors import UsageError
from ...data.figures import FIGURES_KEY, numbers_of, read_figures
from ...data.parsing import parse
from ...data.records import read_json
from ...data.statistics import Estimate
from ..result_files import COMPARE_FILE, COMPARE_KIND, RESULTS_FILE, RESULTS_KIND

BASELINE_KIND = "psctl-baseline"
RESULT_FILES = (RESULTS_FILE, COMPARE_FILE, "summary.json", "result.json", "steps.json", "cache.json")
"""Result files that a run's folder may hold."""

Statistic = Literal["mean", "min", "max", "p05"]
_OF_IMAGES: Mapping[Statistic, Callable[[Sequence[float]], float]] = {
    "min": min,
    "max": max,
    # The smallest value that at least 5 % of the images do not exceed.
    "p05": lambda values: sorted(values)[-(-len(values) // 20) - 1],
}
_OLDER: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "psctl eval": lambda content: content.get("kind") == RESULTS_KIND,
    "psctl eval compare": lambda content: content.get("kind") == COMPARE_KIND,
    "psctl serve or psctl simulate": lambda content: {"slo_attainment_rate", "throughput_qps"} <= set(content),
    "psctl bench slo": lambda content: {"engines", "standalone_s"} <= set(content),
    "psctl bench steps or psctl bench cache": lambda content: (
        isinstance(content.get("rows"), list)
        and all(isinstance(row, Mapping) and "label" in row for row in content["rows"])
    ),
}
"""Tests that identify the command that wrote a file without figures, as earlier versions did."""


@dataclass(frozen=True, slots=True)
class ResultFile:
    """Content of a result file for gates.

    Attributes:
        file: path of the file.
        figures: figures by name.
        per_image: values of single images by metric and image, if the file holds them.
    """

    file: Path
    figures: dict[str, Estimate]
    per_image: dict[str, dict[str, float]] = field(default_factory=dict)

    def find(self, metric: str, statistic: Statistic = "mean") -> tuple[str, Estimate] | None:
        """Return the full name of a figure, and the figure; None if the file does not have it.

        Args:
            metric: name of the metric, optionally without the judge in brackets if there is only one.
            statistic: the mean is the figure in the file. The others are statistics of the values of single images,
                named like `psnr.min`; they are exact for these images, and make no claim about others.
        """
        known: Mapping[str, Any] = self.figures if statistic == "mean" else self.per_image
        judged = [name for name in known if name.endswith("]") and name.partition("[")[0] == metric]
        name = metric if metric in known else judged[0] if len(judged) == 1 else None
        if name is None:
            return None
        if statistic == "mean":
            return name, self.figures[name]
        values = list(self.per_image[name].values())
        return f"{name}.{statistic}", Estimate.exact(_OF_IMAGES[statistic](values), len(values))


def read_results(path: Path) -> list[ResultFile]:
    """Read a result file, or those of `RESULT_FILES` in the folder of a run.

    Raises:
        UsageError: there is no such file, it is not a JSON object or of an older version, or a folder holds none.
    """
    if not path.is_dir():
        return [_read(path)]
    files = [path / name for name in RESULT_FILES if (path / name).is_file()]
    if not files:
        raise UsageError(f"{path}: the folder holds no result file ({', '.join(RESULT_FILES)})")
    return [_read(file) for file in files]


def _read(file: Path) -> ResultFile:
    content = read_json(file, "a result")
    if content.get("kind") == BASELINE_KIND:
        return ResultFile(file, read_figures(content, file, "metrics"))
    if FIGURES_KEY in content:
        per_image = parse(dict[str, dict[str, float]], content.get("per_image", {}), f"{file}: per_image")
        return ResultFile(file, read_figures(content, file), {name: each for name, each in per_image.items() if each})
    for command, has_written in _OLDER.items():
        if has_written(content):
            raise UsageError(f"{file}: is of an older version of psctl, without {FIGURES_KEY}; run {command} again")
    return ResultFile(file, numbers_of(content))
