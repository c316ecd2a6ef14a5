"""Loading a model: bundled name, local diffusers directory, hub id or single file -> `ServedModel`.

Loading is strict. An unsupported pipeline class, a missing or damaged file, or a checkpoint that lacks tensors (which
diffusers would silently fill with random values) is refused with a one-line error that names the file.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...data.errors import RunError
from ...data.templates import Keep
from ...data.workspace import Workspace
from ..conflicts import refuse_conflicts
from ..core.garbage import imports_are_no_garbage
from ..families.geometry import Geometry
from ..options import EngineOptions
from .changes import apply_changes, changed_fingerprint, check_changes
from .checkpoint import (
    INDEX_FILE,
    check_directory,
    fingerprint,
    read_index,
    variants_for,
    weight_components,
)
from .components import first_line, load_pipeline
from .defaults import ModelDefaults, read_defaults, read_geometry
from .placement import name_of, quiet_libraries, resolve_device, resolve_dtype
from .single_file import components_inside
from .source import locate_model

if TYPE_CHECKING:
    from .served import ServedModel


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
            diffusers directory that holds its configuration.
        device: `auto` (CUDA if there is a device), `cpu`, `cuda` or `cuda:N`.
        dtype: `auto` (on CUDA float16 for U-Nets and bfloat16 for transformers; on a CPU bfloat16 if it has AMX or
            AVX512 instructions for it, else float32), `float32`, `bfloat16` or `float16`.
        options: options of the engine.
        workspace: workspace with the cache's predictor, for options that need one and name no file; it takes precedence
            over the predictor beside the model.

    Raises:
        UsageError: if there is no such model, or its pipeline class, the device or the dtype is not supported, or the
            engine cannot run it.
        RunError: if the model's files are missing, damaged or incomplete, or the hub cannot be reached.
    """
    source = locate_model(spec)
    model_dir = source.folder
    index = read_index(model_dir / INDEX_FILE, source=spec)
    options = options or EngineOptions()
    changes = options.model
    used = options.features | {index["_class_name"]: f"a {index['_class_name']}"}
    if source.file is not None:
        used["a single file"] = f"a single file ({source.file})"
    refuse_conflicts(used)
    check_changes(changes, model_dir)
    defaults = read_defaults(model_dir)

    with imports_are_no_garbage():
        quiet_libraries()
        from ..core.allocator import keep_freed_memory
        from ..core.denoiser import denoiser_of
        from ..core.float8 import check_float8, convert_to_float8
        from .adapters import ModelAdapters
        from .build import build_model
        from .controls import ModelControls
        from .offload import TextOffload
        from .stage_process import StageProcesses, StageSettings

    torch_device = resolve_device(device)
    if changes.quantize == "fp8":
        check_float8(torch_device)
    if options.offload == "text" and torch_device.type == "cpu":
        on_cpu = "--offload text on a CPU"
        refuse_conflicts(used | {on_cpu: on_cpu})
    torch_dtype = resolve_dtype(dtype, torch_device, index["_class_name"])
    variants = variants_for(name_of(torch_dtype))
    model_dir = source.with_weights(index, variants)
    inside = set() if source.file is None else components_inside(source.file, weight_components(index))
    check_directory(model_dir, index, variants, elsewhere=inside)
    keep_freed_memory()
    if workspace is not None:
        predictors = workspace.for_model(spec, str(torch_device)).root / "predictors"
        options = replace(options, cache=options.cache.with_file_of(predictors, model_dir))
    stages = None
    if options.stages == "processes":
        # The processes load in parallel with this one.
        decoding = {"decoder_dtype": options.decoder_dtype, "compile": options.compile}
        of_stages = StageSettings(str(model_dir), str(torch_device), name_of(torch_dtype), **decoding)
        own = {"cuda_graphs": options.cuda_graphs, "prompt_cache_mb": options.prompt_cache_mb}
        stages = StageProcesses(replace(of_stages, **own))
    offload = None if options.offload == "none" else TextOffload(rereads=torch_device.type == "cpu")
    pipe = load_pipeline(model_dir, index, torch_dtype, source.file, inside, offload)
    pipe.set_progress_bar_config(disable=True)
    apply_changes(changes, pipe)
    if offload is not None:
        offload.offload_encoders(pipe)
    try:
        pipe.to(torch_device)
    except RuntimeError as error:  # out of device memory
        raise RunError(f"model {spec} does not fit on {torch_device}: {first_line(error)}") from error
    mark = changed_fingerprint(changes, fingerprint(model_dir, source.file))
    adapters = ModelAdapters(pipe, changes.adapters) if changes.adapters else None
    controls = ModelControls(pipe, changes.controlnets) if changes.controlnets else None
    if changes.quantize == "fp8":
        convert_to_float8(denoiser_of(pipe))  # after adapters, which diffusers puts around the layers that it knows
    model = build_model(
        pipe,
        name=spec,
        fingerprint=mark,
        defaults=defaults,
        options=options,
        adapters=adapters,
        controls=controls,
        stages=stages,
    )
    model.offload = offload
    if stages is not None:
        stages.wait()
    return model


def resolve_model(spec: str) -> Path:
    """Return the local diffusers directory that `spec` names.

    The directory of a hub id holds its configuration, and its weights only once the model has been loaded.

    Raises:
        UsageError: if there is no such model.
        RunError: if a hub id cannot be downloaded.
    """
    return locate_model(spec).folder


def fingerprint_of(spec: str) -> str:
    """Return the fingerprint of a model's files on this machine. Raises what `resolve_model` raises."""
    source = locate_model(spec)
    return fingerprint(source.folder, source.file)


def model_defaults(spec: str) -> ModelDefaults:
    """Return the model's default settings without loading the model (and without importing torch)."""
    return read_defaults(resolve_model(spec))


def model_geometry(spec: str) -> Geometry:
    """Return the geometry of a model without loading it. Raises what `model_defaults` raises."""
    return read_geometry(resolve_model(spec))


def check_keep_of(spec: str, keep: Keep) -> None:
    """Raise UsageError if records of a model's templates do not support this `keep`, without loading the model.

    Raises also what `read_index` raises.
    """
    pipeline, option = read_index(resolve_model(spec) / INDEX_FILE, source=spec)["_class_name"], f"--keep {keep}"
    refuse_conflicts({option: option, pipeline: f"a {pipeline}"})
