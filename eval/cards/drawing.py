"""What pictures of model cards are drawn of, and drawing them on the engine."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from PIL import Image

from ...data.edits import Reference
from ...data.emoji.scene import BACKGROUNDS, with_article
from ...data.errors import RunError
from ...data.requests import Request
from ...data.resolution import Resolution
from ...serving.engine.collectors import InMemory
from ...serving.engine.engine import Engine
from ...serving.models.served import ServedModel
from ...serving.scheduling.policies import get_policy

SIZES = (Resolution(128, 128), Resolution(192, 192), Resolution(256, 256))
DATA_SEED = 2026
"""Seed of all measured pictures; training uses small seeds, so none of these was ever seen."""
NAME_TEMPLATES = tuple(f"{{}} on {with_article(ground)} background" for ground in BACKGROUNDS)


@dataclass(frozen=True, slots=True)
class CardOptions:
    """Extent of the measurements.

    Attributes:
        num_pairs: number of pairs of a real picture and its caption for the judge.
        num_generated: number of generated pictures for the object and background rates, over all three sizes.
        num_fid: number of generated and of real pictures of each size for FID; 0 omits FID.
        num_encoded: number of real pictures for the autoencoder's PSNR, over all three sizes.
        num_inference_steps: number of denoising steps; None for the model's default.
        seed: seed of the first generated picture.
    """

    num_pairs: int = 1000
    num_generated: int = 500
    num_fid: int = 1000
    num_encoded: int = 3 * 64
    num_inference_steps: int | None = None
    seed: int = 0


def shares(size: int, resolutions: Sequence[Resolution] = SIZES) -> Iterator[tuple[Resolution, int]]:
    """Yield resolutions, each with its share of `size` pictures that are spread evenly over them."""
    for position, resolution in enumerate(resolutions):
        yield resolution, size // len(resolutions) + (position < size % len(resolutions))


def steps_of(model: ServedModel, options: CardOptions) -> int:
    """Return the number of denoising steps of a picture."""
    return options.num_inference_steps or model.defaults.num_inference_steps


def takes_references(model: ServedModel) -> bool:
    return model.family.geometry.references is not None


def generate(
    model: ServedModel,
    captions: Sequence[str],
    resolutions: Sequence[Resolution],
    options: CardOptions,
    on_step: Callable[[int], None] = lambda steps: None,
    references: Sequence[Reference] = (),
) -> list[Image.Image]:
    """Generate one picture per caption on the engine, with seeds from `options.seed`, beside a reference each if there
    are any. Raises RunError if one fails.
    """
    engine = Engine(
        model,
        get_policy("continuous"),
        collector=InMemory(keep_images=True),
        on_step=lambda row: on_step(row.active),
        max_batch_size=16,
    )
    steps = steps_of(model, options)
    for index, (caption, resolution) in enumerate(zip(captions, resolutions, strict=True)):
        engine.submit(
            Request(
                index,
                caption,
                resolution,
                steps,
                model.defaults.guidance_scale,
                seed=options.seed + index,
                references=tuple(references[index : index + 1]),
            )
        )
    engine.close()
    result = engine.run()
    if result.was_interrupted:
        raise KeyboardInterrupt
    failed = [record for record in result.records if record.status != "completed"]
    if failed:
        raise RunError(f"{len(failed)} of {len(captions)} pictures failed; the first: {failed[0].reason}")
    return [result.images[index] for index in range(len(captions))]
