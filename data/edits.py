"""Edits: the image to start from, and the mask of what may change in it (InstGenIE section 2.1); and references.

No torch.
"""

import hashlib
import io
import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .checks import require_text
from .datasets.decode import decode, decode_rgb, size_of
from .errors import UsageError
from .resolution import Resolution
from .templates import TemplateKind

MAX_PIXELS = 1 << 26
"""Maximum number of pixels of an image to edit, or of a mask."""
MAX_FEATHER_PX = 256
MAX_DILATE = 64
WHOLE_STRENGTH = 0.6
"""Strength of an edit without a mask, unless it is given."""
_WHITE = 128


class Picture:
    """Anything with an image, (height, width, 3) uint8."""

    __slots__ = ()
    image: NDArray[np.uint8]

    @property
    def resolution(self) -> Resolution:
        """Size of the image in pixels."""
        return Resolution(self.image.shape[1], self.image.shape[0])

    @property
    def digest(self) -> str:
        """Digest of the image's pixels and its size."""
        found = hashlib.sha256(str(self.resolution).encode())
        found.update(self.image.tobytes())
        return found.hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class Reference(Picture):
    """An image that the model sees beside the prompt; nothing of it is copied to the result.

    Attributes:
        image: (height, width, 3) uint8, at the size at which the model sees it.
        view: the same image, (height, width, 3), at the size at which a text encoder that sees images does, if it is
            another; None for `image`.

    Raises:
        UsageError: the image or its view has another shape or dtype.
    """

    image: NDArray[np.uint8]
    view: NDArray[np.uint8] | None = None

    def __post_init__(self) -> None:
        require_rgb("a reference", self.image)
        if self.view is not None:
            require_rgb("a reference", self.view)


@dataclass(frozen=True, slots=True)
class TemplateSpec:
    """Template that edits of one image share, so that the part that they keep is computed once (InstGenIE section 3.1).

    Attributes:
        prompt: description of the whole image.
        seed: seed of the noise outside masks.
        kind: kind of the record. The record of a generation has its own prompt and seed, so that none may be given.
        owner: owner of the record that is made of it, which only edits of this owner read; "" if all may read it.
    """

    prompt: str = ""
    seed: int = 0
    kind: TemplateKind = "noised"
    owner: str = ""

    def __post_init__(self) -> None:
        require_text("the template's prompt", self.prompt)
        if not 0 <= self.seed < 1 << 63:
            raise UsageError(f"the template's seed is {self.seed}, but it must be from 0 to {(1 << 63) - 1}")
        if self.kind == "trajectory" and (self.prompt or self.seed):
            raise UsageError("template_kind trajectory is of a generation, which has its prompt and seed already")


@dataclass(frozen=True, slots=True, eq=False)
class EditSpec(Picture):
    """An edit of an image: the masked part is drawn anew, the rest stays.

    Attributes:
        image: (height, width, 3) uint8.
        mask: (height, width) bool, true where the image may change.
        strength: share of the denoising steps that are taken, above 0 and up to 1; determines how far the image is
            noised first.
        paste: whether pixels outside the mask are those of the image, byte for byte, rather than its decoded latents.
        feather_px: width in pixels, inside the mask's edge, over which the new image fades into the old one.
        template: template whose record is read if there is one, and whose noise is then used outside the mask. None for
            an edit as in diffusers' pipelines, which draw all noise from the request's own seed.
        full_steps: number of first steps that compute the whole image although there is a record.
        dilate: number of cells around the touched ones that are also computed when a record is read; the image still
            changes only inside the mask.
        is_whole: whether the whole image is redrawn as by image-to-image pipelines, which have no mask.

    Raises:
        UsageError: a field is out of its range, or image and mask differ in size.
    """

    image: NDArray[np.uint8]
    mask: NDArray[np.bool_]
    strength: float = 1.0
    paste: bool = True
    feather_px: int = 0
    template: TemplateSpec | None = None
    full_steps: int = 0
    dilate: int = 0
    is_whole: bool = False

    def __post_init__(self) -> None:
        require_rgb("the image to edit", self.image)
        if self.mask.ndim != 2 or self.mask.dtype != np.bool_:
            raise UsageError(f"the mask is {_described(self.mask)}, but must be (height, width) of bool")
        if self.mask.shape != self.image.shape[:2]:
            height, width = self.mask.shape
            raise UsageError(f"the mask has {width}x{height} pixels, but the image to edit has {self.resolution}")
        if not self.mask.any():
            raise UsageError(
                "the mask is empty: nothing of the image may change; white is what is edited, or in a file with an "
                "alpha channel what is transparent"
            )
        if not isinstance(self.strength, (int, float)) or isinstance(self.strength, bool) or not 0 < self.strength <= 1:
            raise UsageError(f"strength is {self.strength!r}, but it must be a number above 0 and up to 1")
        if type(self.feather_px) is not int or not 0 <= self.feather_px <= MAX_FEATHER_PX:
            raise UsageError(
                f"feather_px is {self.feather_px!r}, but it must be a whole number from 0 to {MAX_FEATHER_PX}"
            )
        if type(self.full_steps) is not int or self.full_steps < 0:
            raise UsageError(f"full_steps is {self.full_steps!r}, but it must be a whole number from 0")
        if type(self.dilate) is not int or not 0 <= self.dilate <= MAX_DILATE:
            raise UsageError(
                f"dilate is {self.dilate!r}, but it must be a whole number of cells from 0 to {MAX_DILATE}"
            )
        if self.feather_px and not self.paste:
            raise UsageError("feather_px fades the new image into the old one, so it needs paste")

    @classmethod
    def of_whole_image(cls, image: NDArray[np.uint8], strength: float) -> Self:
        """Return an edit that redraws the whole image, noised to `strength`, as image-to-image pipelines do."""
        return cls(image, np.ones(image.shape[:2], dtype=bool), strength, paste=False, is_whole=True)

    @classmethod
    def with_defaults(
        cls, image: NDArray[np.uint8], mask: NDArray[np.bool_] | None, strength: float | None, **of_mask: Any
    ) -> Self:
        """Return an edit whose mask or strength may be missing.

        Without a mask, the whole image is redrawn, with `WHOLE_STRENGTH` by default; `of_mask`, the other fields, are
        of edits with one.
        """
        if mask is None:
            return cls.of_whole_image(image, WHOLE_STRENGTH if strength is None else strength)
        return cls(image, mask, 1.0 if strength is None else strength, **of_mask)

    @property
    def mask_ratio(self) -> float:
        """Share of the pixels that may change."""
        return float(self.mask.mean())


def read_image(content: bytes, name: str) -> NDArray[np.uint8]:
    """Return the pixels (height, width, 3) of an image file, upright. Raises UsageError if it is no image, animated or
    too large.
    """
    _check(content, name)
    return np.asarray(decode_rgb(content, name))


def read_mask(content: bytes, name: str) -> NDArray[np.bool_]:
    """Return the mask (height, width) of an image file, upright; true where the image may change.

    If the file has transparency, the mask is its transparent part, as in OpenAI's API; otherwise it is the white part,
    grey values of 128 and above.

    Raises:
        UsageError: the file is no image, animated or too large.
    """
    _check(content, name)
    image = decode(content, name)
    if image.mode == "RGBA":
        return np.asarray(image.getchannel("A")) < _WHITE
    return np.asarray(image.convert("L")) >= _WHITE


def has_alpha(content: bytes) -> bool:
    """Return whether an image file, which was read before, has transparency that can serve as a mask."""
    with Image.open(io.BytesIO(content)) as image:
        return image.has_transparency_data


def own_mask(content: bytes, name: str) -> NDArray[np.bool_] | None:
    """Return the transparent part (height, width) of an image file, which was read before; None if it has none."""
    mask = read_mask(content, name) if has_alpha(content) else None
    return None if mask is None or not mask.any() else mask


def latent_mask(mask: NDArray[np.bool_], factor: int) -> NDArray[np.bool_]:
    """Return which latents may change, (height / factor, width / factor), as in diffusers: the upper left pixel of each
    latent, the nearest one, decides.

    Raises:
        UsageError: no latent may change.
    """
    found = mask[::factor, ::factor]
    if not found.any():
        raise UsageError(
            f"the mask is too thin: of no latent, {factor}x{factor} pixels, it has the upper left pixel; make it wider"
        )
    return found


def soft_latent_mask(mask: NDArray[np.bool_], factor: int) -> NDArray[np.float32]:
    """Return how much of each latent may change, (height / factor, width / factor), from 0 to 1: the share of the four
    pixels around its middle that the mask has, as bilinear interpolation weighs them.

    Raises:
        UsageError: no latent may change.
    """
    height, width = (side // factor for side in mask.shape)
    middle, tiles = slice(factor // 2 - 1, factor // 2 + 1), mask.reshape(height, factor, width, factor)
    found = tiles[:, middle, :, middle].mean(axis=(1, 3), dtype=np.float32)
    if not found.any():
        raise UsageError(
            f"the mask is too thin: of no latent, {factor}x{factor} pixels, it has one in the middle; make it wider"
        )
    return found


def active_share(mask: NDArray[Any], cell: int, dilate: int = 0) -> float:
    """Return the share of active cells (`active_cells`), of `cell` latents on a side."""
    return float(active_cells(mask, cell, dilate).mean())


def active_cells(mask: NDArray[Any], cell: int, dilate: int = 0) -> NDArray[np.bool_]:
    """Return which cells are active, (height / cell, width / cell), both rounded up. A cell is active if it is at most
    `dilate` cells, straight or diagonally, away from one in which a latent may change; `mask` is of latents, which may
    change where it is true or not 0.
    """
    height, width = (math.ceil(side / cell) for side in mask.shape)
    padded = np.zeros((height * cell, width * cell), dtype=bool)
    padded[: mask.shape[0], : mask.shape[1]] = mask
    touched = np.asarray(padded.reshape(height, cell, width, cell).any(axis=(1, 3)))
    side = 2 * dilate + 1
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(touched, dilate), (side, side))
    return np.asarray(windows.any(axis=(2, 3)))


def require_rgb(name: str, image: NDArray[Any]) -> None:
    """Raise UsageError unless these are the pixels of an image; the message calls them `name`."""
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or not image.size:
        raise UsageError(f"{name} is {_described(image)}, but it must be (height, width, 3) of uint8")


def _check(content: bytes, name: str) -> None:
    size_of(content, name, MAX_PIXELS)
    with Image.open(io.BytesIO(content)) as image:
        # Photographs of some phones contain a second, small image.
        frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
    if frames > 1:
        raise UsageError(f"{name}: an animation of {frames} images, but one image is edited at a time")


def _described(array: NDArray[Any]) -> str:
    return f"{array.shape} of {array.dtype}"
