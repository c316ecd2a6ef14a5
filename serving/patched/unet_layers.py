"""The order of a diffusers U-Net's modules in a pass, and the residuals that later blocks get from earlier ones."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

_STAGES = {"conv_in": 0, "down_blocks": 1, "mid_block": 2, "up_blocks": 3}
_LAYERS = {"resnets": 0, "attentions": 1}
_RESAMPLERS = ("downsamplers", "upsamplers")


def place_of(name: str) -> tuple[int, ...]:
    """Return a sort key for the order of a U-Net's modules in a pass.

    A module list differs from this order: it has attentions before resnets, and up blocks before the middle. Modules
    with equal keys, and all modules of a transformer, run in the order of the list.
    """
    stage, *parts = name.split(".")
    if stage not in _STAGES or len(parts) < 2:
        return (_STAGES.get(stage, 4),)
    block = 0 if stage == "mid_block" else int(parts.pop(0))
    kind, layer = parts[:2]
    # Resamplers come after all layers.
    return (_STAGES[stage], block, kind not in _LAYERS, int(layer), _LAYERS.get(kind, 2))


@dataclass(frozen=True, slots=True, eq=False)
class UNetLayer:
    """A resnet, a stack of transformer blocks or a resampler.

    Attributes:
        name: name in the model.
        module: the module.
        bridging: for each up block, which of its residuals are produced before this layer and used after it. Blocks
            without such a residual are left out.
    """

    name: str
    module: nn.Module
    bridging: Mapping[nn.Module, tuple[bool, ...]]


def layers_of(unet: nn.Module) -> list[UNetLayer]:
    """Return all layers in the order of a pass."""
    modules = {name: module for name, module in unet.named_modules() if _is_layer(name)}
    names = sorted(modules, key=place_of)
    place = {name: number for number, name in enumerate(names)}
    down = [name for name in names if name.startswith("down_blocks.")]
    before_attention = {name.replace(".attentions.", ".resnets.") for name in down if ".attentions." in name}
    # The first convolution produces a residual, then each resnet or the attention after it, and each down-sampler.
    made = [-1, *(place[name] for name in down if name not in before_attention)]
    spans: dict[nn.Module, list[tuple[int, int]]] = {}
    for number, block in enumerate(unet.get_submodule("up_blocks").children()):
        used = [at for name, at in place.items() if name.startswith(f"up_blocks.{number}.resnets.")]
        # Each resnet takes the last remaining residual, and the block receives them in the order of production.
        spans[block] = [(made.pop(), at) for at in used][::-1]
    return [
        UNetLayer(
            name,
            modules[name],
            {
                block: bridging
                for block, own in spans.items()
                if any(bridging := tuple(begin < number < end for begin, end in own))
            },
        )
        for name, number in place.items()
    ]


def _is_layer(name: str) -> bool:
    *_, kind, number = ["", *name.split(".")]
    return number.isdecimal() and (kind in _LAYERS or kind in _RESAMPLERS)


def unet_level(name: str, num_levels: int) -> int:
    """Return the level of the input of a U-Net's convolution, from its name in diffusers."""
    parts = name.split(".")
    if parts[0] == "down_blocks":
        return int(parts[1])
    if parts[0] == "mid_block":
        return num_levels - 1
    if parts[0] == "up_blocks":
        # An up-sampler's convolution runs after the up-sampling.
        return num_levels - 1 - int(parts[1]) - (parts[2] == "upsamplers")
    return 0
