"""The last touch of an edit: pixels outside its mask are those of the image. No torch."""

from typing import TYPE_CHECKING

import numpy as np

from ...data.edits import EditSpec

if TYPE_CHECKING:
    from PIL.Image import Image


def pasted(image: "Image", edit: EditSpec) -> "Image":
    """The drawn image inside the mask, and around it the bytes of the one that was edited; as drawn if nothing is to be
    pasted. Within `feather_px` of the mask's edge, inside it, the one fades into the other.
    """
    from PIL import Image

    if not edit.paste:
        return image
    drawn = np.asarray(image.convert("RGB"))
    if not edit.feather_px:
        return Image.fromarray(np.where(edit.mask[..., None], drawn, edit.image))
    from scipy.ndimage import distance_transform_edt

    # Pixels from the outside, which begins at distance 1; the border of the image is no edge of the mask.
    depth = np.asarray(distance_transform_edt(edit.mask)) if not edit.mask.all() else np.full(edit.mask.shape, np.inf)
    share = np.clip(depth / (edit.feather_px + 1), 0, 1)[..., None]
    mixed = share * drawn + (1 - share) * edit.image
    return Image.fromarray(np.rint(mixed).astype(np.uint8))
