"""Input of `psctl eval report`: results of evaluations and comparisons, grouped by model and data set.

Each model and data set has one original, drawn by plain diffusers, and any number of our sides, drawn by the patch
engine with or without a cache. Figures of other prompts, steps or weights of the model are not comparable and are
refused.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...data.errors import UsageError
from ...data.records import read_json
from ..compare.comparison import Comparison
from ..compare.paired import PairedResult
from ..result_files import COMPARE_FILE, COMPARE_KIND, RESULTS_FILE, RESULTS_KIND, EvalResults
from ..results import MetricResult
from ..sets.generate import MANIFEST_FILE, flat_settings

ORIGINAL = "Original"
OURS = "PatchedServe"
TO_REFERENCE = ("fid", "kid", "lpips", "psnr", "ssim")
"""Metrics against reference images, which results name in `details["reference"]`."""
# Within a model and data set these must be equal for figures to be comparable.
_SAME = {
    "fingerprint": "version of the model",
    "prompts_digest": "prompts, seeds or sizes",
    "num_inference_steps": "number of steps",
    "guidance_scale": "guidance scale",
    "dtype": "number format",
    "device": "device",
}
# Settings of a result that do not affect how images are drawn.
_NOT_DRAWN_WITH = ("generated", "reference", "num_prompts", "seed", "resolutions", "prompts_digest")


@dataclass(slots=True)
class ReportedSide:
    """One way of drawing the images of a model and data set, with all its measurements.

    Attributes:
        settings: settings with which the images were drawn.
        label: name of the side in tables.
        metrics: metrics of its images alone or to real images: CLIP scores, `fid`, `lpips`, `psnr`, `ssim`.
        to_original: distances to the original's images.
        differences: paired differences from the original.
        per_image: distances of single images to the original's.
        cache_use: savings of the cache.
        images: folder of its images, if known.
        sources: files from which the side was read.
        warnings: warnings of these files for the reader.
    """

    settings: dict[str, Any]
    label: str = ""
    metrics: dict[str, MetricResult] = field(default_factory=dict)
    to_original: dict[str, MetricResult] = field(default_factory=dict)
    differences: dict[str, PairedResult] = field(default_factory=dict)
    per_image: dict[str, dict[str, float]] = field(default_factory=dict)
    cache_use: dict[str, Any] | None = None
    images: Path | None = None
    sources: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def is_original(self) -> bool:
        return self.settings["engine"] == "plain"

    @property
    def subject_key(self) -> tuple[str, str]:
        """Model and data set of the side."""
        return str(self.settings["model"]), str(self.settings["dataset"])

    @property
    def key(self) -> str:
        """Key that is equal for sides whose images were drawn alike; all originals share one."""
        if self.is_original:
            return ORIGINAL
        drawn = {name: value for name, value in self.settings.items() if name not in _NOT_DRAWN_WITH}
        return json.dumps(drawn, sort_keys=True)

    def absorb(self, other: "ReportedSide") -> list[str]:
        """Merge a later file's measurements of the same images. Returns the names of figures whose values changed."""
        changed = [
            name
            for mine, new in ((self.metrics, other.metrics), (self.to_original, other.to_original))
            for name in mine.keys() & new.keys()
            if mine[name].value != new[name].value
        ]
        for name in ("metrics", "to_original", "differences", "per_image"):
            getattr(self, name).update(getattr(other, name))
        self.cache_use = other.cache_use or self.cache_use
        self.images = other.images or self.images
        self.sources = list(dict.fromkeys([*self.sources, *other.sources]))
        self.warnings += other.warnings
        return changed


@dataclass(slots=True)
class Subject:
    """A model on a data set, with its sides."""

    model: str
    dataset: str
    original: ReportedSide | None = None
    ours: list[ReportedSide] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.model} on {self.dataset}"

    @property
    def sides(self) -> list[ReportedSide]:
        """The original, if there is one, followed by our sides."""
        return ([] if self.original is None else [self.original]) + self.ours


def find_results(root: Path) -> list[Path]:
    """Return the result files of all evaluations and comparisons in a workspace, the oldest first."""
    found = [*root.glob(f"*/*/runs/eval-*/{RESULTS_FILE}"), *root.glob(f"*/*/runs/compare-*/{COMPARE_FILE}")]
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, str(path)))


def gather(paths: Iterable[Path], *, on_warning: Callable[[str], None], is_strict: bool = True) -> list[Subject]:
    """Read result files and group their sides by model and data set.

    Args:
        paths: files or folders; if two hold the same figure, the later one counts.
        on_warning: called with a line about each omission or decision.
        is_strict: whether a mismatch is an error. False for files that the user did not name: results that do not fit
            the newest of their model and data set, or are against other images than the data set's, are omitted.

    Raises:
        UsageError: as `read_sides`, or figures of one model and data set differ in prompts, steps and so on, or are
            against other reference images than those of the data set.
    """
    sides: list[ReportedSide] = []
    for path in paths:
        try:
            sides += read_sides(path)
        except UsageError as error:
            if is_strict:
                raise
            on_warning(f"left out: {error}")
    if not is_strict:
        sides = _matching_newest(sides, on_warning)
    for message in _drop_other_references(sides):
        if is_strict:
            raise UsageError(message)
        on_warning(f"left out: {message}")
    subjects: dict[tuple[str, str], Subject] = {}
    for side in sides:
        subject = subjects.setdefault(side.subject_key, Subject(*side.subject_key))
        if subject.sides and (reason := _mismatch(subject.sides[0], side)):
            raise UsageError(
                f"{subject.sides[0].sources[0]} and {side.sources[0]} are of {subject}, but {reason}, so one report "
                "cannot show both"
            )
        if (known := next((each for each in subject.sides if each.key == side.key), None)) is not None:
            # Both figures may be right: images drawn with a cache depend slightly on the rest of their batch.
            for name in known.absorb(side):
                on_warning(f"{subject}: {name} was measured twice; {side.sources[0]} counts")
        elif side.is_original:
            subject.original = side
        else:
            subject.ours.append(side)
    for subject in subjects.values():
        _name_sides(subject)
        for warning in dict.fromkeys(warning for side in subject.sides for warning in side.warnings):
            on_warning(f"{subject}: {warning}")
    return list(subjects.values())


def read_sides(path: Path) -> list[ReportedSide]:
    """Return the sides of a result file: one of an evaluation, or the original and ours of a comparison.

    Raises:
        UsageError: there is no such file, it is damaged or of another kind, or lacks the settings of its images.
    """
    if path.is_dir():
        files = [path / name for name in (COMPARE_FILE, RESULTS_FILE) if (path / name).is_file()]
        if not files:
            raise UsageError(f"{path}: the folder holds no {COMPARE_FILE} and no {RESULTS_FILE}")
        path = files[0]
    content = read_json(path, "a result")
    if content.get("kind") == RESULTS_KIND:
        found = EvalResults.from_json(content, path)
        side = _side(path, found.settings, found.metrics, found.cache_use, found.settings.get("generated"))
        side.warnings = list(found.warnings)
        return [side]
    if content.get("kind") == COMPARE_KIND:
        return _sides_of_comparison(Comparison.from_json(content, path), path)
    raise UsageError(f"{path}: is neither a result of psctl eval nor one of psctl eval compare")


def _sides_of_comparison(comparison: Comparison, file: Path) -> list[ReportedSide]:
    original, ours = (
        _side(
            file,
            each.settings | {"prompts_digest": comparison.prompts_digest},
            each.metrics,
            each.cache_use,
            each.settings.get("generated", each.path),
        )
        for each in (comparison.first, comparison.second)
    )
    if not original.is_original or ours.is_original:
        engines = original.settings["engine"], ours.settings["engine"]
        raise UsageError(
            f"{file}: compares the engines {engines[0]} and {engines[1]}, but a report sets the patched engine against "
            "plain diffusers; compare with psctl eval compare PLAIN PATCHED"
        )
    for name, one, other in zip(("model", "dataset"), original.subject_key, ours.subject_key, strict=True):
        if one != other:
            raise UsageError(
                f"{file}: compares two of {name}: {one} and {other}; a report sets two ways of drawing the same "
                "against each other"
            )
    ours.warnings, ours.to_original = comparison.warnings, comparison.metrics
    ours.differences, ours.per_image = comparison.differences, comparison.per_image
    return [original, ours]


def _side(
    file: Path,
    settings: Mapping[str, Any],
    metrics: Mapping[str, MetricResult],
    cache_use: dict[str, Any] | None,
    images: Any,
) -> ReportedSide:
    for name in ("model", "dataset", "engine", "prompts_digest"):
        if settings.get(name) is None:
            raise UsageError(
                f"{file}: does not say which {name.replace('_', ' ')} its images were drawn with; a report needs sets "
                "that psctl eval has drawn"
            )
    reference = {"reference": settings.get("reference")}
    figures = {
        name: replace(each, details=reference | each.details) if name in TO_REFERENCE else each
        for name, each in metrics.items()
    }
    folder = Path(images) if isinstance(images, str) and Path(images, MANIFEST_FILE).is_file() else None
    return ReportedSide(dict(settings), metrics=figures, cache_use=cache_use, images=folder, sources=[str(file)])


def _matching_newest(sides: list[ReportedSide], on_warning: Callable[[str], None]) -> list[ReportedSide]:
    newest = {side.subject_key: side for side in sides}
    kept = [side for side in sides if not _mismatch(newest[side.subject_key], side)]
    files, kept_files = ({source for side in group for source in side.sources} for group in (sides, kept))
    if count := len(files - kept_files):
        on_warning(f"{count} older results are of other prompts or settings than the newest, and were left out")
    return kept


def _drop_other_references(sides: list[ReportedSide]) -> Iterator[str]:
    """Remove figures that are not against the data set's own images, and yield a message about each side's."""
    folders: dict[str, Any] = {}
    for side in sides:
        # Captions without images have no ground truth; the reference of the newest figure counts.
        given = [each for each in map(side.metrics.get, TO_REFERENCE) if each is not None]
        for reference in (each.details["reference"] for each in given):
            if reference is not None:
                folders[side.subject_key[1]] = reference
    for side in sides:
        dataset, others = side.subject_key[1], {}
        for name in [name for name in TO_REFERENCE if name in side.metrics]:
            reference = str(side.metrics[name].details["reference"])
            if not _is_own(dataset, reference, str(folders.get(dataset))):
                others[name] = reference
                side.metrics.pop(name)
                side.differences.pop(name, None)
        if others:
            yield (
                f"{side.sources[0]}: {', '.join(others)} are against {', '.join(dict.fromkeys(others.values()))}, "
                f"but columns w/ G.T. hold figures against the images of {dataset} only"
            )


def _is_own(dataset: str, reference: str, folder: str) -> bool:
    """Return whether a reference is the data set's own images, whose name begins with its kind, or, for captions
    without images, the folder.
    """
    kind = dataset.partition(":")[0]
    return reference == folder if kind == "captions" else reference.startswith((f"{kind}:", f"{kind} "))


def _mismatch(one: ReportedSide, other: ReportedSide) -> str | None:
    for name, what in _SAME.items():
        values = one.settings.get(name), other.settings.get(name)
        if values[0] != values[1]:
            is_short = all(isinstance(value, int | float) for value in values)
            return f"have another {what}" + (f" ({values[0]:g} and {values[1]:g})" if is_short else "")
    return None


def _name_sides(subject: Subject) -> None:
    """Set labels that distinguish the sides: the cache and, if it is the same, the settings that differ."""
    if subject.original is not None:
        subject.original.label = ORIGINAL
    labels = [_label(side.settings) for side in subject.ours]
    flat = [flat_settings(side.settings) for side in subject.ours]
    for side, own, label in zip(subject.ours, flat, labels, strict=True):
        alike = [other for other, its_label in zip(flat, labels, strict=True) if its_label == label]
        names = [
            name for name in own if name not in _NOT_DRAWN_WITH and len({str(each.get(name)) for each in alike}) > 1
        ]
        side.label = label + "".join(f", {name} {own[name]}" for name in names)


def _label(settings: Mapping[str, Any]) -> str:
    cache = settings.get("cache")
    if not isinstance(cache, Mapping) or cache.get("mode", "off") == "off":
        return OURS
    how = f"interval {cache.get('interval')}"
    if cache["mode"] != "interval":
        predictor = str(cache.get("predictor")).removeprefix("sha256:")[:8]
        how = f"predictor {predictor}" if cache.get("threshold") is None else f"threshold {cache['threshold']:g}"
    return f"{OURS}, cache {cache['mode']} ({how})"
