"""Which images a report shows side by side: some spread over all prompts, and those that differ most."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...data.errors import UsageError
from ..sets.generate import ImageItem, read_manifest
from ..sets.image_sets import require_same_prompts
from .sides import ReportedSide, Subject


@dataclass(frozen=True, slots=True)
class ImagePair:
    """The same prompt and seed drawn in two ways.

    Attributes:
        item: what both show.
        original, ours: files.
        figures: distances between the two, by metric.
        is_extreme: shown because it differs most.
    """

    item: ImageItem
    original: Path
    ours: Path
    figures: dict[str, float]
    is_extreme: bool = False


def choose_pairs(subject: Subject, side: ReportedSide, count: int) -> tuple[list[ImagePair], str | None]:
    """Pick pairs of a side and its original.

    Of `count`, two thirds are spread evenly over the prompts, so that nobody has picked them; the others are those
    that differ most, by LPIPS or else PSNR, if that was measured and they are not among the first.

    Returns:
        The pairs, and why there are none if there are none.
    """
    original = subject.original
    if original is None:
        return [], "the original was not measured"
    if count == 0:
        return [], None
    for who, each in (("the original's", original), ("its", side)):
        if each.images is None:
            return [], f"{who} images are not where they were drawn"
    assert original.images is not None
    assert side.images is not None
    try:
        manifests = read_manifest(original.images), read_manifest(side.images)
        require_same_prompts(*manifests)
    except UsageError as error:
        return [], str(error)
    items = manifests[0].items
    extremes = list(_most_different(side))[: count // 3]
    num_spread = min(count - len(extremes), len(items))
    spread = [items[i * len(items) // num_spread] for i in range(num_spread)]
    by_id = {item.id: item for item in items}
    chosen = dict.fromkeys([*spread, *(by_id[name] for name in extremes if name in by_id)])
    return [
        ImagePair(
            item,
            original.images / item.file,
            side.images / item.file,
            {name: values[item.id] for name, values in side.per_image.items() if item.id in values},
            item.id in extremes,
        )
        for item in chosen
    ], None


def _most_different(side: ReportedSide) -> Iterator[str]:
    for name, is_larger_worse in (("lpips", True), ("psnr", False)):
        if values := side.per_image.get(name):
            yield from sorted(values, key=lambda key: values[key], reverse=is_larger_worse)
            return
