"""Checkpoints of a single file, as diffusers' `from_single_file` reads them, with a diffusers directory that configures
them.

What a file is, is told by the names and shapes of its tensors, which stand in the first kilobytes.
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
"""What diffusers takes a file for that it does not know."""
_AUTOENCODER = ("first_stage_model.", "vae.")


def configuration_of(file: Path) -> Path:
    """The configuration of the published model that diffusers takes a file for, from the hub or its cache.

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
            f"{file} has the tensors of {hub_id}, whose configuration cannot be fetched from the hub: give --config "
            "DIR, a diffusers directory of the same architecture (weights may be missing there)"
        ) from error


def components_inside(file: Path, components: Mapping[str, tuple[str, str]]) -> set[str]:
    """Those components of a pipeline that a file has weights of, by name: the denoising model, and what is found.

    Args:
        file: the checkpoint.
        components: by name, the library and the class.

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
        pipeline: its class.
        file: the checkpoint.
        config: diffusers directory of the same architecture.
        components: by name, those that are not in the file.
        inside: names of those that are.
        dtype: of them.

    Raises:
        RunError: the file lacks tensors, or is of another architecture.
    """
    try:
        pipe = pipeline.from_single_file(
            str(file), config=str(config), **components, dtype=dtype, local_files_only=True
        )
    except Exception as error:  # whatever the conversion of names comes upon in a file for another model
        raise _refusal(pipeline, file, config) from error
    # Tensors that have not come from the file are still without data.
    if any(tensor.is_meta for name in inside for tensor in getattr(pipe, name).state_dict().values()):
        raise _refusal(pipeline, file, config)
    return pipe


def _refusal(pipeline: Any, file: Path, config: Path) -> RunError:
    return RunError(
        f"{file} lacks tensors of the {pipeline.__name__} that {config} describes: the file is incomplete, or of "
        "another architecture, for which --config names the directory"
    )


def _header(file: Path) -> dict[str, Any]:
    """By name, something with the `shape` of each tensor."""
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
