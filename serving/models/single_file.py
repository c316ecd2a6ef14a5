"""Single-file checkpoints, as diffusers' `from_single_file` reads them, with a diffusers directory as configuration.

The model of a file is identified by the names and shapes of its tensors, which are in the first kilobytes.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from safetensors import safe_open

from ...data.errors import MissingExtraError, RunError, UsageError
from .checkpoint import check_safetensors
from .hub import fetch_configuration

_DENOISER = "model.diffusion_model."
_DEFAULT = "stable-diffusion-v1-5/stable-diffusion-v1-5"
"""Model that diffusers assumes for an unknown file."""
_AUTOENCODER = ("first_stage_model.", "vae.")


def configuration_of(file: Path) -> Path:
    """Fetch the configuration of the published model that diffusers identifies in a file, from the hub or its cache.

    Raises:
        UsageError: the file is not a checkpoint of a model.
        RunError: it is damaged, or the hub cannot be reached.
    """
    from diffusers.loaders.single_file_utils import fetch_diffusers_config

    header = _header(file)
    hub_id = fetch_diffusers_config(header)["pretrained_model_name_or_path"]
    if hub_id == _DEFAULT and not any(name.startswith(_DENOISER) for name in header):
        raise UsageError(f"{file} is not a checkpoint of a model that diffusers knows: it has no {_DENOISER}*")
    try:
        return fetch_configuration(hub_id, None)
    except (RunError, UsageError) as error:
        raise RunError(
            f"{file} has the tensors of {hub_id}, whose configuration cannot be fetched from the hub: give "
            "--model-config DIR, a diffusers directory of the same architecture (weights may be missing there)"
        ) from error


def components_inside(file: Path, components: Mapping[str, tuple[str, str]]) -> set[str]:
    """Return the names of components whose weights are in a file: the denoising model, and others that are found.

    Args:
        file: the checkpoint.
        components: library and class of each component, by name.

    Raises:
        RunError: the file is damaged.
        MissingExtraError: accelerate is not installed; without it, tensors that a file lacks stay random unnoticed.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise MissingExtraError("accelerate", "single-file")
    header = _header(file)
    return {name for name, (_, class_name) in components.items() if _is_inside(name, class_name, header)}


def load_file(
    pipeline: Any, file: Path, config: Path, components: Mapping[str, Any], inside: set[str], dtype: Any
) -> Any:
    """Load a checkpoint with the pipeline's own loader.

    Args:
        pipeline: class of the pipeline.
        file: the checkpoint.
        config: diffusers directory of the same architecture.
        components: components that are not in the file, by name.
        inside: names of the components that are in the file.
        dtype: dtype of these components.

    Raises:
        RunError: the file lacks tensors, or is of another architecture.
    """
    try:
        pipe = pipeline.from_single_file(
            str(file), config=str(config), **components, dtype=dtype, local_files_only=True
        )
    except Exception as error:  # whatever the conversion of names raises for a file of another model
        raise _refusal(pipeline, file, config) from error
    # Tensors that have not come from the file are still without data.
    if any(tensor.is_meta for name in inside for tensor in getattr(pipe, name).state_dict().values()):
        raise _refusal(pipeline, file, config)
    return pipe


def _refusal(pipeline: Any, file: Path, config: Path) -> RunError:
    return RunError(
        f"{file} lacks tensors of the {pipeline.__name__} that {config} describes: the file is incomplete, or of "
        "another architecture, for which --model-config names the directory"
    )


def _header(file: Path) -> dict[str, Any]:
    """Return an object with the `shape` of each tensor, by name."""
    check_safetensors(file)
    with safe_open(file, "np") as tensors:
        names = tensors.keys()
        return {name: SimpleNamespace(shape=tensors.get_slice(name).get_shape()) for name in names}


def _is_inside(name: str, class_name: str, header: Mapping[str, Any]) -> bool:
    from diffusers.loaders.single_file_utils import is_clip_model_in_single_file, is_t5_in_single_file

    if name in ("unet", "transformer"):
        return True
    if name == "vae":
        return any(key.startswith(_AUTOENCODER) for key in header)
    if class_name.startswith("CLIP"):
        return is_clip_model_in_single_file(SimpleNamespace(__name__=class_name), header)
    return class_name.startswith("T5") and is_t5_in_single_file(header)
