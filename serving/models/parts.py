"""Loading of a model's parts by processes that compute for the serving one: ranks and stages."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core.allocator import keep_freed_memory
from ..core.float8 import check_float8, convert_to_float8
from ..families import Family, build_family
from ..options import ModelOptions
from ..parallel.options import ParallelOptions
from ..parallel.torchrun import TorchRun
from ..parallel.worker import RankModels, RankSettings
from .adapters import ModelAdapters
from .build import build_decoder
from .changes import adapted_fingerprint, apply_changes, changed_fingerprint
from .checkpoint import INDEX_FILE, check_directory, fingerprint, read_index, variants_for, weight_components
from .components import hollow, load_component, load_pipeline, on_meta
from .decoder import ImageDecoder
from .defaults import read_defaults
from .offload import TEXT_ENCODER
from .placement import name_of, quiet_libraries, resolve_device, resolve_dtype
from .source import locate_model
from .stage_process import StageSettings


def follow_torchrun(spec: str, options: ParallelOptions) -> int | None:
    """Follow rank 0 until it ends, if torchrun has started this process as another rank of the same command.

    Args:
        spec: name of the model, as in `load_model`.
        options: options of the ranks.

    Returns:
        The exit code of this process; None if it is rank 0, or torchrun has not started it.
    """
    run = TorchRun.from_environment(options)
    return None if run is None or not run.rank else run.follow(lambda own: _load_found(spec, own))


def _load_found(spec: str, settings: RankSettings) -> RankModels:
    """Load a rank's parts from the model's folder on this machine, which may differ from that of rank 0."""
    source = locate_model(spec)
    index = read_index(source.folder / INDEX_FILE, source=spec)
    return load_rank(replace(settings, model=str(source.with_weights(index, variants_for(settings.dtype)))))


def load_rank(settings: RankSettings) -> RankModels:
    """Load the parts of a model that a rank needs, on its device. Raises what `load_model` raises."""
    folder = Path(settings.model)
    index = read_index(folder / INDEX_FILE, source=settings.model)
    device = resolve_device(settings.device)
    check_directory(folder, index, variants_for(name_of(resolve_dtype(settings.dtype, device, index["_class_name"]))))
    keep_freed_memory()
    quiet_libraries()
    components = weight_components(index)

    def load(name: str, dtype: str) -> Any:
        return load_component(folder / name, *components[name], resolve_dtype(dtype, device, index["_class_name"]))

    part = next(name for name in ("unet", "transformer") if name in components)
    denoiser, changes = load(part, settings.dtype), ModelOptions(**settings.changes)
    pipe: Any = None
    if changes.loras or changes.adapters or changes.quantize is not None:
        # Text encoders are those of rank 0; an adapter may have parts for them.
        dtype = resolve_dtype(settings.dtype, device, index["_class_name"])
        absent = {name: on_meta(folder / name, *components[name]) for name in components if name != part}
        pipe = load_pipeline(folder, index, dtype, None, set(), None, {part: denoiser} | absent)
        apply_changes(replace(changes, sampler=None), pipe)
    autoencoder = None if settings.decoder is None else load("vae", settings.decoder).to(device)
    mark = adapted_fingerprint(changes, changed_fingerprint(changes, fingerprint(folder)))
    denoiser = denoiser.to(device)
    if changes.adapters:
        ModelAdapters(pipe, changes.adapters)
    if changes.quantize == "fp8":
        check_float8(device)
        convert_to_float8(denoiser)
    return RankModels(mark, denoiser, autoencoder)


def load_stage(settings: StageSettings) -> tuple[Any, Family, ImageDecoder]:
    """Load the pipeline, its family and its decoder for a process that encodes or decodes for others.

    The weights of the denoising model are not loaded, nor are those of text encoders if the process decodes images.
    Raises what `load_model` raises.
    """
    folder = Path(settings.model)
    index = read_index(folder / INDEX_FILE, source=settings.model)
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.dtype, device, index["_class_name"])
    keep_freed_memory()
    quiet_libraries()
    components = weight_components(index)
    denoiser = next(name for name in ("unet", "transformer") if name in components)
    absent = {denoiser: hollow(folder / denoiser, components[denoiser][1], dtype)}
    if settings.part == "postprocess":
        absent |= {name: None for name in components if name.startswith(TEXT_ENCODER)}
    pipe = load_pipeline(folder, index, dtype, None, set(), None, absent)
    pipe.to(device)
    defaults = read_defaults(folder)
    family = build_family(pipe, max_sequence_length=defaults.max_sequence_length)
    return pipe, family, build_decoder(pipe, settings.options, defaults)
