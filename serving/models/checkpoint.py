"""Checks that a diffusers directory is supported, complete and undamaged, before anything heavy is imported.

diffusers and transformers fill in missing tensors with random ones, and report a truncated file with a traceback from
inside safetensors. These checks read a few kilobytes per file and name the damaged file.
"""

import hashlib
from collections.abc import Container, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from ...data.errors import RunError, UsageError
from ..families.table import SUPPORTED_PIPELINES
from .defaults import read_json

INDEX_FILE = "model_index.json"
# Components that hold weights, by the prefix of their name in model_index.json.
_WEIGHT_COMPONENTS = ("unet", "transformer", "vae", "text_encoder", "image_encoder")
_PICKLED = (".bin", ".ckpt", ".pt", ".pth")
_VOCABULARIES = ("tokenizer.json", "vocab.json", "spiece.model")


def read_index(path: Path, *, source: str) -> dict[str, Any]:
    """Read `model_index.json` of the model that the user calls `source`; check that its pipeline class is supported.

    Raises:
        UsageError: if the pipeline class is not supported (the message lists the supported ones).
        RunError: if the file is not a diffusers index.
    """
    index = read_json(path)
    name = index.get("_class_name")
    if not isinstance(name, str):
        raise RunError(f"{path} names no pipeline class (_class_name): not a diffusers pipeline")
    if name not in SUPPORTED_PIPELINES:
        raise UsageError(
            f"model {source}: pipeline class {name} is not supported; supported: {', '.join(SUPPORTED_PIPELINES)}"
        )
    return index


def weight_components(index: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the components that hold weights: name -> (library, class)."""
    return {
        name: (entry[0], entry[1])
        for name, entry in index.items()
        if name.startswith(_WEIGHT_COMPONENTS) and isinstance(entry, list) and entry[0] is not None
    }


def variants_for(dtype: str) -> tuple[str | None, ...]:
    """Return the variants of weight files, as in `model.fp16.safetensors`, in order of preference for this dtype.

    None stands for files without a variant. 16-bit files in place of 32-bit ones change nothing if the dtype is float16
    anyway.
    """
    return ("fp16", None, "bf16") if dtype == "float16" else (None, "fp16", "bf16")


def check_directory(
    model_dir: Path, index: dict[str, Any], variants: Sequence[str | None], elsewhere: Container[str] = ()
) -> None:
    """Check that every component of the pipeline is present, with complete weights in the first variant that it has.

    The weights of components that are `elsewhere` are not checked.

    Raises:
        RunError: naming the missing or damaged file, or a missing package.
    """
    for name, entry in index.items():
        if not isinstance(entry, list) or entry[0] is None:
            continue
        folder = model_dir / name
        if not folder.is_dir():
            raise RunError(f"model {model_dir}: folder {name}/ is missing, but {INDEX_FILE} names it")
        if name in weight_components(index):
            read_json(folder / "config.json")
            for weights in () if name in elsewhere else weight_files(folder, variants).files:
                check_safetensors(weights)
        elif name.startswith("tokenizer") and not any((folder / file).is_file() for file in _VOCABULARIES):
            # transformers would invent a vocabulary of three words.
            raise RunError(f"missing vocabulary: none of {', '.join(_VOCABULARIES)} in {folder}")
        elif reads_images(name, entry[1]) and find_spec("torchvision") is None:
            raise RunError(f"model {model_dir}: its {entry[1]} reads images, too, and needs torchvision: install it")
        elif name == "scheduler":
            read_json(folder / "scheduler_config.json")


def reads_images(name: str, kind: str) -> bool:
    """Return whether a component of this name and class turns texts and images into tokens together."""
    return name.startswith(("tokenizer", "processor")) and kind.endswith("Processor")


class Weights(NamedTuple):
    """The weights of one component: their files and their variant, such as `fp16`."""

    files: list[Path]
    variant: str | None


def weight_files(folder: Path, variants: Sequence[str | None]) -> Weights:
    """Return the safetensors files of one component in the first of these variants that it has.

    A shard index is followed if there is one.

    Raises:
        RunError: if there are none, or the shard index names a missing file.
    """
    for variant in variants:
        mark = "" if variant is None else f".{variant}"
        for stem in ("diffusion_pytorch_model", "model"):
            shards = folder / f"{stem}.safetensors.index{mark}.json"
            if shards.is_file():
                weight_map = read_json(shards).get("weight_map")
                if not isinstance(weight_map, dict):
                    raise RunError(f"{shards} has no weight_map")
                return Weights([folder / name for name in sorted(set(weight_map.values()))], variant)
            single = folder / f"{stem}{mark}.safetensors"
            if single.is_file():
                return Weights([single], variant)
    pickled = sorted(path for path in folder.iterdir() if path.suffix in _PICKLED)
    if pickled:
        raise RunError(f"{pickled[0]}: pickled weights are not loaded; convert them to safetensors")
    raise RunError(f"missing weights: no .safetensors file in {folder}")


def refuse_file(path: Path) -> UsageError:
    """Return the error for a file that was given as a model and is not a checkpoint."""
    if path.suffix in _PICKLED:
        return UsageError(f"{path}: pickled weights are not loaded, as they can run code; convert them to safetensors")
    return UsageError(
        f"model {path} is a file; a .safetensors checkpoint, or a diffusers directory with {INDEX_FILE}, is expected"
    )


def check_safetensors(path: Path) -> list[str]:
    """Check that a safetensors file is as long as its header says, and return the names of its tensors.

    Raises:
        RunError: naming the file, if it is missing, not safetensors, or truncated.
    """
    if not path.is_file():
        raise RunError(f"missing file {path}")
    try:
        with safe_open(path, "np") as file:
            return list(file.keys())
    except SafetensorError as error:
        size = path.stat().st_size
        raise RunError(f"{path} is truncated, corrupt or not a safetensors file ({size} bytes): {error}") from error


def fingerprint(model_dir: Path, file: Path | None = None) -> str:
    """Return a short hash of the files that make up the model: index, components and a single-file checkpoint, if any.

    Other files beside the index, such as model cards and defaults, do not count. Small files are hashed as a whole,
    large weights by their size and both ends, so that a model of many gigabytes takes milliseconds.
    """
    chunk = 1 << 20
    digest = hashlib.sha256()
    parts = (path for path in model_dir.glob("*/**/*") if path.is_file() and path.suffix in (".json", ".safetensors"))
    for path in [*sorted([model_dir / INDEX_FILE, *parts]), *filter(None, [file])]:
        size = path.stat().st_size
        name = "" if path == file else path.relative_to(model_dir).as_posix()
        digest.update(f"{name}:{size}\n".encode())
        with path.open("rb") as opened:
            digest.update(opened.read(chunk))
            if size > 2 * chunk:
                opened.seek(-chunk, 2)
            digest.update(opened.read(chunk))
    return digest.hexdigest()[:16]
