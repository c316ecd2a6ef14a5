"""Two configurations compared pair by pair: from their images, or from the results of two evaluations."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..data.datasets.base import BadEntries
from ..data.datasets.folders import open_folder
from ..data.errors import UsageError
from ..data.files import write_json
from .eval_options import PAIRED
from .features import features_of
from .generate_set import MANIFEST_FILE, Manifest, differing_settings, read_manifest
from .image_sets import require_same_prompts, set_of
from .judges import Judges
from .measure import measure_clip, measure_pairs
from .paired import PairedResult, compare_fid, compare_values
from .result_files import COMPARE_KIND, RESULTS_FILE, EvalResults
from .results import MetricResult

COMPARE_METRICS = ("psnr", "ssim", "lpips", "clip", "fid")
VERSION = 1


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the second side changed.

    Attributes:
        first, second: the two sides.
        metrics: distances of the second side's images to the first's, by metric.
        differences: paired differences, by metric.
        changed: settings that differ, by name: the first's and the second's value.
        warnings: what was left out.
    """

    first: str
    second: str
    metrics: dict[str, MetricResult] = field(default_factory=dict)
    differences: dict[str, PairedResult] = field(default_factory=dict)
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """A mapping that JSON can hold, and that gates can read."""
        return {
            "kind": COMPARE_KIND,
            "version": VERSION,
            "first": self.first,
            "second": self.second,
            "changed": {name: list(values) for name, values in self.changed.items()},
            "metrics": {name: each.to_json() for name, each in self.metrics.items()},
            "differences": {name: each.to_json() for name, each in self.differences.items()},
            "warnings": self.warnings,
        }

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all. Raises OSError."""
        write_json(path, self.to_json())


def compare(
    first: Path,
    second: Path,
    metrics: tuple[str, ...],
    judges: Judges,
    *,
    reference: Path | None = None,
    seed: int = 0,
    max_bad: int = 0,
    features_dir: Path | None = None,
    start_phase: Callable[[str, int], Callable[[int], None]] = lambda what, total: lambda count: None,
) -> Comparison:
    """Compare two sets of images that psctl has drawn, or two results of `psctl eval`.

    Of sets, PSNR, SSIM and LPIPS say how far the second's images are from the first's; CLIP score and, with reference
    images, FID say what that costs. Of results, every metric with values of single images is compared.

    Args:
        first, second: folders with a manifest, or result files or folders of `psctl eval`.
        metrics: some of `COMPARE_METRICS`; for sets only.
        judges: the networks.
        reference: folder of real images, for FID.
        seed: of the bootstraps.
        max_bad: how many pairs may be missing or damaged.
        features_dir: where features are cached.
        start_phase: shows progress.

    Raises:
        UsageError: the sides are of different kinds, or do not have the same prompts, seeds and sizes.
    """
    kinds = [_is_set(path) for path in (first, second)]
    if kinds[0] != kinds[1]:
        raise UsageError(f"{first} is {_kind(kinds[0])}, and {second} is {_kind(kinds[1])}; compare two of one kind")
    comparison = Comparison(str(first), str(second))
    if not kinds[0]:
        _compare_results(EvalResults.load(first), EvalResults.load(second), seed, comparison)
        return comparison
    unknown = [name for name in metrics if name not in COMPARE_METRICS]
    if unknown or not metrics:
        raise UsageError(
            f"metrics are {', '.join(metrics) or 'none'}, but must be some of {', '.join(COMPARE_METRICS)}"
        )
    if "fid" in metrics and reference is None:
        raise UsageError("fid compares with real images: give --reference DIR, or other --metrics")
    manifests = read_manifest(first), read_manifest(second)
    require_same_prompts(*manifests)
    comparison.changed.update(differing_settings(manifests[0].settings, manifests[1].settings))
    judges.check(metrics)
    _compare_images((first, second), manifests, metrics, judges, seed, max_bad, start_phase, comparison)
    if "fid" in metrics and reference is not None:
        # FID pairs rows of features, so none may be left out.
        features = [
            features_of(
                source,
                judges.inception,
                judges.inception_sha256,
                features_dir,
                on_images=start_phase(f"{what} features", len(source.ids)),
            )
            for what, source in (
                ("first", set_of(first, manifests[0])),
                ("second", set_of(second, manifests[1])),
                ("reference", open_folder(reference)),
            )
        ]
        comparison.differences["fid"] = compare_fid(*features, seed=seed)
    return comparison


def _compare_images(
    folders: tuple[Path, Path],
    manifests: tuple[Manifest, Manifest],
    metrics: tuple[str, ...],
    judges: Judges,
    seed: int,
    max_bad: int,
    start_phase: Callable[[str, int], Callable[[int], None]],
    comparison: Comparison,
) -> None:
    one, other = (set_of(folder, manifest) for folder, manifest in zip(folders, manifests, strict=True))
    paired = tuple(name for name in PAIRED if name in metrics)
    if paired:
        bad = BadEntries(f"{other.name} against {one.name}", max_bad)
        found, _ = measure_pairs(
            paired,
            other,
            one,
            lpips=judges.lpips if "lpips" in paired else None,
            seed=seed,
            bad=bad,
            details={"lpips": judges.lpips_details()} if "lpips" in paired else None,
            on_images=start_phase("pairs", len(one.ids)),
        )
        comparison.metrics.update(found)
        comparison.warnings.extend(f"pair left out: {each}" for each in bad.found)
    if "clip" in metrics:
        captions = {item.id: item.prompt for item in manifests[0].items}
        sides = []
        for what, source in (("first", one), ("second", other)):
            result, values = measure_clip(
                judges.clip,
                judges.clip_name,
                source,
                captions,
                bad=BadEntries(source.name, max_bad),
                on_images=start_phase(f"CLIP score of the {what}", len(source.ids)),
            )
            sides.append((result.name, values))
        # An image that is bad on one side leaves its partner without a pair.
        common = sides[0][1].keys() & sides[1][1].keys()
        name = sides[0][0]
        first, second = ({key: each[key] for key in sorted(common)} for _, each in sides)
        comparison.differences[name] = compare_values(name, first, second, "higher", seed)


def _compare_results(first: EvalResults, second: EvalResults, seed: int, comparison: Comparison) -> None:
    digests = [each.settings.get("prompts_digest") for each in (first, second)]
    if None not in digests and digests[0] != digests[1]:
        raise UsageError("the two results are of other prompts, seeds or sizes, so there are no pairs to compare")
    common = [name for name in first.per_image if name in second.per_image]
    if not common:
        raise UsageError(
            f"the two results share no metric of single images (first: {', '.join(first.per_image) or '-'}; second: "
            f"{', '.join(second.per_image) or '-'})"
        )
    for name in common:
        direction = first.metrics[name].direction
        comparison.differences[name] = compare_values(
            name, first.per_image[name], second.per_image[name], direction, seed
        )
    comparison.changed.update(differing_settings(first.settings, second.settings))


def _is_set(path: Path) -> bool:
    if (path / MANIFEST_FILE).is_file():
        return True
    if path.is_file() or (path / RESULTS_FILE).is_file():
        return False
    raise UsageError(f"{path}: is neither a folder of images with a {MANIFEST_FILE} nor a result of psctl eval")


def _kind(is_set: bool) -> str:
    return "a set of images" if is_set else "a result of psctl eval"
