"""The order of the modules of a U-Net of diffusers in a pass, and what later blocks get of earlier ones."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

_STAGES = {"conv_in": 0, "down_blocks": 1, "mid_block": 2, "up_blocks": 3}
_LAYERS = {"resnets": 0, "attentions": 1}
_RESAMPLERS = ("downsamplers", "upsamplers")


def place_of(name: str) -> tuple[int, ...]:
    """Where a module of a U-Net comes in a pass: modules list their attentions before their resnets, and the last
    blocks before the middle. What has the same place, and all of a transformer, comes in the order of modules.
    """
    stage, *parts = name.split(".")
    if stage not in _STAGES or len(parts) < 2:
        return (_STAGES.get(stage, 4),)
    block = 0 if stage == "mid_block" else int(parts.pop(0))
    kind, layer = parts[:2]
    # Resamplers come behind all layers.
    return (_STAGES[stage], block, kind not in _LAYERS, int(layer), _LAYERS.get(kind, 2))


@dataclass(frozen=True, slots=True, eq=False)
class UNetLayer:
    """A resnet, a stack of transformer blocks or a resampler.

    Attributes:
        name: in the model.
        module: itself.
        bridging: by each up block, which of the residuals that it is given were made in front of this layer and are
            used behind it; blocks that are given none of these are left out.
    """

    name: str
    module: nn.Module
    bridging: Mapping[nn.Module, tuple[bool, ...]]


def layers_of(unet: nn.Module) -> list[UNetLayer]:
    """All layers, in the order of passes."""
    modules = {name: module for name, module in unet.named_modules() if _is_layer(name)}
    names = sorted(modules, key=place_of)
    place = {name: number for number, name in enumerate(names)}
    down = [name for name in names if name.startswith("down_blocks.")]
    before_attention = {name.replace(".attentions.", ".resnets.") for name in down if ".attentions." in name}
    # The first convolution makes a residual, then each resnet or the attention behind it, and each down-sampler.
    made = [-1, *(place[name] for name in down if name not in before_attention)]
    spans: dict[nn.Module, list[tuple[int, int]]] = {}
    for number, block in enumerate(unet.get_submodule("up_blocks").children()):
        used = [at for name, at in place.items() if name.startswith(f"up_blocks.{number}.resnets.")]
        # Each resnet takes the last residual that is left, and the block is given them in the order of making.
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
