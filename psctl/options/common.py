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


Seed = Annotated[int, flag("--seed", "Seed of all random choices.", is_shared=True, min=0)]
OutputFile = Annotated[
    Path | None,
    flag("--output-file", "Also write the result to this file, as JSON.", dir_okay=False, callback=_json_file),
]
Resolutions = Annotated[
    str | None, flag("--resolutions", "Resolutions, such as 128,192,128x256. Default: the model's.", metavar="SIZE,...")
]
Prompts = Annotated[
    Path | None, flag("--prompts", "File of prompts (.txt, .csv, .tsv, .jsonl). Default: bundled captions.")
]
NumInferenceSteps = Annotated[
    int | None, flag("--num-inference-steps", "Number of denoising steps. Default: the model's.", min=1, max=1000)
]
GuidanceScale = Annotated[
    float | None,
    flag(
        "--guidance-scale", "Classifier-free guidance scale; 1 or less disables it (Z-Image: 0). Default: the model's."
    ),
]
MaxBatchSize = Annotated[int, flag("--max-batch-size", "Maximum number of requests in a batch (per GPU).", min=1)]
SloScale = Annotated[float, flag("--slo-scale", "SLO of a request, as a multiple of its standalone latency.")]
StageTimesRun = Annotated[
    Path | None,
    flag(
        "--stage-times",
        "Folder of a served run whose times of text encoding and decoding are used.",
        metavar="RUN",
        file_okay=False,
    ),
]
CalibrationFile = Annotated[
    Path | None,
    flag("--calibration", "Simulator: calibration.json of a sweep with --on both.", metavar="FILE", dir_okay=False),
]
Gpus = Annotated[int, flag("--gpus", "Number of equal GPUs, which serve in data parallel.", min=1, max=4096)]


def require_seeds(seed: int, count: int, what: str) -> None:
    """Raise UsageError unless there are `count` seeds from this one on."""
    if seed + count - 1 > MAX_SEED:
        raise UsageError(f"seed is {seed}, but with {count} {what} it may be at most {MAX_SEED - count + 1}")


def counts_of(option: str, text: str) -> list[int]:
    """Parse whole numbers from 1 on, separated by commas. Raises UsageError, which names the option, for other text."""
    found = numbers_of(option, text)
    if not found or any(each < 1 or not each.is_integer() for each in found):
        raise UsageError(f"{option} is {text!r}, but it must be whole numbers from 1 on with commas between")
    return [int(each) for each in found]


def numbers_of(option: str, text: str) -> list[float]:
    """Parse numbers separated by commas. Raises UsageError, which names the option, for other text."""
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise UsageError(f"{option} is {text!r}, but it must be numbers with commas between") from error
