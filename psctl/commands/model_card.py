"""`psctl model-card`: measures a bundled model on held-out data and writes its card."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ...data.errors import UsageError
from ...data.models.bundled import MODELS_DIR
from ..options.common import Device, DType, Json, Quiet, Seed
from ..output import Output

ModelName = Literal["emoji-xl", "emoji-3", "emoji-clip"]


def model_card(
    name: Annotated[ModelName, typer.Argument(help="The bundled model to measure.")],
    models_dir: Annotated[
        Path, typer.Option(help="Folder that holds the bundled models, or models that train-model made.")
    ] = MODELS_DIR,
    num_images: Annotated[
        int, typer.Option(min=3, help="Generated pictures for the object and background rates.")
    ] = 500,
    num_fid: Annotated[
        int, typer.Option(min=0, help="Generated pictures of each size for FID; 0 leaves it out.")
    ] = 1000,
    num_pairs: Annotated[int, typer.Option(min=15, help="Real pictures with captions for emoji-clip.")] = 1000,
    num_inference_steps: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Denoising steps; by default the model's own.")
    ] = None,
    fid_weights: Annotated[
        Path | None, typer.Option(envvar="PSCTL_FID_WEIGHTS", help="Inception weights; looked for by default.")
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write README.md, figures.json and samples.png, and renew the checksums.")
    ] = False,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: DType = "auto",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure a bundled model on held-out data; with --write, put the figures into its card.

    Generators are judged by the emoji-clip of the same folder and by the real Inception network.

    Examples:

        psctl model-card emoji-clip

        psctl model-card emoji-xl --num-images 90 --num-fid 0

        psctl model-card emoji-3 --write
    """
    out = Output(json=json, quiet=quiet)
    with out.status("Loading ..."):
        from ...eval.cards.cards import CardOptions, measure_generator, measure_judge, sample_grid, write_card
        from ...eval.metrics.clip import load_clip
        from ...serving.models.loading import load_model, resolve_device

    options = CardOptions(num_pairs, num_images, num_fid, num_inference_steps, seed)
    folder = models_dir / name
    for needed in (folder, models_dir / "emoji-clip"):
        if not needed.is_dir():
            raise UsageError(f"--models-dir is {models_dir}, but it holds no {needed.name}")
    clip = load_clip(models_dir / "emoji-clip", resolve_device(device))
    grid = None
    if name == "emoji-clip":
        with out.status("Measuring ..."):
            figures: dict[str, Any] = measure_judge(clip, options)
    else:
        extractor = None
        if num_fid:
            from ...eval.metrics.inception import load_inception

            extractor = load_inception(fid_weights)
        model = load_model(str(folder), device, dtype)
        steps = num_inference_steps or model.defaults.num_inference_steps
        with out.progress() as progress:
            task = progress.add_task("denoising steps", total=steps * (num_images + 3 * num_fid))
            figures = measure_generator(model, clip, options, extractor, lambda count: progress.advance(task, count))
        if write:
            grid = sample_grid(model, options)
    if write:
        write_card(name, models_dir, figures, options, grid)
    out.data(figures)
