"""Loading a model: bundled name, local diffusers directory, hub id or single file -> `ServedModel`.

Loading is strict. A pipeline class that is not served, a missing or damaged file, or a checkpoint that lacks tensors
(which diffusers would silently fill with random values) is refused with one line that names the file.
"""

import importlib
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.errors import RunError, UsageError
from ...data.templates import Keep
from ...data.workspace import Workspace
from ..core.garbage import imports_are_no_garbage
from ..core.quiet import quiet_imports
from ..families.geometry import Geometry
from ..options import EngineOptions
from .changes import apply_changes, changed_fingerprint, check_changes
from .checkpoint import (
    INDEX_FILE,
    check_directory,
    check_keep,
    check_options,
    fingerprint,
    read_index,
    variants_for,
    weight_components,
    weight_files,
)
from .defaults import ModelDefaults, read_defaults, read_geometry
from .single_file import components_inside, load_file
from .source import locate_model

if TYPE_CHECKING:
    import torch

    from ..parallel.worker import RankModels, RankSettings
    from .offload import TextOffload
    from .served import ServedModel

_DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_model(
    spec: str,
    device: str = "auto",
    dtype: str = "auto",
    options: EngineOptions | None = None,
    *,
    workspace: Workspace | None = None,
) -> "ServedModel":
    """Load a model for serving.

    Args:
        spec: a bundled name, the path of a diffusers directory, a hub id such as `org/name` or `org/name@revision`, or
            the path of a checkpoint, as `FILE.safetensors` or `FILE.safetensors@CONFIG`, where CONFIG names the
            diffusers directory whose configuration it has.
        device: `auto` (CUDA if there is a device), `cpu`, `cuda` or `cuda:N`.
        dtype: `auto` (float16 on CUDA; on a CPU bfloat16 if it has AMX or AVX512 instructions for it, else float32),
            `float32`, `bfloat16` or `float16`.
        options: which engine denoises, and how.
        workspace: holds the cache's predictor, for options that need one and name no file; it wins over the one beside
            the model.

    Raises:
        UsageError: if there is no such model, or its pipeline class, the device or the dtype is not supported, or the
            engine cannot run it.
        RunError: if the model's files are missing, damaged or incomplete, or the hub cannot be reached.
    """
    source = locate_model(spec)
    model_dir = source.folder
    index = read_index(model_dir / INDEX_FILE, source=spec)
    changes = (options or EngineOptions()).model
    check_options(index["_class_name"], options or EngineOptions())
    check_changes(changes, model_dir)
    if source.file is not None and options is not None and options.parallel.is_on:
        raise UsageError(f"--parallel: ranks load a diffusers directory, and {source.file} is a single file")
    defaults = read_defaults(model_dir)

    with imports_are_no_garbage():
        quiet_libraries()
        from ..core.allocator import keep_freed_memory
        from .adapters import ModelAdapters
        from .build import build_model

    torch_device = resolve_device(device)
    torch_dtype = _resolve_dtype(dtype, torch_device)
    variants = variants_for(_name_of(torch_dtype))
    model_dir = source.with_weights(index, variants)
    inside = set() if source.file is None else components_inside(source.file, weight_components(index))
    check_directory(model_dir, index, variants, elsewhere=inside)
    if options is not None and options.parallel.is_on:
        from ..parallel.torchrun import TorchRun

        run = TorchRun.of_environment(options.parallel)
        if run is not None and run.rank:
            # Of this command, a rank that torchrun has started has no other part.
            sys.exit(run.follow(lambda own: load_rank(replace(own, model=str(model_dir)))))
    keep_freed_memory()
    if options is not None and workspace is not None:
        predictors = workspace.for_model(spec, str(torch_device)).root / "predictors"
        options = replace(options, cache=options.cache.with_predictor_of(predictors, model_dir))
    offload = _offload(options, torch_device, source.file)
    pipe = _load_pipeline(model_dir, index, torch_dtype, source.file, inside, offload)
    pipe.set_progress_bar_config(disable=True)
    apply_changes(changes, pipe)
    if offload is not None:
        offload.keep_on_host(pipe)
    try:
        pipe.to(torch_device)
    except RuntimeError as error:  # out of device memory
        raise RunError(f"model {spec} does not fit on {torch_device}: {_first_line(error)}") from error
    mark = changed_fingerprint(changes, fingerprint(model_dir, source.file))
    adapters = ModelAdapters(pipe, changes.adapters) if changes.adapters else None
    model = build_model(pipe, name=spec, fingerprint=mark, defaults=defaults, options=options, adapters=adapters)
    model.offload = offload
    return model


def load_rank(settings: "RankSettings") -> "RankModels":
    """Load what a rank needs of a model on its device. Raises as `load_model`."""
    from ..core.allocator import keep_freed_memory
    from ..parallel.worker import RankModels

    folder = Path(settings.model)
    index = read_index(folder / INDEX_FILE, source=settings.model)
    device = resolve_device(settings.device)
    check_directory(folder, index, variants_for(_name_of(_resolve_dtype(settings.dtype, device))))
    keep_freed_memory()
    quiet_libraries()
    components = weight_components(index)

    def load(name: str, dtype: str) -> Any:
        return _load_component(folder / name, *components[name], _resolve_dtype(dtype, device)).to(device)

    denoiser = load(next(name for name in ("unet", "transformer") if name in components), settings.dtype)
    autoencoder = None if settings.decoder is None else load("vae", settings.decoder)
    return RankModels(fingerprint(folder), denoiser, autoencoder)


def resolve_model(spec: str) -> Path:
    """Return the local diffusers directory that `spec` names. Of a hub id its configuration is there, and its weights
    only once the model has been loaded.

    Raises:
        UsageError: if nothing has that name.
        RunError: if a hub id cannot be downloaded.
    """
    return locate_model(spec).folder


def fingerprint_of(spec: str) -> str:
    """The fingerprint of a model's files, as they lie on this machine. Raises as `resolve_model`."""
    source = locate_model(spec)
    return fingerprint(source.folder, source.file)


def model_defaults(spec: str) -> ModelDefaults:
    """Return the model's default settings without loading the model (and without importing torch)."""
    return read_defaults(resolve_model(spec))


def model_geometry(spec: str) -> Geometry:
    """What a model makes of sizes, without loading it. Raises as `model_defaults`."""
    return read_geometry(resolve_model(spec))


def check_keep_of(spec: str, keep: Keep) -> None:
    """Raise UsageError if records of a model's templates cannot hold this, without loading it; and as `read_index`."""
    path = resolve_model(spec) / INDEX_FILE
    check_keep(read_index(path, source=spec)["_class_name"], keep)


def _offload(options: EngineOptions | None, device: "torch.device", file: Path | None) -> "TextOffload | None":
    """What keeps text encoders off the device, if that is asked for. Raises UsageError: they cannot be read again."""
    from .offload import TextOffload

    if options is None or options.offload == "none":
        return None
    if device.type != "cpu":
        return TextOffload()
    if file is not None or options.model.loras or options.model.adapters:
        option = "--lora changes weights" if options.model.loras else "--adapter has layers of its own"
        what = f"{file} is a single file" if file is not None else option
        raise UsageError(
            f"--offload text reads text encoders again from their files on a CPU, and {what}: leave one out"
        )
    return TextOffload(rereads=True)


def _load_pipeline(
    model_dir: Path,
    index: dict[str, Any],
    dtype: "torch.dtype",
    file: Path | None,
    inside: set[str],
    offload: "TextOffload | None",
) -> Any:
    """Load and check the components that hold weights one by one, the rest with the pipeline's own loader; which loads
    those, too, that are `inside` a checkpoint of a single file.
    """
    import diffusers

    from .offload import TEXT_ENCODER

    # Components that the index lists as absent are passed as None; otherwise diffusers refuses an SD3 without T5.
    components: dict[str, Any] = {
        name: None for name, entry in index.items() if isinstance(entry, list) and entry[0] is None
    }
    for name, (library, class_name) in weight_components(index).items():
        if name not in inside:
            where = model_dir / name, library, class_name, dtype
            components[name] = _load_component(*where)
            if offload is not None and offload.rereads and name.startswith(TEXT_ENCODER):
                # Before the next one is loaded: all at once might not fit.
                offload.add(name, components[name], partial(_load_component, *where))
    pipeline = getattr(diffusers, index["_class_name"])
    if file is not None:
        return load_file(pipeline, file, model_dir, components, inside, dtype)
    try:
        return pipeline.from_pretrained(model_dir, **components, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise RunError(f"model {model_dir} cannot be loaded: {_first_line(error)}") from error


def _load_component(folder: Path, library: str, class_name: str, dtype: "torch.dtype") -> Any:
    """Load one model of the pipeline; refuse it if a tensor is missing or has the wrong shape."""
    from diffusers.utils import is_accelerate_available
    from safetensors import SafetensorError

    if library not in ("diffusers", "transformers"):
        raise RunError(f"{folder}: components from library {library!r} are not loaded")
    # Without accelerate, diffusers' default for this option only causes a warning.
    options = {"low_cpu_mem_usage": is_accelerate_available()} if library == "diffusers" else {}
    files, variant = weight_files(folder, variants_for(_name_of(dtype)))
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
        raise RunError(f"{weights} cannot be loaded: {_first_line(error)}") from error
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


def resolve_device(name: str) -> "torch.device":
    """The device of this name, as loaded models name it: `cuda` is `cuda:0`. Raises UsageError: there is none."""
    import torch

    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise UsageError(f"unknown device {name!r}: allowed are auto, cpu, cuda and cuda:N")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"device {name} is not there: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices"
        )
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _resolve_dtype(name: str, device: "torch.device") -> "torch.dtype":
    import torch

    from ...kernels.launch import has_fast_bfloat16

    if name not in _DTYPES:
        raise UsageError(f"unknown dtype {name!r}: allowed are {', '.join(_DTYPES)}")
    if name == "auto":
        if device.type == "cpu":
            # Measured on 2 cores, bfloat16 against float32. Xeon with AMX, emoji-xl: a step of 16 images of 256 px
            # 142 ms against 361, one image of 128 px 16.6 against 15.8. EPYC with AVX512-BF16: a step of 4S 4M 4L
            # 161 ms against 202 (emoji-xl) and 140 against 211 (emoji-3), twelve requests served in 6.4 s against 8.4.
            return torch.bfloat16 if has_fast_bfloat16(device) else torch.float32
        return torch.float16
    return getattr(torch, name)


def _name_of(dtype: "torch.dtype") -> str:
    return str(dtype).removeprefix("torch.")


def quiet_libraries() -> None:
    """Keep the libraries' progress bars and notices out of our own output; errors are still raised."""
    quiet_imports()
    import diffusers.utils.logging
    import huggingface_hub.utils
    import transformers.utils.logging

    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
    huggingface_hub.utils.disable_progress_bars()
    huggingface_hub.utils.logging.set_verbosity_error()


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
