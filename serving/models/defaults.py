"""What a model's directory says about good settings, read without torch.

The optional file `psctl.json` beside `model_index.json` names them; sizes that it does not name follow from the size
that the model was trained for, which its configuration files tell.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...data.errors import UsageError
from ...data.resolution import Resolution, parse

DEFAULTS_FILE = "psctl.json"
_PAPER_SIZES = (Resolution(512, 512), Resolution(768, 768), Resolution(1024, 1024))
_KEYS = ("num_inference_steps", "guidance_scale", "resolutions", "max_sequence_length")


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """Settings used where the user names none.

    Attributes:
        num_inference_steps: denoising steps of a request.
        guidance_scale: classifier-free guidance scale.
        default_resolution: size of an image when none is asked for: the model's training size, square.
        resolutions: sizes that a trace asks for when none are named. Without `psctl.json` they are a half, three
            quarters and the whole of the training size, as PatchedServe's 512, 768 and 1024 pixels.
        max_sequence_length: text positions of SD3's third encoder; None for the pipeline's own default.
    """

    num_inference_steps: int = 30
    guidance_scale: float = 5.0
    default_resolution: Resolution = _PAPER_SIZES[-1]
    resolutions: tuple[Resolution, ...] = _PAPER_SIZES
    max_sequence_length: int | None = None


def read_defaults(model_dir: Path) -> ModelDefaults:
    """Read `psctl.json` of a model directory; missing keys keep the general defaults.

    Raises:
        UsageError: if the file is not a JSON object, or has an unknown key or a value of the wrong kind.
    """
    path = model_dir / DEFAULTS_FILE
    given = _read_object(path) if path.exists() else {}
    unknown = sorted(set(given) - set(_KEYS))
    if unknown:
        raise UsageError(f"{path} has unknown keys {', '.join(unknown)}; known: {', '.join(_KEYS)}")
    general = ModelDefaults()
    steps = given.get("num_inference_steps", general.num_inference_steps)
    scale = given.get("guidance_scale", general.guidance_scale)
    length = given.get("max_sequence_length")
    sizes = given.get("resolutions")
    side = _training_side(model_dir)
    if not isinstance(steps, int) or steps < 1:
        raise UsageError(f"{path}: num_inference_steps must be a positive whole number, not {steps!r}")
    if not isinstance(scale, int | float) or scale < 0:
        raise UsageError(f"{path}: guidance_scale must be a number of at least 0, not {scale!r}")
    if length is not None and (not isinstance(length, int) or length < 1):
        raise UsageError(f"{path}: max_sequence_length must be a positive whole number, not {length!r}")
    if sizes is None:
        # Multiples of 16 suit every supported model; equal sizes of a tiny model count once.
        sides = dict.fromkeys(max(16, round(side * share / 16) * 16) for share in (0.5, 0.75)) | {side: None}
        resolutions = tuple(Resolution(each, each) for each in sides)
    elif isinstance(sizes, list) and sizes:
        resolutions = tuple(parse(str(size)) for size in sizes)
    else:
        raise UsageError(f"{path}: resolutions must be a list of sizes such as 192 or 128x192, not {sizes!r}")
    return ModelDefaults(steps, float(scale), Resolution(side, side), resolutions, length)


def _training_side(model_dir: Path) -> int:
    """Return the side in pixels of what the plain pipeline draws when no size is given."""
    configs = [path for name in ("unet", "transformer") if (path := model_dir / name / "config.json").is_file()]
    autoencoder = model_dir / "vae" / "config.json"
    sample_size = _read_object(configs[0]).get("sample_size") if configs else None
    blocks = _read_object(autoencoder).get("block_out_channels") if autoencoder.is_file() else None
    num_blocks = len(blocks) if isinstance(blocks, list) else 4
    # 128 is what the pipelines take for a model that names none.
    return (sample_size if isinstance(sample_size, int) else 128) * 2 ** (num_blocks - 1)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content
