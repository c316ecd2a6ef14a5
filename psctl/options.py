"""Options that several commands share, so that they have one name, one help text and one environment variable.

A command annotates its parameters with them and gives the default itself: `def serve(model: Model = "emoji-xl", ...)`.
Shared options read `PSCTL_<OPTION>`; every option also reads `PSCTL_<COMMAND>_<OPTION>`, where the shared one wins.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from ..serving.stepper import EngineName, KernelsName, OrderName, StrategyName

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="Bundled model name, local diffusers folder, or hub id.",
        envvar="PSCTL_MODEL",
        metavar="NAME|DIR|ID",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device", help="auto, cpu, cuda or cuda:N; auto takes a GPU if there is one.", envvar="PSCTL_DEVICE"
    ),
]
DType = Annotated[
    DTypeName,
    typer.Option("--dtype", help="Number format of the denoising; auto suits the device.", envvar="PSCTL_DTYPE"),
]
EngineChoice = Annotated[
    EngineName,
    typer.Option(
        "--engine",
        help="patched: all resolutions in one batch; plain: unmodified diffusers, a batch per resolution.",
        envvar="PSCTL_ENGINE",
    ),
]
Order = Annotated[
    OrderName,
    typer.Option("--order", help="How tokens are packed; auto: image on a CPU, patch on a GPU.", envvar="PSCTL_ORDER"),
]
PatchSize = Annotated[
    int | None,
    typer.Option(
        "--patch-size",
        help="Side of a patch in latent pixels (image pixels / 8). Default: what all sizes have in common.",
        min=1,
        envvar="PSCTL_PATCH_SIZE",
        show_default=False,
    ),
]
Strategy = Annotated[
    StrategyName,
    typer.Option(
        "--strategy", help="How convolutions see beyond a patch; auto measures at start.", envvar="PSCTL_STRATEGY"
    ),
]
Kernels = Annotated[
    KernelsName,
    typer.Option("--kernels", help="auto: Triton on a GPU, torch elsewhere.", envvar="PSCTL_KERNELS"),
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of everything random in the run.", envvar="PSCTL_SEED", min=0)]
WorkspaceRoot = Annotated[
    Path,
    typer.Option(
        "--workspace",
        "-w",
        help="Folder that holds what commands hand on: tables, predictors, runs.",
        envvar="PSCTL_WORKSPACE",
        file_okay=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.", envvar="PSCTL_JSON")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes on stderr.", envvar="PSCTL_QUIET")]
