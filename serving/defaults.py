"""What a model's directory says about good settings: the optional file `psctl.json` beside `model_index.json`."""

import json
from dataclasses import dataclass
from pathlib import Path

from ..data.errors import UsageError
from ..data.resolution import Resolution, parse

DEFAULTS_FILE = "psctl.json"


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """Settings used where the user names none.

    Attributes:
        num_inference_steps: denoising steps of a request.
        guidance_scale: classifier-free guidance scale.
        resolutions: sizes the model was trained for; empty if unknown.
        max_sequence_length: text positions of SD3's third encoder; None for the pipeline's own default.
    """

    num_inference_steps: int = 30
    guidance_scale: float = 5.0
    resolutions: tuple[Resolution, ...] = ()
    max_sequence_length: int | None = None


def read_defaults(model_dir: Path) -> ModelDefaults:
    """Read `psctl.json` of a model directory; missing keys keep the general defaults.

    Raises:
        UsageError: if the file is not a JSON object, or has an unknown key or a value of the wrong kind.
    """
    path = model_dir / DEFAULTS_FILE
    if not path.exists():
        return ModelDefaults()
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(given, dict):
        raise UsageError(f"{path} must hold a JSON object, not {type(given).__name__}")
    known = ModelDefaults.__dataclass_fields__
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise UsageError(f"{path} has unknown keys {', '.join(unknown)}; known: {', '.join(known)}")
    general = ModelDefaults()
    steps = given.get("num_inference_steps", general.num_inference_steps)
    scale = given.get("guidance_scale", general.guidance_scale)
    length = given.get("max_sequence_length")
    sizes = given.get("resolutions", [])
    if not isinstance(steps, int) or steps < 1:
        raise UsageError(f"{path}: num_inference_steps must be a positive whole number, not {steps!r}")
    if not isinstance(scale, int | float) or scale < 0:
        raise UsageError(f"{path}: guidance_scale must be a number of at least 0, not {scale!r}")
    if length is not None and (not isinstance(length, int) or length < 1):
        raise UsageError(f"{path}: max_sequence_length must be a positive whole number, not {length!r}")
    if not isinstance(sizes, list):
        raise UsageError(f"{path}: resolutions must be a list of sizes such as 192 or 128x192, not {sizes!r}")
    return ModelDefaults(steps, float(scale), tuple(parse(str(size)) for size in sizes), length)
