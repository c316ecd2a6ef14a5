"""Pairwise comparison of two configurations, from their images or from the results of two evaluations."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from ...data.datasets.base import BadEntries
from ...data.datasets.folders import open_folder
from ...data.datasets.loading import ImageSource
from ...data.errors import UsageError
from ..measurer import Measurer
from ..metrics.measure import measure_paired_fid, measure_sets
from ..options import PAIRED
from ..result_files import RESULTS_FILE, EvalResults
from ..results import Direction
from ..sets.cache_use import cache_use_of
from ..sets.generate import MANIFEST_FILE, Manifest, differing_settings, read_manifest
from ..sets.image_sets import ground_truth_of, require_same_prompts, set_of
from .comparison import FID_TO_FIRST, ComparedSide, Comparison
from .paired import compare_fid, compare_values

COMPARE_METRICS = ("psnr", "ssim", "lpips", "clip", "fid")
USUAL_METRICS = ("psnr", "ssim", "lpips", "clip")
"""Default metrics of sets of images: those that need no real images."""


def check_metrics(names: tuple[str, ...]) -> None:
    """Raise UsageError unless these are some of `COMPARE_METRICS`."""
    if not names or any(name not in COMPARE_METRICS for name in names):
        raise UsageError(f"metrics are {', '.join(names) or 'none'}, but must be some of {', '.join(COMPARE_METRICS)}")


def compare(
    first: Path,
    second: Path,
    metrics: tuple[str, ...],
    measurer: Measurer,
    *,
    reference: Path | None = None,
) -> Comparison:
    """Compare two sets of images that psctl has drawn, or two results of `psctl eval`.

    For sets, PSNR, SSIM and LPIPS measure the distance of the second's images from the first's; CLIP score and FID
    measure the effect on quality. For FID, the real images are those of the data set whose captions were drawn, or of a
    folder. FID is measured from each side to them and from the second side to the first; with the data set, so is LPIPS
    of each side to them. For results, every metric with values of single images is compared. A pair with an image that
    is missing, damaged or omitted from a result is excluded with a warning.

    Args:
        first, second: folders with a manifest, or result files or folders of `psctl eval`.
        metrics: some of `COMPARE_METRICS`; for sets only.
        measurer: measures the images.
        reference: folder of real images, for FID; None for those of the data set.

    Raises:
        UsageError: the sides are of different kinds, do not have the same prompts, seeds and sizes, or FID is requested
            and there are no real images.
    """
    kinds = [_is_set(path) for path in (first, second)]
    if kinds[0] != kinds[1]:
        raise UsageError(f"{first} is {_kind(kinds[0])}, and {second} is {_kind(kinds[1])}; compare two of one kind")
    if not kinds[0]:
        return _compare_results((first, second), measurer.seed)
    check_metrics(metrics)
    manifests = read_manifest(first), read_manifest(second)
    require_same_prompts(*manifests)
    truth: ImageSource | None = None
    if "fid" in metrics:
        truth = (
            ground_truth_of(manifests[0], max_bad=measurer.max_bad, cache_dir=measurer.samples_dir)
            if reference is None
            else open_folder(reference)
        )
    measurer.judges.check(metrics)
    comparison = Comparison(
        _side(first, manifests[0]),
        _side(second, manifests[1]),
        changed=differing_settings(manifests[0].settings, manifests[1].settings),
        prompts_digest=manifests[0].prompts_digest,
    )
    for side, manifest in zip((comparison.first, comparison.second), manifests, strict=True):
        comparison.warnings.extend(cache_use_of(Path(side.path), manifest.settings, len(manifest.items))[1])
    sources = set_of(first, manifests[0]), set_of(second, manifests[1])
    sets = _Sets(sources, measurer, comparison)
    paired = tuple(name for name in PAIRED if name in metrics)
    if paired:
        sets.measure_distances(paired)
    if "clip" in metrics:
        sets.measure_clip(manifests[0])
    if "lpips" in metrics and truth is not None and reference is None:
        sets.measure_lpips_to(truth)
    if truth is not None:
        sets.measure_fid(truth)
    return comparison


def _side(folder: Path, manifest: Manifest) -> ComparedSide:
    settings = {**manifest.settings, "num_prompts": len(manifest.items), "seed": manifest.items[0].seed}
    sizes = dict.fromkeys((item.width, item.height) for item in manifest.items)
    settings["resolutions"] = [
        f"{width}x{height}" for width, height in sorted(sizes, key=lambda size: size[0] * size[1])
    ]
    return ComparedSide(str(folder.resolve()), settings, {}, cache_use_of(folder, settings, None)[0])


@dataclass(frozen=True, slots=True)
class _Sets:
    """Two sets of images, whose measurements are recorded in `comparison`."""

    sources: tuple[ImageSource, ImageSource]
    measurer: Measurer
    comparison: Comparison

    def measure_distances(self, names: tuple[str, ...]) -> None:
        """Measure PSNR, SSIM and LPIPS of the second side's images to the first's."""
        one, other = self.sources
        found, values, warnings = self.measurer.pairs(names, other, one)
        self.comparison.metrics.update(found)
        self.comparison.per_image.update(values)
        self._warn(warnings)

    def measure_clip(self, manifest: Manifest) -> None:
        """Measure the CLIP score of each side's images, and the difference."""
        captions = {item.id: item.prompt for item in manifest.items}
        all_values, name = [], ""
        for what, source, side in self._sides():
            result, values = self.measurer.clip(source, captions, f"CLIP score of the {what}")
            name, side.metrics[result.name] = result.name, result
            all_values.append(values)
        self._note_difference(name, all_values, "higher")

    def measure_lpips_to(self, truth: ImageSource) -> None:
        """Measure LPIPS of each side's images to the real ones of the same captions, and the difference."""
        all_values = []
        for what, source, side in self._sides():
            found, values, _ = self.measurer.pairs(
                ("lpips",), source, truth, f"{what} against real images", reference=truth.name
            )
            side.metrics.update(found)
            all_values.append(values["lpips"])
        self._note_difference("lpips", all_values, "lower")

    def measure_fid(self, truth: ImageSource) -> None:
        """Measure FID of each side to real images and of the second side to the first, and the difference."""
        sources, seed = (*self.sources, truth), self.measurer.seed
        bad = [BadEntries(source.name, self.measurer.max_bad) for source in sources]
        one, other, real = map(self.measurer.features, sources, ("first", "second", "real"), bad)
        one, other = self._pairs_of_features((one, other), (bad[0], bad[1]))
        self._warn(f"real image left out: {each}" for each in bad[2].problems)
        comparison, details = self.comparison, self.measurer.judges.inception_details() | {"reference": truth.name}
        warnings: list[str] = []
        for features, side in ((one, comparison.first), (other, comparison.second)):
            found, more = measure_sets(("fid",), features, real, seed=seed, details=details)
            side.metrics.update(found)
            warnings += more
        details |= {"reference": self.sources[0].name}
        to_first = measure_paired_fid(one, other, seed=seed, details=details)
        comparison.metrics[FID_TO_FIRST] = replace(to_first, name=FID_TO_FIRST)
        self._warn(warnings)
        comparison.differences["fid"] = compare_fid(one, other, real, seed=seed)

    def _pairs_of_features(
        self, features: tuple[Tensor, Tensor], bad: tuple[BadEntries, BadEntries]
    ) -> tuple[Tensor, Tensor]:
        """Return the rows of pairs whose images could be read on both sides; count and warn of the others."""
        one, other = self.sources
        pairs = BadEntries(f"{other.name} against {one.name}", self.measurer.max_bad)
        # The second side first, in the order of `Measurer.pairs`, so that a pair that is bad on both is reported once.
        for side in reversed(bad):
            for name, found in zip(side.names, side.problems, strict=True):
                pairs.add(name, found.removeprefix(f"{name}: "))
        self._warn(f"pair left out: {each}" for each in pairs.problems)
        kept = [
            [i for i, name in enumerate(name for name in one.ids if name not in side.names) if name not in pairs.names]
            for side in bad
        ]
        return features[0][kept[0]], features[1][kept[1]]

    def _warn(self, messages: Iterable[str]) -> None:
        known = self.comparison.warnings
        known.extend(message for message in dict.fromkeys(messages) if message not in known)

    def _sides(self) -> list[tuple[str, ImageSource, ComparedSide]]:
        (one, other), comparison = self.sources, self.comparison
        return [("first", one, comparison.first), ("second", other, comparison.second)]

    def _note_difference(self, name: str, all_values: Sequence[Mapping[str, float]], direction: Direction) -> None:
        """Compare the values of both sides, image by image."""
        one, other = common_values(*all_values)
        self.comparison.differences[name] = compare_values(name, one, other, direction, self.measurer.seed)


def common_values(one: Mapping[str, float], other: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the values of the images that both sides have; an image that is bad on one side has no pair."""
    common = sorted(one.keys() & other.keys())
    return {name: one[name] for name in common}, {name: other[name] for name in common}


def _compare_results(paths: tuple[Path, Path], seed: int) -> Comparison:
    first, second = (EvalResults.load(path) for path in paths)
    digests = [each.settings.get("prompts_digest") for each in (first, second)]
    if None not in digests and digests[0] != digests[1]:
        raise UsageError("the two results are of other prompts, seeds or sizes, so there are no pairs to compare")
    common = [name for name in first.per_image if name in second.per_image]
    if not common:
        raise UsageError(
            f"the two results share no metric of single images (first: {', '.join(first.per_image) or '-'}; second: "
            f"{', '.join(second.per_image) or '-'})"
        )
    comparison = Comparison(
        ComparedSide(str(paths[0].resolve()), first.settings, first.metrics, first.cache_use),
        ComparedSide(str(paths[1].resolve()), second.settings, second.metrics, second.cache_use),
        changed=differing_settings(first.settings, second.settings),
        prompts_digest=digests[0],
    )
    for name in common:
        direction = first.metrics[name].direction
        one, other = first.per_image[name], second.per_image[name]
        # Both are known to have the same prompts: a side that lacks an image has omitted a bad one.
        if None not in digests and (alone := sorted(one.keys() ^ other.keys())):
            comparison.warnings.append(
                f"{name}: {len(alone)} images were measured on one side only and left out; the first: {alone[0]}"
            )
            one, other = common_values(one, other)
        comparison.differences[name] = compare_values(name, one, other, direction, seed)
    return comparison


def _is_set(path: Path) -> bool:
    if (path / MANIFEST_FILE).is_file():
        return True
    if path.is_file() or (path / RESULTS_FILE).is_file():
        return False
    raise UsageError(f"{path}: is neither a folder of images with a {MANIFEST_FILE} nor a result of psctl eval")


def _kind(is_set: bool) -> str:
    return "a set of images" if is_set else "a result of psctl eval"
