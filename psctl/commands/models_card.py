"""`psctl models card`: measures a bundled model on held-out data and writes its card."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ...data.errors import UsageError
from ...data.models.bundled import MODELS_DIR
from ..flags import flag
from ..options.common import Seed
from ..options.target import WHERE, Target
from ..output import Output


def models_card(
    *,
    name: Annotated[Literal["emoji-xl", "emoji-3", "emoji-clip"], typer.Argument(help="The bundled model to measure.")],
    models_dir: Annotated[
        Path, flag("--models-dir", "Folder that holds the bundled models, or models that psctl models train made.")
    ] = MODELS_DIR,
    num_images: Annotated[
        int, flag("--num-images", "Generated pictures for the object and background rates.", min=3)
    ] = 500,
    num_fid: Annotated[
        int, flag("--num-fid", "Generated pictures of each size for FID; 0 leaves it out.", min=0)
    ] = 1000,
    num_pairs: Annotated[int, flag("--num-pairs", "Real pictures with captions for emoji-clip.", min=15)] = 1000,
    num_inference_steps: Annotated[
        int | None, flag("--num-inference-steps", "Denoising steps; by default the model's own.", min=1, max=1000)
    ] = None,
    fid_weights: Annotated[
        Path | None, flag("--fid-weights", "Inception weights; looked for by default.", is_shared=True)
    ] = None,
    write: Annotated[
        bool, flag("--write", "Write README.md, figures.json and samples.png, and renew the checksums.")
    ] = False,
    seed: Seed = 0,
    target: Annotated[Target, WHERE.only("device", "dtype")],
    out: Output,
) -> None:
    """Measure a bundled model on held-out data; with --write, put the figures into its card.

    Generators are judged by the emoji-clip of the same folder and by the real Inception network.

    Examples:

        psctl models card emoji-clip
        psctl models card emoji-xl --num-images 90 --num-fid 0
        psctl models card emoji-3 --write
    """
    with out.status("Loading ..."):
        from ...eval.cards.cards import CardOptions, measure_generator, measure_judge, sample_grid, write_card
        from ...eval.metrics.clip import load_clip
        from ...serving.models.loading import load_model, resolve_device

    options = CardOptions(num_pairs, num_images, num_fid, num_inference_steps, seed)
    folder = models_dir / name
    for needed in (folder, models_dir / "emoji-clip"):
        if not needed.is_dir():
            raise UsageError(f"--models-dir is {models_dir}, but there is no {needed.name} in it")
    clip = load_clip(models_dir / "emoji-clip", resolve_device(target.device))
    grid = None
    if name == "emoji-clip":
        with out.status("Measuring ..."):
            figures: dict[str, Any] = measure_judge(clip, options)
    else:
        extractor = None
        if num_fid:
            from ...eval.metrics.inception import load_inception

            extractor = load_inception(fid_weights)
        model = load_model(str(folder), target.device, target.dtype)
        steps = num_inference_steps or model.defaults.num_inference_steps
        with out.phases() as start:
            advance = start("denoising steps", steps * (num_images + 3 * num_fid))
            figures = measure_generator(model, clip, options, extractor, advance)
        if write:
            grid = sample_grid(model, options)
    if write:
        write_card(name, models_dir, figures, options, grid)
    out.data(figures)
