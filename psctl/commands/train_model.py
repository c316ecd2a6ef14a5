"""`psctl train-model`: trains the parts of the bundled models."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from ...data.workspace import DEFAULT_WORKSPACE
from ..options.common import Device, Json, Quiet, Seed, WorkspaceRoot
from ..output import Output

PartName = Literal["text", "autoencoder", "emoji-clip", "emoji-xl", "emoji-3", "all"]


def train_model(
    part: Annotated[PartName, typer.Argument(help="What to train; later parts need text and autoencoder.")],
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimisation steps; by default what the shipped weights took.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where finished models go; by default WORKSPACE/training/models.")
    ] = None,
    from_models: Annotated[
        Path | None,
        typer.Option(help="Start from the weights of finished models in this folder; emoji-clip, emoji-xl, emoji-3."),
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    workspace: WorkspaceRoot = Path(DEFAULT_WORKSPACE),
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a part of the bundled models; an interrupted training goes on where it stopped.

    Checkpoints lie in WORKSPACE/training/PART. A finished training is made longer by giving more steps: it goes on from
    before its learning rate fell. The order is text, autoencoder, emoji-clip, emoji-xl, emoji-3.

    Examples:

        psctl train-model text

        psctl train-model emoji-xl --steps 20000 --device cuda

        psctl train-model all --output my-models

        psctl train-model emoji-xl --from-models my-models --steps 10000 --seed 1
    """
    out = Output(json=json, quiet=quiet)
    from ...serving.models.loading import quiet_libraries, resolve_device

    quiet_libraries()
    from ...training.bundled.recipe import PARTS, Reporter, train_part

    root = workspace / "training"
    models_dir = output or root / "models"
    parts = PARTS if part == "all" else (part,)
    finished = {}
    for name in parts:
        with out.progress() as progress:
            figures: dict[str, float] = {}
            task = progress.add_task(name, total=None)

            def on_stage(stage: str, total: int) -> None:
                progress.reset(task, description=stage, total=total or None)  # noqa: B023

            def on_step(step: int, latest: dict[str, float]) -> None:
                figures.update(latest)  # noqa: B023
                progress.update(task, completed=step)  # noqa: B023

            report = Reporter(on_stage, on_step, lambda: progress.advance(task))  # noqa: B023
            torch_device = resolve_device(device)
            folder = train_part(
                name, root, models_dir, torch_device, steps=steps, seed=seed, report=report, from_models=from_models
            )
        finished[name] = {"folder": str(folder), "last_figures": figures}
        out.note(f"{name}: finished, in {folder}")
        if folder.parent == models_dir:
            out.note(f"Measure it and write its card: psctl model-card {name} --models-dir {models_dir} --write")
    out.data(finished)
