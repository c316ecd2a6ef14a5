"""Single options that several commands share, so that they have one name, one help text and one environment variable.

A command annotates its parameters with them and gives the default itself. Shared options read `PSCTL_<OPTION>`; every
option also reads `PSCTL_<COMMAND>_<OPTION>`, where the shared one wins.
"""

from pathlib import Path
from typing import Annotated

from ...data.errors import UsageError
from ...data.requests import MAX_SEED
from ..flags import flag


def _json_file(path: Path | None) -> Path | None:
    """Refuse to replace anything but JSON, because the file is most likely an input given by mistake."""
    if path is not None and path.is_file() and path.stat().st_size:
        with path.open("rb") as file:
            start = file.read(64).lstrip()
        if start[:1] not in (b"{", b"["):
            raise UsageError(f"--output-file {path} exists and is not JSON; give another name")
    return path


Seed = Annotated[int, flag("--seed", "Seed of everything random in the run.", is_shared=True, min=0)]
OutputFile = Annotated[
    Path | None,
    flag("--output-file", "Write the result as JSON to this file, too.", dir_okay=False, callback=_json_file),
]
Resolutions = Annotated[
    str | None, flag("--resolutions", "Such as 128,192,128x256. Default: those of the model.", metavar="SIZE,...")
]
Prompts = Annotated[
    Path | None, flag("--prompts", "File of prompts (.txt, .csv, .tsv, .jsonl). Default: bundled captions.")
]
NumInferenceSteps = Annotated[
    int | None, flag("--num-inference-steps", "Denoising steps. Default: the model's own.", min=1, max=1000)
]
GuidanceScale = Annotated[
    float | None,
    flag("--guidance-scale", "Classifier-free guidance; 1 or less is off (Z-Image: 0). Default: the model's own."),
]
MaxBatchSize = Annotated[int, flag("--max-batch-size", "Requests denoised together (on one GPU).", min=1)]
SloScale = Annotated[float, flag("--slo-scale", "SLO of a request: this many times its latency when served alone.")]
StageTimesRun = Annotated[
    Path | None,
    flag(
        "--stage-times",
        "Times of text encoding and decoding from this served run: its folder.",
        metavar="RUN",
        file_okay=False,
    ),
]
CalibrationFile = Annotated[
    Path | None,
    flag("--calibration", "Simulator: calibration.json of a sweep with --on both.", metavar="FILE", dir_okay=False),
]
Gpus = Annotated[int, flag("--gpus", "GPUs that serve in data parallel, all alike.", min=1, max=4096)]


def require_seeds(seed: int, count: int, what: str) -> None:
    """Raise UsageError unless there are `count` seeds from this one on."""
    if seed + count - 1 > MAX_SEED:
        raise UsageError(f"seed is {seed}, but with {count} {what} it may be at most {MAX_SEED - count + 1}")


def numbers_of(option: str, text: str) -> list[float]:
    """Parse numbers separated by commas. Raises UsageError, which names the option, for other text."""
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise UsageError(f"{option} is {text!r}, but it must be numbers with commas between") from error
