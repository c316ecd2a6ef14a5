"""Which figures stand in a report's "w/ G.T." columns: those against the images that the captions belong to."""

from collections.abc import Iterable, Mapping

from ..results import MetricResult

TO_REFERENCE = ("fid", "kid", "lpips", "psnr", "ssim")
"""Metrics against reference images; results say which in `details["reference"]`."""


def other_references(dataset: str, metrics: Mapping[str, MetricResult], folder: str | None) -> dict[str, str]:
    """The figures against other images than the data set's own, by metric: the name of what they are against.

    Args:
        dataset: spec of the data set whose captions were drawn.
        metrics: of one side; `details["reference"]` is the name of the data set, which begins with its kind, or a
            folder.
        folder: what counts as the images of a data set of captions only, see `folder_of_captions`.
    """
    kind = dataset.partition(":")[0]
    found = {}
    for name in TO_REFERENCE:
        if name in metrics:
            reference = str(metrics[name].details.get("reference"))
            is_own = reference == folder if kind == "captions" else reference.startswith((f"{kind}:", f"{kind} "))
            if not is_own:
                found[name] = reference
    return found


def folder_of_captions(sides: Iterable[Mapping[str, MetricResult]]) -> str | None:
    """Captions without images have no ground truth of their own: the reference of the newest figure counts.

    Args:
        sides: metrics of all sides of one data set, the oldest first.
    """
    references = [
        metrics[name].details.get("reference") for metrics in sides for name in TO_REFERENCE if name in metrics
    ]
    return next((str(each) for each in reversed(references) if each is not None), None)
