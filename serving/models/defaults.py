"""Good settings for a model, and what it makes of sizes, read from its directory without torch.

Settings come from the optional file `psctl.json` beside `model_index.json`. Sizes that it does not name follow from the
size that the model was trained for, which is in its configuration files.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ...data.errors import RunError, UsageError
from ...data.resolution import Resolution, parse

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ..families.geometry import Geometry

DEFAULTS_FILE = "psctl.json"
_PAPER_SIZES = (Resolution(512, 512), Resolution(768, 768), Resolution(1024, 1024))


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object.

    Raises:
        RunError: if the file is missing or holds something else.
    """
    if not path.is_file():
        raise RunError(f"missing file {path}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{path} is corrupt: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise RunError(f"{path} is corrupt: a JSON object is expected")
    return content


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """Settings used when the user names none.

    Attributes:
        num_inference_steps: denoising steps of a request.
        guidance_scale: of classifier-free guidance.
        default_resolution: size of an image if none is asked for: the model's training size, square.
        resolutions: sizes that a trace asks for when none are named. Without `psctl.json` they are one half, three
            quarters and all of the training size, like PatchedServe's 512, 768 and 1024 pixels.
        max_sequence_length: text positions of the T5 encoder of SD3 or FLUX; None for the pipeline's own default.
    """

    num_inference_steps: int = 30
    guidance_scale: float = 5.0
    default_resolution: Resolution = _PAPER_SIZES[-1]
    resolutions: tuple[Resolution, ...] = _PAPER_SIZES
    max_sequence_length: int | None = None


@cache
def _given() -> "type[BaseModel]":
    """What `psctl.json` may hold; null leaves the general default. Made late, because `psctl --help` imports this."""
    from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveInt, create_model

    fields: dict[str, Any] = {
        "num_inference_steps": PositiveInt,
        "guidance_scale": NonNegativeFloat,
        "resolutions": Annotated[list[int | str], Field(min_length=1)],
        "max_sequence_length": PositiveInt,
    }
    optional: dict[str, Any] = {name: (kind | None, None) for name, kind in fields.items()}
    return create_model("Given", __config__=ConfigDict(extra="forbid", strict=True), **optional)


def read_defaults(model_dir: Path) -> ModelDefaults:
    """Read `psctl.json` of a model directory; missing keys keep the general defaults.

    Raises:
        UsageError: if the file is not a JSON object, or has an unknown key or a value of the wrong kind.
        RunError: if a configuration file of the model is damaged.
    """
    from pydantic import ValidationError

    from ..families.table import FAMILIES, entry_of

    path, kind = model_dir / DEFAULTS_FILE, _given()
    try:
        given = kind.model_validate_json(path.read_bytes() if path.exists() else "{}")
    except ValidationError as error:
        problem, known = error.errors(include_url=False)[0], ", ".join(kind.model_fields)
        what = " ".join(map(str, problem["loc"][:1])) or "content"
        raise UsageError(f"{path}: {what}: {problem['msg']}; known keys: {known}") from error
    side = _training_side(model_dir)
    # Multiples of 16 suit every supported model; equal sizes of a tiny model count once.
    usual = dict.fromkeys(max(16, round(side * share / 16) * 16) for share in (0.5, 0.75)) | {side: None}
    index, config = read_config(model_dir, "", "model_index.json"), read_config(model_dir, "transformer")
    # Pipelines may share a transformer.
    entry = FAMILIES.get(str(index.get("_class_name"))) or entry_of(config.get("_class_name"))
    named = ({} if entry is None else entry.settings(index | config)) | given.model_dump(exclude_none=True)
    sizes = tuple(parse(str(size)) for size in named.pop("resolutions", usual))
    return ModelDefaults(**named, default_resolution=Resolution(side, side), resolutions=sizes)


def read_geometry(model_dir: Path) -> "Geometry":
    """The geometry of a model by its configuration files. Raises RunError if one is damaged."""
    from ..families.geometry import Geometry
    from ..families.table import entry_of, token_side

    latent_factor = 1 << (count_of_blocks(read_config(model_dir, "vae")) - 1)
    config = read_config(model_dir, "transformer")
    if "patch_size" in config or "all_patch_size" in config:
        entry = entry_of(config.get("_class_name"))
        folds = 1 if entry is None else entry.folds
        return Geometry.of_transformer(latent_factor * folds, token_side(entry, config))
    return Geometry.of_unet(latent_factor, count_of_blocks(read_config(model_dir, "unet")))


def read_config(model_dir: Path, component: str, file: str = "config.json") -> dict[str, Any]:
    """The configuration of a component; empty if the model has none of this name. Raises as `read_json`."""
    path = model_dir / component / file
    return read_json(path) if path.is_file() else {}


def count_of_blocks(config: dict[str, Any]) -> int:
    """How many levels a U-Net or an autoencoder has; 4 if it does not say."""
    blocks = config.get("block_out_channels")
    return len(blocks) if isinstance(blocks, list) else 4


def _training_side(model_dir: Path) -> int:
    """Return the side in pixels of what the plain pipeline draws when no size is given."""
    unet, transformer, autoencoder = (read_config(model_dir, name) for name in ("unet", "transformer", "vae"))
    sample_size = (unet or transformer).get("sample_size")
    # 128 is what the pipelines use for a model that names no size.
    return (sample_size if isinstance(sample_size, int) else 128) * 2 ** (count_of_blocks(autoencoder) - 1)
