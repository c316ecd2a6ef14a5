"""The parts of a pipeline, read from a diffusers directory and checked."""

import importlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ...data.errors import RunError
from .checkpoint import variants_for, weight_components, weight_files
from .placement import name_of
from .single_file import load_file

if TYPE_CHECKING:
    import torch

    from .offload import TextOffload


def load_pipeline(
    model_dir: Path,
    index: dict[str, Any],
    dtype: "torch.dtype",
    file: Path | None,
    inside: set[str],
    offload: "TextOffload | None",
    given: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Load and check the components with weights one by one, and the rest with the pipeline's own loader.

    Components in `given` are used as they are. The pipeline's loader also loads those `inside` a single-file
    checkpoint.
    """
    import diffusers

    from .offload import TEXT_ENCODER

    # Components that the index lists as absent are passed as None; otherwise diffusers refuses an SD3 without T5.
    components: dict[str, Any] = {
        name: None for name, entry in index.items() if isinstance(entry, list) and entry[0] is None
    }
    components |= given
    for name, (library, class_name) in weight_components(index).items():
        if name not in inside and name not in given:
            where = model_dir / name, library, class_name, dtype
            components[name] = load_component(*where)
            if offload is not None and offload.rereads and name.startswith(TEXT_ENCODER):
                # Before the next one is loaded, because all at once might not fit.
                offload.add(name, components[name], partial(load_component, *where))
    pipeline = getattr(diffusers, index["_class_name"])
    if file is not None:
        return load_file(pipeline, file, model_dir, components, inside, dtype)
    try:
        return pipeline.from_pretrained(model_dir, **components, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise RunError(f"model {model_dir} cannot be loaded: {first_line(error)}") from error


def load_component(folder: Path, library: str, class_name: str, dtype: "torch.dtype") -> Any:
    """Load one model of the pipeline; refuse it if a tensor is missing or has the wrong shape."""
    from diffusers.utils import is_accelerate_available
    from safetensors import SafetensorError

    if library not in ("diffusers", "transformers"):
        raise RunError(f"{folder}: components from library {library!r} are not loaded")
    # Without accelerate, diffusers' default for this option only causes a warning.
    options = {"low_cpu_mem_usage": is_accelerate_available()} if library == "diffusers" else {}
    files, variant = weight_files(folder, variants_for(name_of(dtype)))
    weights = files[0]
    try:
        component_class = getattr(importlib.import_module(library), class_name)
        # Mismatched sizes are "ignored" here so that they are reported by name; they are refused below.
        model, report = component_class.from_pretrained(
            folder,
            dtype=dtype,
            variant=variant,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            local_files_only=True,
            **options,
        )
    except AttributeError as error:
        raise RunError(f"{folder}: {library} has no class {class_name}") from error
    except (SafetensorError, OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise RunError(f"{weights} cannot be loaded: {first_line(error)}") from error
    for kind in ("missing_keys", "mismatched_keys"):
        # A mismatched key comes with its two shapes.
        keys = sorted(str(key[0]) if isinstance(key, tuple) else str(key) for key in report.get(kind) or ())
        if keys:
            what = "lacks" if kind == "missing_keys" else "has another shape for"
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise RunError(f"{weights} {what} tensor {keys[0]}{more}: wrong or incomplete weights for {class_name}")
    if library == "diffusers":
        # Without accelerate, diffusers leaves some classes in the dtype of the file.
        model = model.to(dtype)
    return model.eval()


def hollow(folder: Path, class_name: str, dtype: "torch.dtype") -> Any:
    """Return a denoising model with its configuration and empty weights."""
    from torch import nn

    model = on_meta(folder, "diffusers", class_name)
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(weight.new_empty(0, dtype=dtype, device="cpu"), requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.new_empty(0, device="cpu"))
    return model


def on_meta(folder: Path, library: str, class_name: str) -> Any:
    """Return a component with its configuration, whose weights have shapes and no values."""
    import torch

    kind = getattr(importlib.import_module(library), class_name)
    with torch.device("meta"):
        if library == "diffusers":
            return kind.from_config(kind.load_config(folder))
        return kind(kind.config_class.from_pretrained(folder))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; its type if the message is empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
