"""Checks of a diffusers directory before anything heavy is imported: is it all there, and is it whole?

diffusers and transformers load a directory with missing tensors by drawing random ones, and report a truncated file
by a traceback from inside safetensors. These checks read a few kilobytes per file and name the file that is at fault.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from ...data.errors import RunError, UsageError
from .families import SUPPORTED_PIPELINES

_INDEX_FILE = "model_index.json"
# Components that hold weights, by the prefix of their name in model_index.json.
_WEIGHT_COMPONENTS = ("unet", "transformer", "vae", "text_encoder", "image_encoder")
_VOCABULARIES = ("tokenizer.json", "vocab.json", "spiece.model")
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


def read_index(path: Path, *, source: str) -> dict[str, Any]:
    """Read `model_index.json` and check that its pipeline class is served.

    Args:
        path: the file.
        source: how the user named the model; used in messages.

    Raises:
        UsageError: if the pipeline class is not supported (the message lists the supported ones).
        RunError: if the file is not a diffusers index.
    """
    index = _read_json(path)
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


def check_directory(model_dir: Path, index: dict[str, Any]) -> None:
    """Check that every component of the pipeline is present and its weights are whole.

    Raises:
        RunError: naming the missing or damaged file.
    """
    for name, entry in index.items():
        if not isinstance(entry, list) or entry[0] is None:
            continue
        folder = model_dir / name
        if not folder.is_dir():
            raise RunError(f"model {model_dir}: folder {name}/ is missing, but {_INDEX_FILE} names it")
        if name in weight_components(index):
            config = folder / "config.json"
            if not config.is_file():
                raise RunError(f"missing file {config}")
            _read_json(config)
            for weights in weight_files(folder):
                check_safetensors(weights)
        elif name.startswith("tokenizer") and not any((folder / file).is_file() for file in _VOCABULARIES):
            # transformers would make up a vocabulary of three words.
            raise RunError(f"missing vocabulary: none of {', '.join(_VOCABULARIES)} in {folder}")
        elif name == "scheduler":
            config = folder / "scheduler_config.json"
            if not config.is_file():
                raise RunError(f"missing file {config}")
            _read_json(config)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of one component, following a shard index where there is one.

    Raises:
        RunError: if there are none, or the shard index names a file that is not there.
    """
    for stem in ("diffusion_pytorch_model", "model"):
        shards = folder / f"{stem}.safetensors.index.json"
        if shards.is_file():
            weight_map = _read_json(shards).get("weight_map")
            if not isinstance(weight_map, dict):
                raise RunError(f"{shards} has no weight_map")
            return [folder / name for name in sorted(set(weight_map.values()))]
        single = folder / f"{stem}.safetensors"
        if single.is_file():
            return [single]
    pickled = sorted([*folder.glob("*.bin"), *folder.glob("*.ckpt"), *folder.glob("*.pt")])
    if pickled:
        raise RunError(f"{pickled[0]}: pickled weights are not loaded; convert them to safetensors")
    raise RunError(f"missing weights: no .safetensors file in {folder}")


def check_safetensors(path: Path) -> None:
    """Check that a safetensors file has the length that its header announces.

    Raises:
        RunError: naming the file, if it is missing, not safetensors, or truncated.
    """
    if not path.is_file():
        raise RunError(f"missing file {path}")
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise RunError(f"{path} is truncated or not a safetensors file ({size} bytes)")
        try:
            header = json.loads(file.read(header_bytes))
            end = max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RunError(f"{path} is corrupt: its safetensors header cannot be read") from error
    expected = 8 + header_bytes + end
    if size != expected:
        raise RunError(f"{path} is truncated or damaged: {size} bytes, its header announces {expected}")


def fingerprint(model_dir: Path) -> str:
    """Return a short hash that changes when the files change of which the model consists: its index and its parts.

    What else lies beside the index, as our cards and defaults, does not count. Small files are hashed whole; of large
    weights the size and both ends, so that a model of many gigabytes takes milliseconds.
    """
    chunk = 1 << 20
    digest = hashlib.sha256()
    parts = (path for path in model_dir.glob("*/**/*") if path.is_file() and path.suffix in (".json", ".safetensors"))
    for path in sorted([model_dir / "model_index.json", *parts]):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(model_dir).as_posix()}:{size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(chunk))
            if size > 2 * chunk:
                file.seek(-chunk, 2)
            digest.update(file.read(chunk))
    return digest.hexdigest()[:16]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise RunError(f"{path} is corrupt: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise RunError(f"{path} is corrupt: a JSON object is expected")
    return content
