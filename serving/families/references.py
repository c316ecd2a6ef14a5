"""References, images that a model sees beside the one that it draws: how many it takes, and at which sizes.

No torch, and nothing heavy at import.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING

from ...data.errors import UsageError
from ...data.resolution import Resolution

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

    from ...data.edits import Reference

MOST_PIXELS, LOW_PIXELS = 1024 * 1024, 512 * 512
"""Most pixels of a reference of FLUX.2, and of one of low fidelity; larger images are scaled down."""
VIEW_PIXELS = 384 * 384
"""Pixels of a reference as the text encoder of Qwen-Image-Edit's later versions sees it."""
_NARROW = ((672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184), (944, 1104))
KONTEXT_SIZES = (
    *(Resolution(*sides) for sides in _NARROW),
    Resolution(1024, 1024),
    *(Resolution(wide, narrow) for narrow, wide in reversed(_NARROW)),
)
"""Sizes that FLUX.1 Kontext was trained on. Its pipeline scales images to the one of the nearest proportions."""


@dataclass(frozen=True, slots=True)
class ReferenceRule:
    """References that a family takes.

    Attributes:
        most: most references of a request.
        fit: brings an image to a size that the model takes, as its pipeline does, given the number of pixels of which
            sides must be multiples.
        fit_low: the same for references of low fidelity, which have fewer pixels; None if the model has one fidelity.
        view: brings an image to the size at which the text encoder sees it; None if it sees none, or the fitted image.
        in_place_of_own: whether, in an edit by a mask, given references take the place of the image itself, which is
            one of its references otherwise.
        takes_edits: whether the model also edits by masks and strengths.
    """

    most: int
    fit: "Callable[[Image, int], Image]"
    fit_low: "Callable[[Image, int], Image] | None" = None
    view: "Callable[[Image, int], Image] | None" = None
    in_place_of_own: bool = False
    takes_edits: bool = True

    def at_own_size(self, most_pixels: int) -> "ReferenceRule":
        """Return the rule of a model that sees images at their own size, or scaled down to so many pixels."""
        return replace(self, fit=_cropped_to(most_pixels))

    def fitted(self, image: "NDArray[np.uint8]", multiple: int, *, is_low: bool = False) -> "Reference":
        """Return an image (height, width, 3) as a reference, whose sides are multiples of `multiple` pixels; of low
        fidelity if that is asked for and there is one.

        Raises UsageError: a side of the image, or of what is left of it at that size, is smaller than that.
        """
        import numpy as np
        from PIL import Image

        from ...data.edits import Reference

        fit = self.fit_low if is_low and self.fit_low is not None else self.fit
        given = Image.fromarray(image)
        fitted = fit(given, multiple) if min(given.size) >= multiple else None
        if fitted is None or min(fitted.size) < multiple:
            raise UsageError(
                f"the reference has {given.width}x{given.height} pixels, but it must have {multiple}x{multiple} or "
                "more once it fits the model"
            )
        return Reference(np.asarray(fitted), None if self.view is None else np.asarray(self.view(given, multiple)))

    def check_number(self, number: int, name: str) -> None:
        """Raise UsageError if the model of this name does not take so many references."""
        if number > self.most:
            most = "one reference" if self.most == 1 else f"{self.most} references"
            raise UsageError(f"{number} references are given, but {name} takes {most} at most")

    def num_seen(self, num_others: int, *, is_masked: bool) -> int:
        """Return the number of references of a request that `seen` returns, given that of further images."""
        return num_others if is_masked and num_others and self.in_place_of_own else 1 + num_others

    def seen(
        self,
        image: "NDArray[np.uint8]",
        others: "Sequence[NDArray[np.uint8]]",
        multiple: int,
        *,
        is_masked: bool,
        is_low: bool = False,
    ) -> "tuple[Reference, ...]":
        """Return the references of a request that follows these images, or edits the first one by a mask.

        `multiple`, `is_low` and errors are those of `fitted`.
        """
        fitted = tuple(self.fitted(each, multiple, is_low=is_low) for each in others)
        return self.beside(image, fitted) if is_masked else (self.fitted(image, multiple, is_low=is_low), *fitted)

    def beside(self, image: "NDArray[np.uint8]", others: "Sequence[Reference]") -> "tuple[Reference, ...]":
        """Return the references of an edit by a mask of this image: (height, width, 3), at its own size, and others."""
        from ...data.edits import Reference

        return tuple(others) if others and self.in_place_of_own else (Reference(image), *others)


def _trained_size(image: "Image", multiple: int) -> "Image":
    from PIL.Image import Resampling

    del multiple  # all sizes are multiples of 16
    proportion = image.width / image.height
    size = min(KONTEXT_SIZES, key=lambda size: (abs(proportion - size.width / size.height), size))
    return image.resize(size, Resampling.LANCZOS)


def _cropped(image: "Image", multiple: int, most: int = MOST_PIXELS) -> "Image":
    """Scale an image down to `most` pixels if it has more, and cut off what exceeds a multiple, on both sides."""
    from PIL.Image import Resampling

    if (pixels := image.width * image.height) > most:
        factor = math.sqrt(most / pixels)
        image = image.resize((int(image.width * factor), int(image.height * factor)), Resampling.LANCZOS)
    width, height = (side // multiple * multiple for side in image.size)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


@cache
def _cropped_to(most: int) -> "Callable[[Image, int], Image]":
    """Return `_cropped` with its last argument; the same function each time, so that equal rules are equal."""
    return partial(_cropped, most=most)


def of_area(image: "Image", multiple: int, pixels: int = MOST_PIXELS) -> "Image":
    """Scale an image to about so many pixels, with sides that are multiples of 32, as `calculate_dimensions` does, but
    never 0.
    """
    from PIL.Image import Resampling

    del multiple  # 32 is one of all models
    width = math.sqrt(pixels * (image.width / image.height))
    height = width / (image.width / image.height)
    return image.resize((max(1, round(width / 32)) * 32, max(1, round(height / 32)) * 32), Resampling.LANCZOS)


KONTEXT = ReferenceRule(1, _trained_size, in_place_of_own=True)
"""The rule of FLUX.1 Kontext."""
CROPPED = ReferenceRule(10, _cropped, partial(_cropped, most=LOW_PIXELS))
"""The rule of FLUX.2, whose pipelines set no bound for their number."""
QWEN_EDIT = ReferenceRule(1, of_area, takes_edits=False)
"""The rule of Qwen-Image-Edit, whose pipeline scales images to about a megapixel."""
QWEN_EDIT_PLUS = ReferenceRule(10, of_area, view=partial(of_area, pixels=VIEW_PIXELS), takes_edits=False)
"""The rule of its later versions, whose pipeline sets no bound for their number."""
