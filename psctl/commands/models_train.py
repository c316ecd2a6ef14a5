"""`psctl models train`: trains the parts of the bundled models."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..flags import flag
from ..options.common import Seed
from ..options.target import WHERE, Target
from ..output import Output

PartName = Literal["text", "autoencoder", "emoji-clip", "emoji-xl", "emoji-3", "all"]


def models_train(
    *,
    part: Annotated[PartName, typer.Argument(help="What to train; later parts need text and autoencoder.")],
    steps: Annotated[
        int | None, flag("--steps", "Optimisation steps; by default what the shipped weights took.", min=1)
    ] = None,
    output: Annotated[
        Path | None, flag("--output", "Where finished models go; by default WORKSPACE/training/models.")
    ] = None,
    from_models: Annotated[
        Path | None,
        flag(
            "--from-models", "Start from the weights of finished models in this folder; emoji-clip, emoji-xl, emoji-3."
        ),
    ] = None,
    seed: Seed = 0,
    target: Annotated[Target, WHERE.only("device", "workspace")],
    out: Output,
) -> None:
    """Train a part of the bundled models; an interrupted training continues where it stopped.

    Checkpoints lie in WORKSPACE/training/PART. To train a finished part longer, give more steps: training continues
    from before the learning rate fell. The order is text, autoencoder, emoji-clip, emoji-xl, emoji-3.

    Examples:

        psctl models train text
        psctl models train emoji-xl --steps 20000 --device cuda
        psctl models train all --output my-models
        psctl models train emoji-xl --from-models my-models --steps 10000 --seed 1
    """
    from ...serving.models.loading import quiet_libraries, resolve_device

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
                start.last().reach(step)

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
