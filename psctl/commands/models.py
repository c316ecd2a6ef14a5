"""`psctl models list|card|train`: the bundled models."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ...data.errors import UsageError
from ...data.models.bundled import BUNDLED, GENERATORS, MODELS_DIR, bundled_model_path
from ..flags import flag
from ..options.common import Seed
from ..options.target import WHERE, Target
from ..output import Output


def models_list(*, out: Output) -> None:
    """List the bundled models with their default sizes, steps and guidance scale.

    emoji-xl and emoji-3 draw images, emoji-edit changes an image after an instruction; emoji-clip measures how well
    images match their prompts.

    Examples:

        psctl models list
        psctl models list --json
    """
    from ...serving.models.defaults import read_defaults

    models = {}
    for name in BUNDLED:
        path = bundled_model_path(name)
        defaults = read_defaults(path) if name in GENERATORS else None
        models[name] = {
            "path": path,
            "megabytes": round(sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / 1e6, 1),
            "resolutions": None if defaults is None else [str(size) for size in defaults.resolutions],
            "num_inference_steps": None if defaults is None else defaults.num_inference_steps,
            "guidance_scale": None if defaults is None else defaults.guidance_scale,
        }

    def line(name: str) -> str:
        about = models[name]
        if about["resolutions"] is None:
            return f"{name}: judge of the CLIP score, {about['megabytes']} MB"
        sizes, steps = ", ".join(about["resolutions"]), about["num_inference_steps"]
        return f"{name}: draws {sizes} in {steps} steps, guidance {about['guidance_scale']:g}, {about['megabytes']} MB"

    out.data(models, table="\n".join(map(line, models)))


def models_card(
    *,
    name: Annotated[
        Literal["emoji-xl", "emoji-3", "emoji-xl-turbo", "emoji-edit", "emoji-clip"],
        typer.Argument(help="The bundled model to measure."),
    ],
    models_dir: Annotated[
        Path, flag("--models-dir", "Folder of the bundled models, or of models made by psctl models train.")
    ] = MODELS_DIR,
    num_images: Annotated[
        int, flag("--num-images", "Number of generated images for the object and background rates.", min=3)
    ] = 500,
    num_fid: Annotated[
        int, flag("--num-fid", "Number of generated images of each size for FID; 0 skips FID.", min=0)
    ] = 1000,
    num_pairs: Annotated[
        int, flag("--num-pairs", "Number of real images with captions for emoji-clip.", min=15)
    ] = 1000,
    num_inference_steps: Annotated[
        int | None, flag("--num-inference-steps", "Number of denoising steps. Default: the model's.", min=1, max=1000)
    ] = None,
    fid_weights: Annotated[
        Path | None, flag("--fid-weights", "Inception weights. Default: the installed ones.", is_shared=True)
    ] = None,
    write: Annotated[
        bool, flag("--write", "Write README.md, figures.json and samples.png, and update the checksums.")
    ] = False,
    seed: Seed = 0,
    target: Annotated[Target, WHERE.only("device", "dtype")],
    out: Output,
) -> None:
    """Measure a bundled model on held-out data. --write adds the figures to its model card.

    Generators are judged by the emoji-clip of the same folder and by the real Inception network, and the edits of
    emoji-edit by how near they come to the pictures that they should make.

    Examples:

        psctl models card emoji-clip
        psctl models card emoji-xl --num-images 90 --num-fid 0
        psctl models card emoji-3 --write
    """
    with out.status("Loading ..."):
        from ...eval.cards.cards import measure_generator, measure_judge, num_denoising_steps, sample_grid, write_card
        from ...eval.cards.drawing import CardOptions
        from ...eval.metrics.clip import load_clip
        from ...serving.models.loading import load_model
        from ...serving.models.placement import resolve_device

    options = CardOptions(num_pairs, num_images, num_fid, num_inference_steps=num_inference_steps, seed=seed)
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
        with out.phases() as start:
            advance = start("denoising steps", num_denoising_steps(model, options))
            figures = measure_generator(model, clip, options, extractor, advance)
        if write:
            grid = sample_grid(model, options)
    if write:
        write_card(name, models_dir, figures, options, grid)
    out.data(figures)


def models_train(
    *,
    part: Annotated[
        Literal["text", "autoencoder", "emoji-clip", "emoji-xl", "emoji-3", "emoji-xl-turbo", "emoji-edit", "all"],
        typer.Argument(help="Part to train. All but the first two need text and autoencoder."),
    ],
    steps: Annotated[
        int | None, flag("--steps", "Number of training steps. Default: as for the bundled weights.", min=1)
    ] = None,
    output: Annotated[
        Path | None, flag("--output", "Folder for finished models. Default: WORKSPACE/training/models.")
    ] = None,
    from_models: Annotated[
        Path | None,
        flag(
            "--from-models",
            "Start from the weights of finished models in this folder (emoji-clip, emoji-xl, emoji-3, emoji-edit).",
        ),
    ] = None,
    seed: Seed = 0,
    target: Annotated[Target, WHERE.only("device", "workspace")],
    out: Output,
) -> None:
    """Train a part of the bundled models; an interrupted training continues where it stopped.

    Checkpoints are in WORKSPACE/training/PART. To extend a finished training, pass more --steps: it continues from the
    state before the learning rate decayed. The order of training is text, autoencoder, emoji-clip, emoji-xl, emoji-3,
    emoji-xl-turbo, which is distilled from emoji-xl in stages of --steps each, emoji-edit, which starts from emoji-3.

    Examples:

        psctl models train text
        psctl models train emoji-xl --steps 20000 --device cuda
        psctl models train all --output my-models
        psctl models train emoji-xl --from-models my-models --steps 10000 --seed 1
    """
    from ...serving.models.placement import quiet_libraries, resolve_device

    quiet_libraries()
    from ...training.bundled.recipe import PARTS, Part, Reporter, train_part

    root = target.root.root / "training"
    models_dir = output or root / "models"

    def trained(name: Part) -> dict[str, Any]:
        figures: dict[str, float] = {}
        with out.phases() as start:

            def on_stage(stage: str, total: int) -> None:
                start(stage, total)

            def on_step(step: int, latest: dict[str, float]) -> None:
                figures.update(latest)
                start.last().advance_to(step)

            folder = train_part(
                name,
                root,
                models_dir,
                resolve_device(target.device),
                steps=steps,
                seed=seed,
                report=Reporter(on_stage, on_step, lambda: start.last()()),
                from_models=from_models,
            )
        out.note(f"{name}: finished, in {folder}")
        if folder.parent == models_dir:
            out.note(f"Measure it and write its card: psctl models card {name} --models-dir {models_dir} --write")
        return {"folder": str(folder), "last_figures": figures}

    out.data({name: trained(name) for name in (PARTS if part == "all" else (part,))})
