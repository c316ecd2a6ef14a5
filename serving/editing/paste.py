"""The last stage of an edit, which restores the pixels of the image outside the mask. No torch."""

from typing import TYPE_CHECKING

import numpy as np

from ...data.edits import EditSpec

if TYPE_CHECKING:
    from PIL.Image import Image


def pasted(image: "Image", edit: EditSpec) -> "Image":
    """Return the drawn image inside the mask and the edited image, byte for byte, outside it.

    Inside the mask, within `feather_px` of its edge, one image fades into the other. Without `edit.paste`, return the
    drawn image.
    """
    from PIL import Image

    if not edit.paste:
        return image
    drawn = np.asarray(image.convert("RGB"))
    if not edit.feather_px:
        return Image.fromarray(np.where(edit.mask[..., None], drawn, edit.image))
    from scipy.ndimage import distance_transform_edt

    # Distance in pixels to the outside, from 1 on; the border of the image is not an edge of the mask.
    depth = np.asarray(distance_transform_edt(edit.mask)) if not edit.mask.all() else np.full(edit.mask.shape, np.inf)
    share = np.clip(depth / (edit.feather_px + 1), 0, 1)[..., None]
    mixed = share * drawn + (1 - share) * edit.image
    return Image.fromarray(np.rint(mixed).astype(np.uint8))
