"""Figures of the bundled models' cards, computed from plain images and labels, so that any data can be measured.

CLIP judges objects, zero-shot among all object names; the pixels at the border determine backgrounds, so that the two
figures do not share a judge.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ...data.errors import UsageError
from ..metrics.clip import TEMPLATES, Clip, clip_scores, retrieval_recall, zero_shot
from ..metrics.features import features_of_images
from ..metrics.fid import frechet_distance
from ..metrics.images import AnyImage, batches_by_size, to_array
from ..metrics.psnr import psnr

BORDER_SHARE = 0.04


def measure_autoencoder_psnr(
    vae: Any, images: Mapping[str, Sequence[AnyImage]], batch_size: int = 8
) -> dict[str, float]:
    """Return the mean PSNR in dB of 8-bit images after encoding and decoding, by resolution.

    Args:
        vae: a diffusers `AutoencoderKL`; the mode of its latent distribution is decoded, without sampling.
        images: images of each resolution; sides must be multiples of the autoencoder's factor.
        batch_size: number of images in a batch.

    Raises:
        UsageError: a resolution has no images.
    """
    figures = {}
    for resolution, originals in images.items():
        if not len(originals):
            raise UsageError(f"resolution {resolution}: at least one image is needed, but none was given")
        values = [
            psnr(new, old)
            for _, batch in batches_by_size(enumerate(originals), batch_size)
            for new, old in zip(reconstruct(vae, batch), _arrays(batch), strict=True)
        ]
        figures[resolution] = float(np.mean(values))
    return figures


@torch.inference_mode()
def reconstruct(vae: Any, images: torch.Tensor) -> list[np.ndarray]:
    """Encode and decode uint8 images (n, 3, height, width); the result is rounded to uint8 (height, width, 3) again."""
    parameter = next(vae.parameters())
    x = images.to(parameter.device, torch.float32) / 127.5 - 1
    latents = vae.encode(x.to(parameter.dtype)).latent_dist.mode()
    decoded = vae.decode(latents).sample.float().clamp(-1, 1)
    return _arrays(((decoded + 1) * 127.5).round().to(torch.uint8))


def measure_clip_retrieval(
    clip: Clip, images: Sequence[AnyImage], captions: Sequence[str], meanings: Sequence[str] | None = None
) -> dict[str, float]:
    """Return recall at 1 and 5 among all pairs, in both directions, and the CLIP score.

    Args:
        clip: the judge.
        images, captions: n pairs.
        meanings: meaning of each caption, independent of its wording; captions with the same meaning are equally right.
            None for the captions themselves.

    Raises:
        UsageError: the numbers differ, or there are fewer than 5.
    """
    meanings = captions if meanings is None else meanings
    if len(meanings) != len(captions):
        raise UsageError(f"{len(meanings)} meanings were given for {len(captions)} captions, but there must be as many")
    if len(images) != len(captions) or len(images) < 5:
        raise UsageError(f"{len(images)} images and {len(captions)} captions given, but 5 or more pairs are needed")
    seen, said = clip.embed_images(images), clip.embed_texts(captions)
    return {
        f"{way}_recall_at_{k}": retrieval_recall(queries, candidates, meanings, k)
        for way, queries, candidates in (("image_to_text", seen, said), ("text_to_image", said, seen))
        for k in (1, 5)
    } | {"clip_score": float(clip_scores(seen, said).mean())}


def measure_objects(
    clip: Clip,
    images: Sequence[AnyImage],
    objects: Sequence[Sequence[str]],
    names: Sequence[str],
    templates: Sequence[str] = TEMPLATES,
    *,
    describe: Callable[[str], str] = str,
) -> dict[str, float]:
    """Measure whether CLIP recognises, among all names, the objects that each image should show.

    Args:
        clip: the judge.
        images: n images, real or generated.
        objects: n collections with the names of the objects that each image should show.
        names: all object names, each once.
        templates: texts around a name.
        describe: returns the text for a name in a template, for example the name with its article. A small CLIP needs
            the wording that it was trained on: with articles, one recognised twice as many objects.

    Returns:
        `object_at_1`: share of images whose nearest name is one of theirs; `all_objects`: share of images whose m
        nearest names are exactly the m that they should show.

    Raises:
        UsageError: the numbers differ, an image has no object, or an object is not among the names.
    """
    _require_labels(images, objects)
    index = {name: i for i, name in enumerate(names)}
    for shown in objects:
        wrong = [name for name in shown if name not in index]
        if wrong or not shown:
            raise UsageError(f"objects are {list(shown)!r}, but must be one or more of the {len(names)} names")
    truth = [{index[name] for name in shown} for shown in objects]
    most = max(len(each) for each in truth)
    nearest = zero_shot(
        clip.embed_images(images), clip.embed_classes([describe(name) for name in names], templates), most
    ).tolist()
    judged = list(zip(nearest, truth, strict=True))
    return {
        "object_at_1": float(np.mean([found[0] in true for found, true in judged])),
        "all_objects": float(np.mean([set(found[: len(true)]) == true for found, true in judged])),
    }


def measure_backgrounds(
    images: Sequence[AnyImage], backgrounds: Sequence[str], palette: Mapping[str, tuple[int, int, int]]
) -> float:
    """Return the share of images whose border has the expected colour.

    Raises:
        UsageError: the numbers differ, there is no image, or a background is not in the palette.
    """
    _require_labels(images, backgrounds)
    unknown = sorted(set(backgrounds) - set(palette))
    if unknown:
        raise UsageError(f"backgrounds {unknown} are not in the palette: {', '.join(palette)}")
    found = [background_of(image, palette) for image in images]
    return float(np.mean([one == other for one, other in zip(found, backgrounds, strict=True)]))


def background_of(image: AnyImage, palette: Mapping[str, tuple[int, int, int]]) -> str:
    """Return the palette colour that most pixels of the border are nearest to (Euclidean in RGB).

    The border is 4 % of the shorter side wide. The pixels vote, because an object may extend into the border.
    """
    pixels = to_array(image).astype(np.int64)
    height, width = pixels.shape[:2]
    thickness = max(1, round(BORDER_SHARE * min(height, width)))
    is_border = np.ones((height, width), dtype=bool)
    is_border[thickness : height - thickness, thickness : width - thickness] = False
    colours = np.array(list(palette.values()), dtype=np.int64)
    distances = ((pixels[is_border][:, None, :] - colours[None]) ** 2).sum(-1)
    votes = np.bincount(distances.argmin(1), minlength=len(colours))
    return list(palette)[int(votes.argmax())]


def measure_generated(
    clip: Clip,
    images: Sequence[AnyImage],
    objects: Sequence[Sequence[str]],
    backgrounds: Sequence[str],
    *,
    names: Sequence[str],
    palette: Mapping[str, tuple[int, int, int]],
    real_images: Sequence[AnyImage],
    templates: Sequence[str] = TEMPLATES,
    describe: Callable[[str], str] = str,
) -> dict[str, float]:
    """Measure objects and backgrounds of generated images, and the object rate relative to real images of the labels.

    Args:
        clip, names, templates, describe: as in `measure_objects`.
        images: n generated images.
        objects, backgrounds: objects and background that each image should show.
        palette: background colours as RGB levels, by name.
        real_images: real images with the same labels, in the same order.

    Returns:
        `object_at_1`, `all_objects`, `background`, `real_object_at_1`, and `object_at_1_of_real` (their quotient;
        0 if the judge recognises no real image).

    Raises:
        UsageError: as `measure_objects` and `measure_backgrounds`.
    """
    seen = measure_objects(clip, images, objects, names, templates, describe=describe)
    real_rate = measure_objects(clip, real_images, objects, names, templates, describe=describe)["object_at_1"]
    return {
        **seen,
        "background": measure_backgrounds(images, backgrounds, palette),
        "real_object_at_1": real_rate,
        "object_at_1_of_real": seen["object_at_1"] / real_rate if real_rate else 0.0,
    }


def fid_of_images(real: Sequence[AnyImage], generated: Sequence[AnyImage], extractor: nn.Module) -> float:
    """Return the FID of two collections of images of any sizes. Raises UsageError with fewer than two on a side."""
    return frechet_distance(*(features_of_images(enumerate(side), extractor) for side in (real, generated)))


def _arrays(images: torch.Tensor) -> list[np.ndarray]:
    """Return uint8 images (n, 3, height, width) as arrays (height, width, 3)."""
    return list(images.permute(0, 2, 3, 1).cpu().numpy())


def _require_labels(images: Sequence[AnyImage], labels: Sequence[Any]) -> None:
    if len(images) != len(labels) or not len(images):
        raise UsageError(
            f"{len(labels)} labels were given for {len(images)} images, but there must be one for each, at least one"
        )
