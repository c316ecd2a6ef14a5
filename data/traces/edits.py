"""Edits in traces: their images and masks by name, random draws of edits, and the pixels.

Mask ratios are drawn as InstGenIE (section 2.2, figure 3) describes them. No torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..checks import require_counts
from ..datasets.decode import size_of
from ..edits import MAX_PIXELS, EditSpec, read_image, read_mask
from ..errors import UsageError
from ..records import csv_rows, open_text
from ..requests import Request, TracedEdit
from ..resolution import RESOLUTION_MULTIPLE, Resolution

SHAPES = ("box", "ellipse", "blob")
MASK_RATIOS = ("production", "public", "viton")
_PICTURE = "emoji:"
_MAX_PICTURES = 1_000_000
_PRODUCTION = (0.048, 0.061, 0.072, 0.082, 0.095, 0.110, 0.128, 0.154, 0.208)
_PUBLIC = (0.013, 0.018, 0.025, 0.036, 0.056, 0.155, 0.197, 0.253, 0.765)
_BEND = 0.98
_VITON = (3.5, 6.5)
_MIN_RATIO = 1e-4
_COLUMN = "mask_ratio"
_WAVES = 3
_TOLERANCE = 0.01


@dataclass(frozen=True, slots=True)
class MaskRatios:
    """Distribution of mask ratios, as a piecewise linear quantile function.

    Attributes:
        shares: shares of the masks, ascending from 0 to 1.
        ratios: ratio at each share, above 0 and at most 1, never descending.
    """

    shares: tuple[float, ...]
    ratios: tuple[float, ...]

    def quantile(self, share: float) -> float:
        """Return the ratio that this share of the masks does not exceed."""
        return float(np.interp(share, self.shares, self.ratios))

    @property
    def mean(self) -> float:
        """Mean ratio of all masks."""
        return float(np.trapezoid(self.ratios, self.shares))


def read_mask_ratios(name: str) -> MaskRatios:
    """Return a published distribution by name, or the distribution of the ratios in a file.

    production: deciles, mean (0.112) and range (0.016 to 0.421) of InstGenIE's own trace. The last tenth has one bend,
    at 0.98, whose ratio is chosen to match the mean; the first tenth is a straight line from the least ratio. public:
    deciles and mean (0.193) of the public trace. No range is published: the first tenth begins at half of the first
    decile, and the last ends at the ratio that matches the mean. viton: only the mean (0.35) is published; a Beta(3.5,
    6.5) is assumed.

    Args:
        name: one of `MASK_RATIOS`, or a CSV file with a column `mask_ratio`, between whose values ratios are
            interpolated.

    Raises:
        UsageError: the file cannot be read, has no such column or no ratio, or a ratio is not above 0 and up to 1.
    """
    if name == "production":
        return _production()
    if name == "public":
        return _public()
    if name == "viton":
        return _viton()
    ratios = sorted(_ratios_in(Path(name)))
    if len(ratios) == 1:
        ratios *= 2
    return MaskRatios(tuple(np.linspace(0, 1, len(ratios)).tolist()), tuple(ratios))


def _production(low: float = 0.016, high: float = 0.421, mean: float = 0.112) -> MaskRatios:
    deciles = tuple(np.arange(1, 10) / 10)
    inner = MaskRatios((0.0, *deciles), (low, *_PRODUCTION)).mean
    first, second = _BEND - 0.9, 1 - _BEND
    # The area under the two lines of the last tenth makes up the rest of the mean.
    bend = (mean - inner - first * _PRODUCTION[-1] / 2 - second * high / 2) / ((first + second) / 2)
    return MaskRatios((0.0, *deciles, _BEND, 1.0), (low, *_PRODUCTION, bend, high))


def _public(mean: float = 0.193) -> MaskRatios:
    shares, low = (0.0, *(np.arange(1, 10) / 10)), _PUBLIC[0] / 2
    high = 2 * (mean - MaskRatios(shares, (low, *_PUBLIC)).mean) / 0.1 - _PUBLIC[-1]
    return MaskRatios((*shares, 1.0), (low, *_PUBLIC, high))


def _viton() -> MaskRatios:
    from scipy.special import betaincinv

    shares = np.linspace(0, 1, 1001)
    ratios = np.clip(betaincinv(*_VITON, shares), _MIN_RATIO, 1)
    return MaskRatios(tuple(shares.tolist()), tuple(ratios.tolist()))


def _ratios_in(path: Path) -> list[float]:
    hint = f" (mask ratios are {', '.join(MASK_RATIOS)} or a file)"
    ratios: list[float] = []
    with open_text(path, "the mask ratios", hint) as file:
        rows = csv_rows(path, file)
        _, names = next(rows, (1, []))
        if _COLUMN not in names:
            raise UsageError(f"{path}: mask ratios must be CSV with a column {_COLUMN}")
        for number, row in rows:
            text = dict(zip(names, row, strict=False)).get(_COLUMN)
            try:
                ratios.append(float(text or ""))
            except ValueError as error:
                raise UsageError(f"{path}:{number}: {_COLUMN} is {text!r}, but it must be a number") from error
            if not 0 < ratios[-1] <= 1:
                raise UsageError(f"{path}:{number}: {_COLUMN} is {text}, but it must be above 0 and at most 1")
    if not ratios:
        raise UsageError(f"{path}: there are no mask ratios, but at least one is needed")
    return ratios


@dataclass(frozen=True, slots=True)
class EditDraws:
    """Random draws of the edits of a trace.

    Attributes:
        share: share of the requests that are edits, above 0 and up to 1.
        ratios: distribution of their mask ratios.
        num_templates: number of pictures of the emoji data set that are edited.
        skew: template n is requested in proportion to 1 / n ** skew (Zipf); 0 for a uniform distribution.
        strength: strength of every edit.
        most_references: most images that an edit shows to the model in place of a mask, of which it has at least one;
            None for edits by masks.

    Raises:
        UsageError: a field is out of its range.
    """

    share: float
    ratios: MaskRatios
    num_templates: int = 20
    skew: float = 1.0
    strength: float = 1.0
    most_references: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UsageError(f"share of edits is {self.share:g}, but it must be above 0 and at most 1")
        require_counts({"number of templates": self.num_templates, "number of references": self.most_references})
        if self.num_templates > _MAX_PICTURES:
            raise UsageError(f"number of templates is {self.num_templates}, but it must be at most {_MAX_PICTURES}")
        if not 0 <= self.skew < math.inf:
            raise UsageError(f"skew of templates is {self.skew:g}, but it must be finite and not negative")

    def thresholds(self) -> NDArray[np.float64]:
        """Return the cumulative probabilities of the templates, (templates,), ending at 1."""
        weights = np.cumsum(np.arange(1, self.num_templates + 1, dtype=float) ** -self.skew)
        return weights / weights[-1]

    def next(self, rng: np.random.Generator, thresholds: NDArray[np.float64]) -> TracedEdit | None:
        """Return the next request's edit, or None for a new image; both cases draw the same number of random values."""
        is_edit, ratio, template, shape = rng.random(4)
        seed = int(rng.integers(2**32))
        if is_edit >= self.share:
            return None
        if self.most_references is not None:
            # Of a generator of their own: other requests of the trace do not depend on their number.
            more = np.random.default_rng(seed).random(int(ratio * self.most_references))
            images = [self._picture(thresholds, each) for each in (template, *more)]
            return TracedEdit(images[0], references=tuple(images[1:]))
        mask = f"{SHAPES[int(shape * len(SHAPES))]}:{seed}"
        picture = self._picture(thresholds, template)
        return TracedEdit(picture, mask, round(self.ratios.quantile(ratio), 6), self.strength)

    def _picture(self, thresholds: NDArray[np.float64], share: float) -> str:
        return f"{_PICTURE}{np.searchsorted(thresholds[:-1], share, side='right')}"


def traced_edit(
    image: str,
    mask: str | None,
    mask_ratio: float | None,
    strength: float | None,
    references: Sequence[str],
    folder: Path,
) -> TracedEdit:
    """Return the edit of a line of a trace.

    Args:
        image: `emoji:NUMBER`, a picture of the data set, or the path of an image.
        mask: `box:SEED`, `ellipse:SEED` or `blob:SEED`, or the path of a mask; None for a new image that follows the
            image.
        mask_ratio: ratio of the mask; for a file, None computes it from the file.
        strength: strength of the edit; None for 1.
        references: further images.
        folder: folder that relative paths start from.

    Raises:
        UsageError: a shape has no ratio, a number is invalid, a mask's file cannot be read, or a field is out of its
            range.
    """
    image = _image_in(folder, "image", image)
    others = tuple(_image_in(folder, "references", each) for each in references)
    strength = 1.0 if strength is None else strength
    if mask is None:
        return TracedEdit(image, "", 1.0 if mask_ratio is None else mask_ratio, strength, others)
    if mask.partition(":")[0] in SHAPES and ":" in mask:
        _number_of(mask, "mask", 2**63)
        if mask_ratio is None:
            raise UsageError(f"mask_ratio is missing, but the mask {mask} needs it")
    else:
        mask = str((folder / mask).absolute())
        if mask_ratio is None:
            mask_ratio = float(read_mask(_content(mask), mask).mean())
    return TracedEdit(image, mask, mask_ratio, strength, others)


def _image_in(folder: Path, name: str, image: str) -> str:
    if image.startswith(_PICTURE):
        _number_of(image, name, _MAX_PICTURES)
        return image
    return str((folder / image).absolute())


def with_pixels(request: Request) -> Request:
    """Return the request with the image and the mask that its trace names; a request without a mask is unchanged.

    Raises:
        UsageError: a file cannot be read, or image, mask and resolution do not fit.
        RunError: a picture of the data set cannot be drawn, because resvg is not installed.
    """
    traced = request.traced
    if traced is None or not traced.mask:
        return request
    image = image_of(traced.image, request.resolution)
    return replace(request, edit=EditSpec(image, mask_of(request), traced.strength))


@lru_cache(maxsize=256)
def image_of(name: str, resolution: Resolution) -> NDArray[np.uint8]:
    """Return the pixels (height, width, 3) of an image of a trace; a picture of the data set has this resolution.

    Raises as `with_pixels`.
    """
    if not name.startswith(_PICTURE):
        return read_image(_content(name), name)
    from ..emoji.dataset import EmojiDataset

    index = _number_of(name, "image", _MAX_PICTURES)
    return np.asarray(EmojiDataset(resolution, index + 1).image(index).convert("RGB"))


def size_of_image(name: str, resolution: Resolution) -> Resolution:
    """Return the size of what `image_of` returns. Raises UsageError if the file cannot be read."""
    return resolution if name.startswith(_PICTURE) else Resolution(*size_of(_content(name), name, MAX_PIXELS))


def mask_of(request: Request) -> NDArray[np.bool_]:
    """Return the mask (height, width) that a trace names. Raises UsageError.

    A drawn mask has the requested area within 1 %, or as close as whole pixels allow.
    """
    traced = request.traced
    assert traced is not None, "only edits have masks"
    shape, _, seed = traced.mask.partition(":")
    if shape in SHAPES and seed:
        return drawn_mask(shape, int(seed), traced.mask_ratio, request.resolution)
    return read_mask(_content(traced.mask), traced.mask)


def drawn_mask(shape: str, seed: int, ratio: float, resolution: Resolution) -> NDArray[np.bool_]:
    """Draw a box, an ellipse or a blob that covers this share of the image, at a random place.

    Its centre is on a multiple of eight pixels, so that even the smallest mask contains a latent.
    """
    rng = np.random.default_rng([seed, *resolution])
    width, height = resolution
    middle = [int(rng.integers(side // RESOLUTION_MULTIPLE)) * RESOLUTION_MULTIPLE for side in (height, width)]
    stretch = 2.0 ** rng.uniform(-1, 1)
    if shape == "box":
        return _box(middle, stretch, ratio, resolution)
    down, right = np.mgrid[:height, :width].astype(np.float32)
    down, right = (down - middle[0]) * math.sqrt(stretch), (right - middle[1]) / math.sqrt(stretch)
    reach = np.hypot(down, right)
    if shape == "blob":
        angle, bulge = np.arctan2(down, right), np.ones_like(reach)
        for wave in range(1, _WAVES + 1):
            bulge += 0.25 / wave**0.5 * np.cos((wave + 1) * angle + rng.uniform(0, 2 * math.pi))
        reach /= bulge
    # The nearest `count` pixels, however much of the shape is beyond the image's edge.
    count = min(reach.size, max(1, round(ratio * reach.size)))
    mask = np.zeros(reach.size, dtype=bool)
    mask[np.argpartition(reach, count - 1, axis=None)[:count]] = True
    return mask.reshape(reach.shape)


def _box(middle: Sequence[int], stretch: float, ratio: float, resolution: Resolution) -> NDArray[np.bool_]:
    width, height = resolution
    wanted = ratio * resolution.pixels
    # The width nearest to the drawn one whose area is within the tolerance; if none is, the one with the best area.
    widths = np.arange(1, width + 1)
    heights = np.clip(np.rint(wanted / widths), 1, height).astype(int)
    off = np.maximum(np.abs(widths * heights / wanted - 1), _TOLERANCE)
    unlike = np.abs(np.log(widths / math.sqrt(wanted * stretch)))
    best = int(np.lexsort((unlike, off))[0])
    box_width, box_height = int(widths[best]), int(heights[best])
    top = min(max(0, middle[0] - box_height // 2), height - box_height)
    left = min(max(0, middle[1] - box_width // 2), width - box_width)
    mask = np.zeros((height, width), dtype=bool)
    mask[top : top + box_height, left : left + box_width] = True
    return mask


def _content(path: str) -> bytes:
    from ..datasets.decode import read_content

    return read_content(Path(path))


def _number_of(text: str, name: str, most: int) -> int:
    number = text.partition(":")[2]
    if not number.isascii() or not number.isdigit() or len(number) > 20 or int(number) >= most:
        raise UsageError(f"{name} is {text!r}, but after the colon there must be a whole number below {most}")
    return int(number)
