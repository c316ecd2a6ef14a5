"""Default settings and geometry of a model, read from its directory without torch.

Settings come from the optional file `psctl.json` beside `model_index.json`. Without sizes in this file, they follow
from the training size in the model's configuration files.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ...data import records
from ...data.errors import RunError, UsageError
from ...data.resolution import Resolution, parse

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ..families.geometry import Geometry
    from ..families.table import Entry

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
        return records.read_json(path, "a configuration")
    except UsageError as error:
        raise RunError(str(error)) from error


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """Settings used when the user gives none.

    Attributes:
        num_inference_steps: number of denoising steps of a request.
        guidance_scale: scale of classifier-free guidance.
        default_resolution: size of an image without a requested size; without `psctl.json` the model's training size,
            square.
        resolutions: sizes of a trace without sizes. Without `psctl.json` they are one half, three quarters and all of
            the training size, like PatchedServe's 512, 768 and 1024 pixels.
        max_sequence_length: length of the text in tokens; None for the pipeline's own default.
        decoder_dtype: number format in which images are decoded instead of float32, where the pipeline keeps the
            autoencoder in float32 beside a model of 16 bits: a statement that its images are within one grey level
            (1 of 255) of those in float32. None for no such statement.
        reference_size: "own" for a model of FLUX.1 Kontext's classes that sees references at their own size, or scaled
            down to the pixels of the largest of `resolutions`; "trained" for one that sees them at the nearest of the
            sizes that FLUX.1 Kontext was trained on, as its pipeline does.
    """

    num_inference_steps: int = 30
    guidance_scale: float = 5.0
    default_resolution: Resolution = _PAPER_SIZES[-1]
    resolutions: tuple[Resolution, ...] = _PAPER_SIZES
    max_sequence_length: int | None = None
    decoder_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    reference_size: Literal["own", "trained"] = "trained"


@cache
def _given() -> "type[BaseModel]":
    """Return the schema of `psctl.json`, in which null means the general default.

    It is built at first use, because `psctl --help` imports this module.
    """
    from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveInt, create_model

    fields: dict[str, Any] = {
        "num_inference_steps": PositiveInt,
        "guidance_scale": NonNegativeFloat,
        "default_resolution": int | str,
        "resolutions": Annotated[list[int | str], Field(min_length=1)],
        "max_sequence_length": PositiveInt,
        "decoder_dtype": Literal["float32", "bfloat16", "float16"],
        "reference_size": Literal["own", "trained"],
    }
    optional: dict[str, Any] = {name: (kind | None, None) for name, kind in fields.items()}
    return create_model("Given", __config__=ConfigDict(extra="forbid", strict=True), **optional)


def read_defaults(model_dir: Path) -> ModelDefaults:
    """Read `psctl.json` of a model directory; missing keys keep the general defaults.

    Raises:
        UsageError: if the file is not a JSON object, or has an unknown key or a value of the wrong kind.
        RunError: if a configuration file of the model is damaged.
    """
    from ...data import parsing

    path = model_dir / DEFAULTS_FILE
    content = records.read_json(path, "settings of the model") if path.exists() else {}
    given = parsing.parse(_given(), content, str(path))
    side = _training_side(model_dir)
    # Multiples of 16 fit every supported model; equal sizes of a tiny model count once.
    usual = dict.fromkeys(max(16, round(side * share / 16) * 16) for share in (0.5, 0.75)) | {side: None}
    index, config, entry = _entry_of(model_dir)
    named = ({} if entry is None else entry.settings(index | config)) | given.model_dump(exclude_none=True)
    sizes = tuple(parse(str(size)) for size in named.pop("resolutions", usual))
    own = parse(str(named.pop("default_resolution", side)))
    return ModelDefaults(**named, default_resolution=own, resolutions=sizes)


def read_geometry(model_dir: Path) -> "Geometry":
    """Return the geometry of a model from its configuration files. Raises RunError if one is damaged."""
    from ..families.geometry import Geometry

    latent_factor = 1 << (count_of_blocks(read_config(model_dir, "vae")) - 1)
    _, config, entry = _entry_of(model_dir)
    if "patch_size" in config or "all_patch_size" in config:
        geometry = Geometry.of_entry(entry, latent_factor, config)
        defaults = read_defaults(model_dir)
        return geometry.with_references(defaults.reference_size, defaults.resolutions)
    return Geometry.of_unet(latent_factor, count_of_blocks(read_config(model_dir, "unet")))


def _entry_of(model_dir: Path) -> "tuple[dict[str, Any], dict[str, Any], Entry | None]":
    """Return the configurations of pipeline and transformer, and the family; None if no family serves the pipeline."""
    from ..families.table import FAMILIES, entry_of

    index, config = read_config(model_dir, "", "model_index.json"), read_config(model_dir, "transformer")
    # Pipelines may share a transformer.
    return index, config, FAMILIES.get(str(index.get("_class_name"))) or entry_of(config.get("_class_name"))


def read_config(model_dir: Path, component: str, file: str = "config.json") -> dict[str, Any]:
    """Return the configuration of a component; empty if the model has no such component. Raises as `read_json`."""
    path = model_dir / component / file
    return read_json(path) if path.is_file() else {}


def count_of_blocks(config: dict[str, Any]) -> int:
    """Return the number of levels of a U-Net or an autoencoder; 4 if its configuration does not say."""
    blocks = config.get("block_out_channels")
    return len(blocks) if isinstance(blocks, list) else 4


def _training_side(model_dir: Path) -> int:
    """Return the side in pixels of the images that the plain pipeline draws when no size is given."""
    unet, transformer, autoencoder = (read_config(model_dir, name) for name in ("unet", "transformer", "vae"))
    sample_size = (unet or transformer).get("sample_size")
    # 128 is the default of the pipelines for a model without a sample size.
    return (sample_size if isinstance(sample_size, int) else 128) * 2 ** (count_of_blocks(autoencoder) - 1)
