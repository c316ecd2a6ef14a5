"""Changes of a model before it is served: another sampler, fused adapters (LoRA), and quantised weights."""

import hashlib
import importlib
import importlib.util
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...data.errors import MissingExtraError, RunError, UsageError
from ..conflicts import refuse_conflicts
from ..options import Lora, ModelOptions
from ..samplers.names import SCHEDULERS
from .checkpoint import check_safetensors
from .defaults import read_json

_DORA_OF_KOHYA = ".dora_scale"
"""Suffix of the tensors that diffusers ignores in a DoRA in kohya's format; without them, images would be wrong."""
_DOWN = re.compile(r"lora(_linear_layer|_embedding)?(\.down|_A)(\.|$)")
"""Pattern in the name of one tensor of each layer that an adapter changes, in the formats that diffusers converts."""
_OF_FLOWS = "FlowMatch"
"""Prefix of the scheduler classes for models that predict a flow."""


def check_changes(options: ModelOptions, model_dir: Path) -> None:
    """Check the changes before weights are loaded.

    Raises:
        UsageError: the file of an adapter does not exist, its format is not supported or would load incorrectly, or the
            model supports no other sampler.
        MissingExtraError: a package for adapters or quantised weights is not installed.
        RunError: the file of an adapter is damaged.
    """
    for option, given in (("--lora", options.loras), ("--adapter", options.adapters)):
        for each in given:
            if not each.path.is_file():
                raise UsageError(f"{option} {each.path}: there is no such file; a .safetensors file is expected")
            if each.path.suffix != ".safetensors":
                raise UsageError(
                    f"{option} {each.path}: only .safetensors files are loaded, as pickled weights can run code"
                )
            if num_dora := sum(name.endswith(_DORA_OF_KOHYA) for name in check_safetensors(each.path)):
                raise UsageError(
                    f"{option} {each.path}: {num_dora} of its layers are DoRA in kohya's format (dora_scale), which "
                    "diffusers does not apply; give a plain LoRA"
                    + (", or a DoRA in peft's format (lora_magnitude_vector)" if option == "--lora" else "")
                )
    if (options.loras or options.adapters) and any(
        importlib.util.find_spec(name) is None for name in ("peft", "accelerate")
    ):
        raise MissingExtraError("peft", "lora")
    if options.quantize == "int8" and importlib.util.find_spec("torchao") is None:
        raise MissingExtraError("torchao", "quantize")
    if options.sampler is not None:
        own = read_json(model_dir / "scheduler" / "scheduler_config.json").get("_class_name")
        if str(own).startswith(_OF_FLOWS):
            sampler = f"--sampler {options.sampler}"
            refuse_conflicts({"--sampler": sampler, "a model that predicts a flow": f"a model with {own}"})


def changed_fingerprint(options: ModelOptions, fingerprint: str) -> str:
    """Return the fingerprint of a model with these changes, so that no measurements are shared with other changes."""
    if not options.is_any:
        return fingerprint
    of_loras = (f"{lora.scale}:{_digest_of(lora.path)}\n" for lora in options.loras)
    return _fingerprint_of(fingerprint, f"{options.sampler}\n", *of_loras, options.quantize or "")


def adapted_fingerprint(options: ModelOptions, fingerprint: str) -> str:
    """Return the fingerprint of a model with the adapters that requests may name, which all ranks must have."""
    of_adapters = [f"{each.name}:{_digest_of(each.path)}\n" for each in options.adapters]
    return _fingerprint_of(fingerprint, *of_adapters) if of_adapters else fingerprint


def _fingerprint_of(fingerprint: str, *changes: str) -> str:
    return hashlib.sha256(f"{fingerprint}:{''.join(changes)}".encode()).hexdigest()[:16]


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def apply_changes(options: ModelOptions, pipe: Any) -> None:
    """Apply the changes to a loaded pipeline, except for `--quantize fp8` (`core.float8`), which is done on its device.

    Raises RunError if an adapter does not fit it.
    """
    import diffusers

    if options.sampler is not None:
        name, given = SCHEDULERS[options.sampler]
        pipe.scheduler = getattr(diffusers, name).from_config(pipe.scheduler.config, **given)
    if options.loras:
        _fuse(pipe, options.loras)
    if options.quantize == "int8":
        _quantize(pipe)


def _fuse(pipe: Any, loras: Sequence[Lora]) -> None:
    """Fuse adapters into the weights, as diffusers does; the adapters themselves are removed from the model."""
    names = [f"lora{index}" for index in range(len(loras))]
    for name, lora in zip(names, loras, strict=True):
        load_layers(pipe, lora.path, name, f"--lora {lora.path}")
    pipe.set_adapters(names, adapter_weights=[lora.scale for lora in loras])
    pipe.fuse_lora(components=list(pipe.get_list_adapters()), adapter_names=names)
    pipe.unload_lora_weights()


def load_layers(pipe: Any, path: Path, name: str, given: str) -> None:
    """Load an adapter with diffusers, as layers of peft around the pipeline's own.

    A line on stderr counts layers of the adapter that the model lacks. Raises RunError if the adapter fits no layer, or
    has another shape; the error quotes how the adapter was `given`.
    """
    try:
        with warnings.catch_warnings():
            # Several adapters are intended.
            warnings.filterwarnings("ignore", "Already found a `peft_config` attribute")
            pipe.load_lora_weights(path.parent, weight_name=path.name, adapter_name=name)
    except Exception as error:  # whatever diffusers and peft raise for an adapter of another model
        raise RunError(f"{given} does not fit the model: {str(error).strip().splitlines()[0]}") from error
    if not any(name in found for found in pipe.get_list_adapters().values()):
        raise RunError(f"{given} does not fit the model: it has weights for none of its layers")
    num_layers, num_loaded = _num_layers(pipe, path), _num_loaded(pipe, name)
    if num_loaded < num_layers:
        missing = f"{num_layers - num_loaded} of its {num_layers} layers are not in the model, and have no effect"
        sys.stderr.write(f"Warning: {given}: {missing}\n")


def _num_layers(pipe: Any, path: Path) -> int:
    """Return the number of layers in the file of an adapter, counted by the names that diffusers gives them."""
    # As `load_lora_weights` does; kohya's names depend on it.
    config = {"unet_config": pipe.unet.config} if hasattr(pipe, "unet") else {}
    found = pipe.lora_state_dict(path.parent, weight_name=path.name, **config)
    state = found[0] if isinstance(found, tuple) else found
    return sum(_DOWN.search(key) is not None for key in state)


def _num_loaded(pipe: Any, name: str) -> int:
    """Return the number of layers of a pipeline that the adapter with this name in peft changes."""
    from peft.tuners.lora import LoraLayer

    parts = [getattr(pipe, part) for part in pipe.get_list_adapters()]
    layers = [layer for part in parts for layer in part.modules() if isinstance(layer, LoraLayer)]
    return sum(name in layer.lora_A or name in layer.lora_embedding_A for layer in layers)


def _quantize(pipe: Any) -> None:
    """Quantise the weights of the denoising model's linear layers to 8 bits, as diffusers does with these settings."""
    from ..core.denoiser import denoiser_of

    torchao = importlib.import_module("torchao.quantization")
    torchao.quantize_(denoiser_of(pipe), torchao.Int8WeightOnlyConfig())
