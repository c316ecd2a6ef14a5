"""Options that several commands share, so that they have one name, one help text and one environment variable.

A command annotates its parameters with them and gives the default itself: `def serve(model: Model = "emoji-xl", ...)`.
Shared options read `PSCTL_<OPTION>`; every option also reads `PSCTL_<COMMAND>_<OPTION>`, where the shared one wins.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from ...data.errors import UsageError
from ...serving.cache.options import CacheMode
from ...serving.options import EngineName, KernelsName, OrderName, StrategyName

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
Compile = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="torch.compile what does not depend on who is in the batch; with --engine plain the whole model.",
        envvar="PSCTL_COMPILE",
    ),
]
CudaGraphs = Annotated[
    bool,
    typer.Option(
        "--cuda-graphs", help="Record each batch composition's launches and play them back.", envvar="PSCTL_CUDA_GRAPHS"
    ),
]
Cache = Annotated[
    CacheMode,
    typer.Option(
        "--cache",
        help="Reuse what blocks gave at earlier steps: patch by patch, only where the whole batch agrees (image), at "
        "fixed intervals, or until a request's changes add up (accumulated).",
        envvar="PSCTL_CACHE",
    ),
]
CacheThreshold = Annotated[
    float | None,
    typer.Option(
        "--cache-threshold",
        help="Reuse by this rule instead of a predictor: the block's input has changed less, relative to its mean "
        "square. With --cache accumulated the sum of changes.",
        envvar="PSCTL_CACHE_THRESHOLD",
        show_default=False,
    ),
]
CachePredictorFile = Annotated[
    Path | None,
    typer.Option(
        "--cache-predictor",
        help="Trained by psctl train-predictor cache. Default: the workspace's.",
        envvar="PSCTL_CACHE_PREDICTOR",
        dir_okay=False,
    ),
]
CacheInterval = Annotated[
    int,
    typer.Option("--cache-interval", help="Steps from one computation to the next.", envvar="PSCTL_CACHE_INTERVAL"),
]
CachePatchSize = Annotated[
    int,
    typer.Option(
        "--cache-patch-size", help="Side of the cache's patches in latent pixels.", envvar="PSCTL_CACHE_PATCH_SIZE"
    ),
]
MaxReuse = Annotated[
    int,
    typer.Option("--max-reuse", help="Steps in a row that a patch may reuse a block.", envvar="PSCTL_MAX_REUSE"),
]
WarmupSteps = Annotated[
    int,
    typer.Option(
        "--warmup-steps", help="First steps of a request that are computed in full.", envvar="PSCTL_WARMUP_STEPS"
    ),
]
CacheMemory = Annotated[
    int, typer.Option("--cache-memory", metavar="MB", help="Most that the cache keeps.", envvar="PSCTL_CACHE_MEMORY")
]


def _json_file(path: Path | None) -> Path | None:
    """Refuse to replace what is no JSON: most likely an input was named by mistake."""
    if path is not None and path.is_file() and path.stat().st_size:
        with path.open("rb") as file:
            start = file.read(64).lstrip()
        if start[:1] not in (b"{", b"["):
            raise UsageError(f"--output-file {path} exists and is no JSON; give another name")
    return path


OutputFile = Annotated[
    Path | None,
    typer.Option(
        "--output-file", help="Write the result as JSON to this file, too.", dir_okay=False, callback=_json_file
    ),
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
Resolutions = Annotated[
    str | None,
    typer.Option("--resolutions", metavar="SIZE,...", help="Such as 128,192,128x256. Default: those of the model."),
]
Prompts = Annotated[
    Path | None,
    typer.Option("--prompts", help="File of prompts (.txt, .csv, .tsv, .jsonl). Default: bundled captions."),
]
NumInferenceSteps = Annotated[
    int | None,
    typer.Option("--num-inference-steps", help="Denoising steps. Default: the model's own.", min=1, max=1000),
]
GuidanceScale = Annotated[
    float | None,
    typer.Option("--guidance-scale", help="Classifier-free guidance; 1 or less is off. Default: the model's own."),
]
MaxBatchSize = Annotated[int, typer.Option("--max-batch-size", help="Requests denoised together (on one GPU).", min=1)]


def numbers_of(option: str, text: str) -> list[float]:
    """Numbers with commas between. Raises UsageError, which names the option, if they are not."""
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise UsageError(f"{option} is {text!r}, but it must be numbers with commas between") from error
