"""The table of options that do not work together or with a kind of model, each pair with its reason. No torch.

Every refusal of such a pair is read from this table, and a test compares it with the one in docs/families.md.
"""

from collections.abc import Mapping
from typing import NamedTuple

from ..data.errors import UsageError
from .families.table import FAMILIES


class Conflict(NamedTuple):
    """Two features that do not work together: options, kinds of engines or models, named as users write them."""

    one: str
    other: str
    reason: str


_WITH_OUTPUTS = ("StableDiffusionPipeline", "StableDiffusionXLPipeline", "StableDiffusion3Pipeline")
"""Pipelines whose edits need only the outputs of transformer blocks."""
_OTHERS = [name for name in FAMILIES if name not in _WITH_OUTPUTS]
_TRANSFORMERS = [name for name, entry in FAMILIES.items() if entry.model != "UNet2DConditionModel"]
_STAGES_LOAD = "its processes load the model's own files"
_ENCODERS_LOAD = "text encoders are read again from the model's own files"
_OTHER_PATCHES = "but each step computes other patches; --cache schedule and accumulated work"

CONFLICTS = (
    *(
        Conflict(option, engine, "it is only for --engine patched")
        for option in ("--order", "--patch-size", "--strategy", "--kernels", "--cache")
        for engine in ("--engine plain", "--parallel")
    ),
    Conflict("--parallel", "--engine patched", "ranks are an engine of their own; leave one of them out"),
    Conflict("--parallel", "--engine plain", "ranks are an engine of their own; leave one of them out"),
    Conflict("--kernels triton", "--order image", "these kernels work on patches; use --order patch"),
    Conflict("--compile", "--parallel", "it makes graphs of whole blocks, but ranks exchange tensors within them"),
    Conflict("--compile", "a cache of blocks", f"it makes graphs of whole blocks, {_OTHER_PATCHES}"),
    Conflict("--cuda-graphs", "a cache of blocks", f"it records whole passes, {_OTHER_PATCHES}"),
    Conflict("--adapter", "a cache of blocks", f"adapters are applied to whole batches, {_OTHER_PATCHES}"),
    *(Conflict("--stages processes", option, _STAGES_LOAD) for option in ("--lora", "--adapter")),
    Conflict("--stages processes", "--offload text", "its processes keep their text encoders"),
    Conflict("--stages processes", "--parallel-decode strips", "its processes decode whole images"),
    Conflict("--decoder-dtype", "--parallel-decode strips", "ranks decode strips in the autoencoder's own format"),
    Conflict("--stages processes", "a single file", "its processes load a diffusers directory"),
    Conflict("--parallel", "a single file", "ranks load a diffusers directory"),
    *(Conflict("--offload text on a CPU", what, _ENCODERS_LOAD) for what in ("--lora", "--adapter")),
    Conflict("--offload text on a CPU", "a single file", "text encoders are read again from a diffusers directory"),
    Conflict("--sampler", "a model that predicts a flow", "the samplers are for models that predict noise"),
    Conflict("--reuse", "--engine plain", "only --engine patched computes parts of images"),
    Conflict("--reuse", "--parallel", "only --engine patched computes parts of images"),
    Conflict("--reuse", "--cache", "both select what a step computes; --cache schedule works"),
    Conflict("--reuse", "--compile", "its graphs are of blocks that compute whole images"),
    Conflict("--reuse", "--use-adapter", "records are of the model without adapters"),
    Conflict("--reference", "--parallel", "ranks divide the tokens of drawn images only"),
    Conflict("--reference", "--cache", "it keeps results of drawn images only; --cache schedule works"),
    Conflict("--reference", "--reuse", "records are of passes that see no references"),
    Conflict("--controlnet", "--parallel", "ranks divide the model itself only"),
    Conflict("--controlnet", "--cache", "it keeps results of the model itself only; --cache schedule works"),
    Conflict("--control", "--reuse", "records are of passes without ControlNets"),
    *(Conflict("--controlnet", name, "only ControlNets of U-Nets are served") for name in _TRANSFORMERS),
    Conflict("--edit-link-mbps", "--cuda-graphs", "it plans by the times of parts of passes, which are one recording"),
    Conflict("--breakdown", "--cuda-graphs", "it times single modules, which are one recording"),
    Conflict("--breakdown", "--compile", "it times single modules, which are one graph"),
    *(Conflict("--keep outputs", name, "its blocks need more; give --keep kv or all") for name in _OTHERS),
    Conflict("--adapter", "OvisImagePipeline", "diffusers loads none into this pipeline"),
    Conflict("--adapter", "PixArtSigmaPipeline", "diffusers loads none into this pipeline"),
    Conflict("--adapter", "ZImagePipeline", "adapters are not applied to the padding of its images"),
)


def conflict_in(given: Mapping[str, str]) -> str | None:
    """Return the first conflict between features as one line that names both and the reason; None if there is none.

    Args:
        given: features in use, by their name in `CONFLICTS`, each as the user wrote it. Others are ignored.
    """
    for one, other, reason in CONFLICTS:
        if one in given and other in given:
            return f"{given[one]} does not work with {given[other]}: {reason}"
    return None


def refuse_conflicts(given: Mapping[str, str]) -> None:
    """Raise UsageError if two features do not work together. `given` is as in `conflict_in`."""
    if (conflict := conflict_in(given)) is not None:
        raise UsageError(conflict)
